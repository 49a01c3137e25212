"""From answers to the bodies of ``/v1/chat/completions`` and ``/v1/completions``."""

import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

from pydantic_core import to_json
from transformers import PreTrainedTokenizerBase

from selfspec import __version__
from selfspec.serve.answer import Answer, Growth
from selfspec.serve.api_errors import ApiError
from selfspec.serve.requests import GenerationRequest
from selfspec.serve.responses import (
    AnswerMessage,
    ApiFinishReason,
    Body,
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
    ErrorBody,
    TokenLogprob,
    TopLogprob,
    Usage,
)
from selfspec.serve.token_text import token_text
from selfspec.types import TextPiece, TokenLogprobs


class Sendable(Protocol):
    """A body, or what an event of a stream holds."""

    def to_json(self) -> str:
        """The JSON of it."""


@dataclass(frozen=True, slots=True)
class TextChunk:
    """A chunk of a stream that adds nothing but text: what is ``before`` and ``after`` the text's JSON stays."""

    before: str
    text: str
    after: str

    def to_json(self) -> str:
        """The JSON of the chunk."""
        return f"{self.before}{to_json(self.text).decode()}{self.after}"


_MARK = "\0"
"""Stands for the text in a chunk, where it is the last of its kind."""

_Scored: TypeAlias = tuple[str, int, TokenLogprobs | None]
"""A token's text, id and log-probability."""


class Bodies(ABC):
    """The bodies of one request, and the events of its stream, in the order in which they are sent."""

    done = ""
    """What a stream ends with."""

    @abstractmethod
    def whole(self, answers: Sequence[Answer], usage: Usage) -> Sendable:
        """The body that is not a stream."""

    def start(self, usage: Usage) -> Iterable[Sendable]:
        """What a stream begins with."""
        return ()

    def first(self, answer: Answer) -> Iterable[Sendable]:
        """What an answer begins with."""
        return ()

    @abstractmethod
    def chunk(self, answer: Answer, pieces: Sequence[TextPiece], grown: Sequence[Growth]) -> Iterable[Sendable]:
        """What some pieces add to an answer."""

    def last(self, answer: Answer) -> Iterable[Sendable]:
        """What an answer ends with."""
        return ()

    def end(self, answers: Sequence[Answer], usage: Usage) -> Iterable[Sendable]:
        """What comes after all answers."""
        return ()

    @abstractmethod
    def failed(self, error: ApiError) -> Iterable[Sendable]:
        """An error on the way, after which nothing comes."""

    def ping(self) -> str:
        """What says in a stream that it is alive: a comment, where clients take no event without content."""
        return ": ping\n\n"

    @abstractmethod
    def event(self, body: Any) -> str:
        """A server-sent event."""


class _RequestBodies(Bodies):
    """What the bodies of one request have in common: their first fields, and the names of tokens."""

    id_prefix: str
    done = "data: [DONE]\n\n"

    def __init__(self, request: GenerationRequest, model: str, tokenizer: PreTrainedTokenizerBase) -> None:
        self._head: dict[str, Any] = {
            "id": f"{self.id_prefix}-{uuid.uuid4().hex}",
            "created": int(time.time()),
            "model": model,
            "system_fingerprint": f"selfspec-{__version__}",
        }
        self._includes_usage = request.stream_options is not None and bool(request.stream_options.include_usage)
        self._alternatives, self._as_ids = request.alternatives, request.return_tokens_as_token_ids
        self._tokenizer = tokenizer
        options = request.stream_options
        counts = options is not None and options.include_usage and options.continuous_usage_stats
        self._adds_text_alone = self._alternatives is None and not request.speculative.report and not counts
        self._frames: dict[int, tuple[str, str]] = {}  # of the chunks of each answer that add nothing but text

    def _text_chunk(self, answer: Answer, text: str) -> TextChunk:
        """A chunk that adds text to an answer, without what ``_adds_text_alone`` excludes."""
        if answer.index not in self._frames:
            chunk = self._chunk_of(answer, _MARK)
            if self._includes_usage:
                chunk.usage = None
            before, _, after = chunk.to_json().rpartition(to_json(_MARK).decode())
            self._frames[answer.index] = before, after
        before, after = self._frames[answer.index]
        return TextChunk(before, text, after)

    @abstractmethod
    def _chunk_of(self, answer: Answer, text: str) -> ChatChunk | Completion:
        """A chunk that adds text to an answer."""

    def _name(self, token_id: int) -> str:
        """A token's text, also of a special token, or ``token_id:ID``, since several tokens have one text."""
        return f"token_id:{token_id}" if self._as_ids else token_text(self._tokenizer, token_id)[0]

    def failed(self, error: ApiError) -> Iterator[Body]:
        """The event of an error, after which nothing comes."""
        yield ErrorBody.model_validate(error.body)

    def event(self, body: Body) -> str:
        """A server-sent event."""
        return f"data: {body.to_json()}\n\n"


