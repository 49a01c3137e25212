"""From answers to the bodies of ``/v1/chat/completions`` and ``/v1/completions``."""

import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from transformers import PreTrainedTokenizerBase

from selfspec import __version__
from selfspec.serve.answer import Answer, Growth
from selfspec.serve.answer_bodies import (
    AnswerMessage,
    ApiFinishReason,
    CalledFunction,
    CalledTool,
    ChatChoice,
    ChatLogprobs,
    ChunkChoice,
    CompletionChoice,
    CompletionLogprobs,
    Delta,
    TokenLogprob,
    TopLogprob,
    Usage,
    as_json,
)
from selfspec.serve.api_errors import ApiError
from selfspec.serve.reader import Prepared
from selfspec.serve.token_text import token_text
from selfspec.types import TextPiece, TokenLogprobs


@dataclass(slots=True)
class SentEvent:
    """A body, or an event of a stream, which may have a name."""

    fields: Mapping[str, Any]
    name: str = ""

    def to_json(self) -> str:
        """The JSON of it."""
        return as_json(self.fields)


_Scored: TypeAlias = tuple[str, int, TokenLogprobs | None]
"""A token's text, id and log-probability."""


class Bodies(ABC):
    """The bodies of one request, and the events of its stream, in the order in which they are sent."""

    done = ""
    """What a stream ends with."""

    takes_reports = False
    """Whether chunks and bodies may have the report and the numbers of tokens that a request asks for."""

    def __init__(self, read: Prepared, model: str, tokenizer: PreTrainedTokenizerBase) -> None:
        self._model, self._tokenizer = model, tokenizer

    @abstractmethod
    def whole(self, answers: Sequence[Answer], usage: Usage) -> SentEvent:
        """The body that is not a stream."""

    def start(self, usage: Usage) -> Iterable[SentEvent]:
        """What a stream begins with."""
        return ()

    def first(self, answer: Answer) -> Iterable[SentEvent]:
        """What an answer begins with."""
        return ()

    @abstractmethod
    def chunk(self, answer: Answer, pieces: Sequence[TextPiece], grown: Sequence[Growth]) -> Iterable[SentEvent]:
        """What some pieces add to an answer."""

    def last(self, answer: Answer) -> Iterable[SentEvent]:
        """What an answer ends with."""
        return ()

    def end(self, answers: Sequence[Answer], usage: Usage) -> Iterable[SentEvent]:
        """What comes after all answers."""
        return ()

    def failed(self, error: ApiError) -> Iterable[SentEvent]:
        """An error on the way, after which nothing comes."""
        yield SentEvent(error.body)

    def ping(self) -> str:
        """What says in a stream that it is alive: a comment, where clients take no event without content."""
        return ": ping\n\n"

    def event(self, body: SentEvent) -> str:
        """A server-sent event."""
        name = f"event: {body.name}\n" if body.name else ""
        return f"{name}data: {body.to_json()}\n\n"


class _RequestBodies(Bodies):
    """What the bodies of one request have in common: their first fields, and the names of tokens."""

    id_prefix: str
    whole_object: str
    chunk_object: str
    done = "data: [DONE]\n\n"
    takes_reports = True

    def __init__(self, read: Prepared, model: str, tokenizer: PreTrainedTokenizerBase) -> None:
        super().__init__(read, model, tokenizer)
        request, options = read.request, read.request.stream_options
        self._head: dict[str, Any] = {
            "id": f"{self.id_prefix}-{uuid.uuid4().hex}",
            "created": int(time.time()),
            "model": model,
            "system_fingerprint": f"selfspec-{__version__}",
        }
        self._includes_usage = options is not None and bool(options.include_usage)
        self._alternatives, self._as_ids = request.alternatives, request.return_tokens_as_token_ids

    def whole(self, answers: Sequence[Answer], usage: Usage) -> SentEvent:
        """The body that is not a stream."""
        return self._body(self.whole_object, [self._choice(answer) for answer in answers], usage=usage)

    def end(self, _: Sequence[Answer], usage: Usage) -> Iterator[SentEvent]:
        """The chunk after all answers, with the numbers of tokens, if they were asked for."""
        if self._includes_usage:
            yield self._body(self.chunk_object, [], usage=usage)

    @abstractmethod
    def _choice(self, answer: Answer) -> ChatChoice | CompletionChoice:
        """A choice of the body that is not a stream."""

    def _body(self, kind: str, choices: Sequence[Mapping[str, Any]], **more: Usage) -> SentEvent:
        """A body, or a chunk of a stream."""
        return SentEvent({**self._head, "object": kind, "choices": choices, **more})

    def _name(self, token_id: int) -> str:
        """A token's text, also of a special token, or ``token_id:ID``, since several tokens have one text."""
        return f"token_id:{token_id}" if self._as_ids else token_text(self._tokenizer, token_id)[0]


