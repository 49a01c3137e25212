"""From answers to the bodies and events of ``/infill``."""

from collections.abc import Iterator, Sequence
from typing import Any

from selfspec.serve.answer import Answer, Growth
from selfspec.serve.answer_bodies import Usage, cached_tokens
from selfspec.serve.api_errors import ApiError
from selfspec.serve.bodies import Bodies, SentEvent
from selfspec.types import TextPiece


class InfillBodies(Bodies):
    """The bodies of what was written into a gap."""

    def whole(self, answers: Sequence[Answer], usage: Usage) -> SentEvent:
        """The body that is not a stream."""
        return SentEvent(self._said(answers[0], answers[0].text, usage))

    def chunk(self, answer: Answer, pieces: Sequence[TextPiece], grown: Sequence[Growth]) -> Iterator[SentEvent]:
        """The event with the text that some pieces add."""
        if grown:
            yield SentEvent({"index": 0, "content": "".join(growth.text for growth in grown), "stop": False})

    def end(self, answers: Sequence[Answer], usage: Usage) -> Iterator[SentEvent]:
        """The event that says how it ended."""
        yield SentEvent(self._said(answers[0], "", usage))

    def failed(self, error: ApiError) -> Iterator[SentEvent]:
        """The event of an error, after which nothing comes."""
        yield SentEvent({"type": "error", **error.body}, "error")

    def _said(self, answer: Answer, text: str, usage: Usage) -> dict[str, Any]:
        cut = answer.finish_reason == "length"
        return {
            "index": 0,
            "content": text,
            "stop": True,
            "model": self._model,
            "stop_type": "limit" if cut else "word" if answer.stopped_by else "eos",
            "stopping_word": answer.stopped_by or "",
            "truncated": False,
            "tokens_predicted": usage["completion_tokens"],
            "tokens_evaluated": usage["prompt_tokens"],
            "tokens_cached": cached_tokens(usage),
        }