class ChatBodies(_RequestBodies):
    """The bodies of an answered chat."""

    id_prefix = "chatcmpl"

    def whole(self, answers: Sequence[Answer], usage: Usage) -> ChatCompletion:
        """The body that is not a stream."""
        choices = [self._choice(answer) for answer in answers]
        return ChatCompletion(**self._head, object="chat.completion", choices=choices, usage=usage)

    def first(self, answer: Answer) -> Iterator[ChatChunk]:
        """The chunk that an answer begins with."""
        yield self._chunk(answer, Delta(role="assistant", content=""))

    def chunk(
        self, answer: Answer, pieces: Sequence[TextPiece], grown: Sequence[Growth]
    ) -> Iterator[ChatChunk | TextChunk]:
        """The chunk with the text, the reasoning and the calls that some pieces add."""
        if self._adds_text_alone and [growth.block.kind for growth in grown] == ["text"]:
            yield self._text_chunk(answer, grown[0].text)
        elif pieces or grown:
            yield self._chunk(answer, _delta(answer, grown), self._logprobs(pieces) if pieces else None)

    def last(self, answer: Answer) -> Iterator[ChatChunk]:
        """The chunk that says why an answer ended."""
        yield self._chunk(answer, Delta(), finish_reason=answer.finish_reason)

    def end(self, _: Sequence[Answer], usage: Usage) -> Iterator[ChatChunk]:
        """The chunk after all answers, with the numbers of tokens, if they were asked for."""
        if self._includes_usage:
            yield ChatChunk(**self._head, object="chat.completion.chunk", choices=[], usage=usage)

    def _chunk_of(self, answer: Answer, text: str) -> ChatChunk:
        return self._chunk(answer, Delta(content=text))

    def _choice(self, answer: Answer) -> ChatChoice:
        message = AnswerMessage(role="assistant", content=answer.text or (None if answer.calls else ""), refusal=None)
        if answer.reasoning:
            message.reasoning_content = answer.reasoning
        if answer.calls:
            message.tool_calls = [
                CalledTool(
                    id=call.id, type="function", function=CalledFunction(name=call.name, arguments=call.text or "{}")
                )
                for call in answer.calls
            ]
        return ChatChoice(
            index=answer.index,
            message=message,
            logprobs=self._logprobs(answer.pieces),
            finish_reason=answer.finish_reason,
        )

    def _chunk(
        self,
        answer: Answer,
        delta: Delta,
        logprobs: ChatLogprobs | None = None,
        finish_reason: ApiFinishReason | None = None,
    ) -> ChatChunk:
        choice = ChunkChoice(index=answer.index, delta=delta, logprobs=logprobs, finish_reason=finish_reason)
        return ChatChunk(**self._head, object="chat.completion.chunk", choices=[choice])

    def _logprobs(self, pieces: Sequence[TextPiece]) -> ChatLogprobs | None:
        if self._alternatives is None:
            return None
        content = []
        for piece in pieces:
            assert piece.logprobs is not None, "log-probabilities were not asked for"
            top = [self._top(token_id, logprob) for token_id, logprob in piece.logprobs.top]
            own = self._top(piece.token_id, piece.logprobs.logprob)
            content.append(TokenLogprob(token=own.token, logprob=own.logprob, bytes=own.bytes, top_logprobs=top))
        return ChatLogprobs(content=content)

    def _top(self, token_id: int, logprob: float) -> TopLogprob:
        _, data = token_text(self._tokenizer, token_id)
        return TopLogprob(token=self._name(token_id), logprob=logprob, bytes=list(data))