class ChatBodies(_RequestBodies):
    """The bodies of an answered chat."""

    id_prefix = "chatcmpl"
    whole_object, chunk_object = "chat.completion", "chat.completion.chunk"

    def first(self, answer: Answer) -> Iterator[SentEvent]:
        """The chunk that an answer begins with."""
        yield self._chunk(answer, Delta(role="assistant", content=""))

    def chunk(self, answer: Answer, pieces: Sequence[TextPiece], grown: Sequence[Growth]) -> Iterator[SentEvent]:
        """The chunk with the text, the reasoning and the calls that some pieces add."""
        if pieces or grown:
            yield self._chunk(answer, _delta(answer, grown), self._logprobs(pieces) if pieces else None)

    def last(self, answer: Answer) -> Iterator[SentEvent]:
        """The chunk that says why an answer ended."""
        yield self._chunk(answer, Delta(), finish_reason=answer.finish_reason)

    def _choice(self, answer: Answer) -> ChatChoice:
        message = AnswerMessage(role="assistant", content=answer.text or (None if answer.calls else ""), refusal=None)
        if answer.reasoning:
            message["reasoning_content"] = answer.reasoning
        if answer.calls:
            message["tool_calls"] = [
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
    ) -> SentEvent:
        choice = ChunkChoice(index=answer.index, delta=delta, logprobs=logprobs, finish_reason=finish_reason)
        return self._body(self.chunk_object, [choice])

    def _logprobs(self, pieces: Sequence[TextPiece]) -> ChatLogprobs | None:
        if self._alternatives is None:
            return None
        content = []
        for piece in pieces:
            assert piece.logprobs is not None, "log-probabilities were not asked for"
            top = [self._top(token_id, logprob) for token_id, logprob in piece.logprobs.top]
            own = self._top(piece.token_id, piece.logprobs.logprob)
            content.append(TokenLogprob(**own, top_logprobs=top))
        return ChatLogprobs(content=content)

    def _top(self, token_id: int, logprob: float) -> TopLogprob:
        _, data = token_text(self._tokenizer, token_id)
        return TopLogprob(token=self._name(token_id), logprob=logprob, bytes=list(data))


class CompletionBodies(_RequestBodies):
    """The bodies of an answered completion."""

    id_prefix = "cmpl"
    whole_object = chunk_object = "text_completion"

    def __init__(self, read: Prepared, model: str, tokenizer: PreTrainedTokenizerBase) -> None:
        super().__init__(read, model, tokenizer)
        self._offsets: dict[int, int] = {}  # characters of each answer that earlier chunks had

    def first(self, answer: Answer) -> Iterator[SentEvent]:
        """The chunk with the prompt, where it is echoed."""
        if answer.prompt:
            yield self._chunk(answer, answer.prompt)

    def chunk(self, answer: Answer, pieces: Sequence[TextPiece], grown: Sequence[Growth]) -> Iterator[SentEvent]:
        """The chunk with the text that some pieces add."""
        if pieces or grown:
            yield self._chunk(answer, "".join(growth.text for growth in grown), self._logprobs(answer, pieces))

    def last(self, answer: Answer) -> Iterator[SentEvent]:
        """The chunk that says why an answer ended."""
        yield self._chunk(answer, "", finish_reason=answer.finish_reason)

    def _choice(self, answer: Answer) -> CompletionChoice:
        return CompletionChoice(
            index=answer.index,
            text=answer.prompt + answer.text,
            logprobs=self._logprobs(answer, answer.pieces, _scored_prompt(answer)),
            finish_reason=answer.finish_reason,
        )

    def _chunk(
        self,
        answer: Answer,
        text: str,
        logprobs: CompletionLogprobs | None = None,
        finish_reason: ApiFinishReason | None = None,
    ) -> SentEvent:
        choice = CompletionChoice(index=answer.index, text=text, logprobs=logprobs, finish_reason=finish_reason)
        return self._body(self.chunk_object, [choice])

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
            delta["content"] = delta.get("content", "") + growth.text
        elif growth.block.kind == "reasoning":
            delta["reasoning_content"] = delta.get("reasoning_content", "") + growth.text
        else:
            index = sum(block.kind == "call" for block in answer.blocks[: growth.index])
            function = CalledFunction(arguments=growth.text)
            call = CalledTool(index=index, function=function)
            if growth.began:
                call["id"], call["type"], function["name"] = growth.block.id, "function", growth.block.name
            calls.append(call)
    if calls:
        delta["tool_calls"] = calls
    if not grown:
        delta["content"] = ""
    return delta
