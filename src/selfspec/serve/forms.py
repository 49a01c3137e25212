"""From answers to the bodies of ``/v1/chat/completions`` and ``/v1/completions``."""

import uuid
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

from transformers import PreTrainedTokenizerBase

from selfspec.serve.answer import Answer, usage
from selfspec.serve.responses import (
    AnswerMessage,
    ApiFinishReason,
    CalledFunction,
    CalledTool,
    ChatChoice,
    ChatChunk,
    ChatCompletion,
    ChatLogprobs,
    ChunkChoice,
    Completion,
    CompletionChoice,
    CompletionLogprobs,
    Delta,
    TokenLogprob,
    TopLogprob,
    Usage,
)
from selfspec.serve.tools import ParsedCall
from selfspec.types import TextPiece, TokenLogprobs

_Scored: TypeAlias = tuple[str, int, TokenLogprobs | None]
"""A token's text, id and log-probability."""


class TokenNames:
    """Names of single tokens: their texts, special tokens included, or ``token_id:ID``, since several have one text."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, *, as_ids: bool = False) -> None:
        self._tokenizer, self._as_ids = tokenizer, as_ids
        self._names: dict[int, str] = {}

    def __call__(self, token_id: int) -> str:
        """The name of a token."""
        if self._as_ids:
            return f"token_id:{token_id}"
        if token_id not in self._names:
            self._names[token_id] = str(self._tokenizer.decode([token_id], skip_special_tokens=False))
        return self._names[token_id]


class ChatForm:
    """The bodies of an answered chat.

    Args:
        head: fields that all bodies have: ``id``, ``created``, ``model``, ``system_fingerprint``.
        names: of tokens.
    """

    def __init__(self, head: dict[str, Any], names: TokenNames) -> None:
        self._head, self._names = head, names

    def whole(self, answers: Sequence[Answer], prompts: int) -> ChatCompletion:
        """The body that is not a stream."""
        body = ChatCompletion(
            **self._head,
            object="chat.completion",
            choices=[self._choice(answer) for answer in answers],
            usage=usage(answers, prompts),
        )
        if answers[0].options.report:
            body.selfspec = answers[0].report
        return body

    def first(self, answer: Answer) -> ChatChunk:
        """The chunk that an answer begins with."""
        return self._chunk(answer, Delta(role="assistant", content=""))

    def chunk(self, answer: Answer, pieces: Sequence[TextPiece], text: str, calls: Sequence[ParsedCall]) -> ChatChunk:
        """The chunk with the text and the calls that some pieces add."""
        delta = Delta(content=text) if text or not calls else Delta()
        if calls:
            before = len(answer.calls) - len(calls)
            delta.tool_calls = [CalledTool(index=before + index, **_called(call)) for index, call in enumerate(calls)]
        chunk = self._chunk(answer, delta, pieces)
        if answer.options.report:
            chunk.selfspec = answer.report_pieces(pieces)
        return chunk

    def last(self, answer: Answer) -> ChatChunk:
        """The chunk that says why an answer ended."""
        chunk = self._chunk(answer, Delta())
        chunk.choices[0].finish_reason = answer.finish_reason
        if answer.options.report:
            chunk.selfspec = answer.report
        return chunk

    def usage(self, counted: Usage) -> ChatChunk:
        """The chunk after all answers, with the numbers of tokens."""
        return ChatChunk(**self._head, object="chat.completion.chunk", choices=[], usage=counted)

    def _choice(self, answer: Answer) -> ChatChoice:
        message = AnswerMessage(role="assistant", content=answer.text or (None if answer.calls else ""), refusal=None)
        if answer.calls:
            message.tool_calls = [CalledTool(**_called(call)) for call in answer.calls]
        return ChatChoice(
            index=answer.index,
            message=message,
            logprobs=None if answer.options.logprobs is None else self._logprobs(answer.pieces),
            finish_reason=answer.finish_reason,
        )

    def _chunk(self, answer: Answer, delta: Delta, pieces: Sequence[TextPiece] = ()) -> ChatChunk:
        logprobs = self._logprobs(pieces) if pieces and answer.options.logprobs is not None else None
        choice = ChunkChoice(index=answer.index, delta=delta, logprobs=logprobs, finish_reason=None)
        return ChatChunk(**self._head, object="chat.completion.chunk", choices=[choice])

    def _logprobs(self, pieces: Sequence[TextPiece]) -> ChatLogprobs:
        content = []
        for piece in pieces:
            assert piece.logprobs is not None, "log-probabilities were not asked for"
            top = [self._top(token_id, logprob) for token_id, logprob in piece.logprobs.top]
            own = self._top(piece.token_id, piece.logprobs.logprob)
            content.append(TokenLogprob(token=own.token, logprob=own.logprob, bytes=own.bytes, top_logprobs=top))
        return ChatLogprobs(content=content)

    def _top(self, token_id: int, logprob: float) -> TopLogprob:
        name = self._names(token_id)
        return TopLogprob(token=name, logprob=logprob, bytes=list(name.encode("utf-8", "replace")))


class CompletionForm:
    """The bodies of an answered completion.

    Args:
        head: fields that all bodies have: ``id``, ``created``, ``model``, ``system_fingerprint``.
        names: of tokens.
        echoed: the prompts' token ids with the text of each, by the index of an answer; empty without ``echo``.
    """

    def __init__(
        self, head: dict[str, Any], names: TokenNames, echoed: Mapping[int, Sequence[tuple[str, int]]] | None = None
    ) -> None:
        self._head, self._names, self._echoed = head, names, echoed or {}
        self._offsets: dict[int, int] = {}  # characters of each answer that earlier chunks had

    def whole(self, answers: Sequence[Answer], prompts: int) -> Completion:
        """The body that is not a stream."""
        body = self._body(
            [
                CompletionChoice(
                    index=answer.index,
                    text=answer.prompt + answer.text,
                    logprobs=self._logprobs(answer, answer.pieces, self._prompt(answer)),
                    finish_reason=answer.finish_reason,
                )
                for answer in answers
            ]
        )
        body.usage = usage(answers, prompts)
        if answers[0].options.report:
            body.selfspec = answers[0].report
        return body

    def first(self, answer: Answer) -> Completion | None:
        """The chunk with the prompt, where it is echoed."""
        return self._chunk(answer, answer.prompt) if answer.prompt else None

    def chunk(self, answer: Answer, pieces: Sequence[TextPiece], text: str, _: Sequence[ParsedCall]) -> Completion:
        """The chunk with the text that some pieces add."""
        chunk = self._chunk(answer, text, self._logprobs(answer, pieces))
        if answer.options.report:
            chunk.selfspec = answer.report_pieces(pieces)
        return chunk

    def last(self, answer: Answer) -> Completion:
        """The chunk that says why an answer ended."""
        chunk = self._chunk(answer, "", finish_reason=answer.finish_reason)
        if answer.options.report:
            chunk.selfspec = answer.report
        return chunk

    def usage(self, counted: Usage) -> Completion:
        """The chunk after all answers, with the numbers of tokens."""
        body = self._body([])
        body.usage = counted
        return body

    def _prompt(self, answer: Answer) -> list[_Scored]:
        echoed, known = self._echoed.get(answer.index, ()), answer.finished.prompt_logprobs
        return [(*token, logprob) for token, logprob in zip(echoed, known, strict=True)] if known else []

    def _logprobs(
        self, answer: Answer, pieces: Sequence[TextPiece], prompt: Sequence[_Scored] = ()
    ) -> CompletionLogprobs | None:
        top = answer.options.logprobs
        if top is None:
            return None
        offset = self._offsets.get(answer.index, 0 if prompt else len(answer.prompt))
        self._offsets[answer.index] = offset + sum(len(piece.text) for piece in pieces)
        listed = [*prompt, *((piece.text, piece.token_id, piece.logprobs) for piece in pieces)]
        offsets = []
        for text, _, _ in listed:
            offsets.append(offset)
            offset += len(text)
        return CompletionLogprobs(
            tokens=[self._names(token_id) for _, token_id, _ in listed],
            token_logprobs=[None if scores is None else scores.logprob for *_, scores in listed],
            top_logprobs=[None if scores is None else self._best(scores) for *_, scores in listed] if top else None,
            text_offset=offsets,
        )

    def _best(self, scores: TokenLogprobs) -> dict[str, float]:
        """Alternatives by name. Of several tokens with one name the best counts; the chosen one is among them."""
        best: dict[str, float] = {}
        for token_id, value in (*scores.top, (scores.token_id, scores.logprob)):
            name = self._names(token_id)
            best[name] = max(value, best.get(name, value))
        return best

    def _chunk(
        self,
        answer: Answer,
        text: str,
        logprobs: CompletionLogprobs | None = None,
        finish_reason: ApiFinishReason | None = None,
    ) -> Completion:
        return self._body(
            [CompletionChoice(index=answer.index, text=text, logprobs=logprobs, finish_reason=finish_reason)]
        )

    def _body(self, choices: list[CompletionChoice]) -> Completion:
        return Completion(**self._head, object="text_completion", choices=choices)


Form: TypeAlias = ChatForm | CompletionForm
"""What makes the bodies of an answered request."""


def _called(call: ParsedCall) -> dict[str, Any]:
    function = CalledFunction(name=call.name, arguments=call.arguments)
    return {"id": f"call_{uuid.uuid4().hex}", "type": "function", "function": function}