class CompletionBodies(_RequestBodies):
    """The bodies of an answered completion."""

    id_prefix = "cmpl"

    def __init__(self, request: GenerationRequest, model: str, tokenizer: PreTrainedTokenizerBase) -> None:
        super().__init__(request, model, tokenizer)
        self._offsets: dict[int, int] = {}  # characters of each answer that earlier chunks had

    def whole(self, answers: Sequence[Answer], usage: Usage) -> Completion:
        """The body that is not a stream."""
        choices = [
            CompletionChoice(
                index=answer.index,
                text=answer.prompt + answer.text,
                logprobs=self._logprobs(answer, answer.pieces, _scored_prompt(answer)),
                finish_reason=answer.finish_reason,
            )
            for answer in answers
        ]
        return Completion(**self._head, object="text_completion", choices=choices, usage=usage)

    def first(self, answer: Answer) -> Iterator[Completion]:
        """The chunk with the prompt, where it is echoed."""
        if answer.prompt:
            yield self._chunk_of(answer, answer.prompt)

    def chunk(
        self, answer: Answer, pieces: Sequence[TextPiece], grown: Sequence[Growth]
    ) -> Iterator[Completion | TextChunk]:
        """The chunk with the text that some pieces add."""
        if pieces or grown:
            text = "".join(growth.text for growth in grown)
            if self._adds_text_alone:
                yield self._text_chunk(answer, text)
            else:
                yield self._chunk(answer, text, self._logprobs(answer, pieces))

    def last(self, answer: Answer) -> Iterator[Completion]:
        """The chunk that says why an answer ended."""
        yield self._chunk(answer, "", finish_reason=answer.finish_reason)

    def end(self, _: Sequence[Answer], usage: Usage) -> Iterator[Completion]:
        """The chunk after all answers, with the numbers of tokens, if they were asked for."""
        if self._includes_usage:
            yield Completion(**self._head, object="text_completion", choices=[], usage=usage)

    def _chunk_of(self, answer: Answer, text: str) -> Completion:
        return self._chunk(answer, text)

    def _chunk(
        self,
        answer: Answer,
        text: str,
        logprobs: CompletionLogprobs | None = None,
        finish_reason: ApiFinishReason | None = None,
    ) -> Completion:
        choice = CompletionChoice(index=answer.index, text=text, logprobs=logprobs, finish_reason=finish_reason)
        return Completion(**self._head, object="text_completion", choices=[choice])

    def _logprobs(
        self, answer: Answer, pieces: Sequence[TextPiece], prompt: Sequence[_Scored] = ()
    ) -> CompletionLogprobs | None:
        if self._alternatives is None:
            return None
        offset = self._offsets.get(answer.index, 0 if prompt else len(answer.prompt))
        self._offsets[answer.index] = offset + sum(len(piece.text) for piece in pieces)
        listed = [*prompt, *((piece.text, piece.token_id, piece.logprobs) for piece in pieces)]
        offsets = []
        for text, _, _ in listed:
            offsets.append(offset)
            offset += len(text)
        top = [None if scores is None else self._best(scores) for *_, scores in listed]
        return CompletionLogprobs(
            tokens=[self._name(token_id) for _, token_id, _ in listed],
            token_logprobs=[None if scores is None else scores.logprob for *_, scores in listed],
            top_logprobs=top if self._alternatives else None,
            text_offset=offsets,
        )

    def _best(self, scores: TokenLogprobs) -> dict[str, float]:
        """Alternatives by name. Of several tokens with one name the best counts; the chosen one is among them."""
        best: dict[str, float] = {}
        for token_id, value in (*scores.top, (scores.token_id, scores.logprob)):
            name = self._name(token_id)
            best[name] = max(value, best.get(name, value))
        return best


def _scored_prompt(answer: Answer) -> list[_Scored]:
    known = answer.finished.prompt_logprobs
    return [(*token, logprob) for token, logprob in zip(answer.echoed, known, strict=True)] if known else []


def _delta(answer: Answer, grown: Sequence[Growth]) -> Delta:
    """What a chunk adds to a message; content also where tokens have no text."""
    delta = Delta()
    calls = []
    for growth in grown:
        if growth.block.kind == "text":
            delta.content = (delta.content or "") + growth.text
        elif growth.block.kind == "reasoning":
            delta.reasoning_content = (delta.reasoning_content or "") + growth.text
        else:
            index = sum(block.kind == "call" for block in answer.blocks[: growth.index])
            function = CalledFunction(arguments=growth.text)
            call = CalledTool(index=index, function=function)
            if growth.began:
                call.id, call.type, function.name = growth.block.id, "function", growth.block.name
            calls.append(call)
    if calls:
        delta.tool_calls = calls
    if not grown:
        delta.content = ""
    return delta
