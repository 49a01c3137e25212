"""From answers to the bodies and events of ``/v1/messages``."""

import uuid
from collections.abc import Iterator, Sequence
from typing import Any

from selfspec.serve.answer import Answer, Block, Growth
from selfspec.serve.answer_bodies import Usage, cached_tokens
from selfspec.serve.api_errors import ApiError
from selfspec.serve.bodies import Bodies, SentEvent
from selfspec.serve.chats import as_object
from selfspec.types import TextPiece


class MessageBodies(Bodies):
    """The bodies of an answered message. Its blocks are those of the answer: reasoning, text and calls."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self._id = f"msg_{uuid.uuid4().hex[:24]}"
        self._open: int | None = None  # the block that is being written

    def whole(self, answers: Sequence[Answer], usage: Usage) -> SentEvent:
        """The body that is not a stream."""
        [answer] = answers
        content = [_block(block, whole=True) for block in answer.blocks]
        return SentEvent({**self._message(content, usage), **_stop(answer)})

    def start(self, usage: Usage) -> Iterator[SentEvent]:
        """The event that a stream begins with."""
        yield _event("message_start", message=self._message([], usage))
        yield _event("ping")

    def chunk(self, answer: Answer, pieces: Sequence[TextPiece], grown: Sequence[Growth]) -> Iterator[SentEvent]:
        """The events of what some pieces add."""
        for growth in grown:
            if growth.began:
                yield from self._close()
                self._open = growth.index
                block = _block(growth.block, whole=False)
                yield _event("content_block_start", index=growth.index, content_block=block)
            if growth.text:
                delta = _delta(growth.block, growth.text)
                yield _event("content_block_delta", index=growth.index, delta=delta)

    def last(self, answer: Answer) -> Iterator[SentEvent]:
        """The event that ends the last block."""
        return self._close()

    def end(self, answers: Sequence[Answer], usage: Usage) -> Iterator[SentEvent]:
        """The events that say why the answer ended."""
        [answer] = answers
        yield _event("message_delta", delta=_stop(answer), usage=_usage(usage))
        yield _event("message_stop")

    def failed(self, error: ApiError) -> Iterator[SentEvent]:
        """The event of an error, after which nothing comes."""
        yield SentEvent(error.messages_body, "error")

    def ping(self) -> str:
        """What says in a stream that it is alive."""
        return self.event(_event("ping"))

    def _close(self) -> Iterator[SentEvent]:
        if self._open is not None:
            yield _event("content_block_stop", index=self._open)
        self._open = None

    def _message(self, content: Sequence[Any], usage: Usage) -> dict[str, Any]:
        return {
            "id": self._id,
            "type": "message",
            "role": "assistant",
            "model": self._model,
            "content": content,
            "stop_reason": None,
            "stop_sequence": None,
            "usage": _usage(usage),
        }


def _event(name: str, **fields: Any) -> SentEvent:
    return SentEvent({"type": name, **fields}, name)


def _block(block: Block, *, whole: bool) -> dict[str, Any]:
    """A block, or what it is before anything is in it."""
    text = block.text if whole else ""
    if block.kind == "call":
        return {"type": "tool_use", "id": block.id, "name": block.name, "input": as_object(text) if whole else {}}
    if block.kind == "reasoning":
        return {"type": "thinking", "thinking": text, "signature": ""}
    return {"type": "text", "text": text, "citations": None}


def _delta(block: Block, text: str) -> dict[str, Any]:
    match block.kind:
        case "call":
            return {"type": "input_json_delta", "partial_json": text}
        case "reasoning":
            return {"type": "thinking_delta", "thinking": text}
    return {"type": "text_delta", "text": text}


def _stop(answer: Answer) -> dict[str, Any]:
    reasons = {"length": "max_tokens", "tool_calls": "tool_use"}
    reason = reasons.get(answer.finish_reason, "stop_sequence" if answer.stopped_by else "end_turn")
    return {"stop_reason": reason, "stop_sequence": answer.stopped_by if reason == "stop_sequence" else None}


def _usage(usage: Usage) -> dict[str, Any]:
    """Numbers of tokens; those that were not read again are not in ``input_tokens``."""
    return {
        "input_tokens": usage["prompt_tokens"] - cached_tokens(usage),
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached_tokens(usage),
        "output_tokens": usage["completion_tokens"],
    }
