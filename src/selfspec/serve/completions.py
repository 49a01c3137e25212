"""From choices to the answers of ``/v1/completions``."""

from collections.abc import Mapping, Sequence
from typing import Any

from selfspec.serve.choices import Addition, Choice, report_tokens, usage
from selfspec.serve.logprobs import TokenNames, completion_logprobs
from selfspec.serve.responses import Completion, CompletionChoice, CompletionLogprobs, FinishReason, Usage
from selfspec.types import TokenLogprobs


class CompletionForm:
    """The bodies of one request's answer.

    Args:
        head: fields that all bodies have: ``id``, ``created``, ``model``, ``system_fingerprint``.
        names: of tokens.
        echoed: the prompts' token ids with the text of each, by the index of a choice; empty without ``echo``.
    """

    def __init__(
        self, head: dict[str, Any], names: TokenNames, echoed: Mapping[int, Sequence[tuple[str, int]]] | None = None
    ) -> None:
        self._head = head
        self._names = names
        self._echoed = echoed or {}
        self._offsets: dict[int, int] = {}

    def whole(self, choices: Sequence[Choice], prompts: int) -> Completion:
        """The answer that is not a stream."""
        body = self._body(
            [
                CompletionChoice(
                    index=choice.index,
                    text=choice.prompt + choice.text,
                    logprobs=self._logprobs(choice, Addition("", (), tuple(choice.tokens)), self._prompt(choice)),
                    finish_reason=choice.finish_reason,
                )
                for choice in choices
            ]
        )
        body.usage = usage([choice.ended for choice in choices if choice.ended is not None], prompts)
        if choices[0].rules.report:
            body.selfspec = choices[0].report
        return body

    def first(self, choice: Choice) -> Completion | None:
        """The chunk with the prompt, where it is echoed."""
        return self._chunk(choice, choice.prompt) if choice.prompt else None

    def chunk(self, choice: Choice, addition: Addition) -> Completion:
        """The chunk with what some tokens add."""
        chunk = self._chunk(choice, addition.text, self._logprobs(choice, addition))
        if choice.rules.report:
            chunk.selfspec = report_tokens(addition.tokens)
        return chunk

    def last(self, choice: Choice) -> Completion:
        """The chunk that says why a choice ended."""
        chunk = self._chunk(choice, "", finish_reason=choice.finish_reason)
        if choice.rules.report:
            chunk.selfspec = choice.report
        return chunk

    def usage(self, counted: Usage) -> Completion:
        """The chunk after all choices, with the numbers of tokens."""
        body = self._body([])
        body.usage = counted
        return body

    def _prompt(self, choice: Choice) -> list[tuple[str, int, TokenLogprobs | None]]:
        echoed, ended = self._echoed.get(choice.index, ()), choice.ended
        known = () if ended is None else ended.prompt_logprobs or ()
        return [(*token, logprob) for token, logprob in zip(echoed, known, strict=True)] if known else []

    def _logprobs(
        self, choice: Choice, addition: Addition, prompt: Sequence[tuple[str, int, TokenLogprobs | None]] = ()
    ) -> CompletionLogprobs | None:
        top = choice.rules.logprobs
        if top is None:
            return None
        offset = self._offsets.get(choice.index, 0 if prompt else len(choice.prompt))
        self._offsets[choice.index] = offset + sum(len(token.text) for token in addition.tokens)
        return completion_logprobs(addition.tokens, self._names, top, offset=offset, prompt=prompt)

    def _chunk(
        self,
        choice: Choice,
        text: str,
        logprobs: CompletionLogprobs | None = None,
        finish_reason: FinishReason | None = None,
    ) -> Completion:
        return self._body(
            [CompletionChoice(index=choice.index, text=text, logprobs=logprobs, finish_reason=finish_reason)]
        )

    def _body(self, choices: list[CompletionChoice]) -> Completion:
        return Completion(**self._head, object="text_completion", choices=choices)
