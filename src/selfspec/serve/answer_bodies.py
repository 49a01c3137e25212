"""Bodies of answers, as OpenAI's API has them. ``selfspec`` is this server's own field."""

import json
from collections.abc import Mapping
from typing import Any, Literal

from pydantic_core import PydanticSerializationError, to_json
from typing_extensions import NotRequired, TypedDict

ApiFinishReason = Literal["stop", "length", "tool_calls"]


def as_json(fields: Mapping[str, Any]) -> str:
    """The JSON of a body. A model can write escapes of lone surrogates into arguments, which are no UTF-8."""
    try:
        return to_json(fields, inf_nan_mode="null").decode()
    except PydanticSerializationError:
        return json.dumps(fields, ensure_ascii=False).encode("utf-8", "replace").decode()


class ErrorDetail(TypedDict):
    """What is wrong."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(TypedDict):
    """The body of every answer that is an error."""

    error: ErrorDetail


class CachedTokens(TypedDict):
    """Tokens of prompts that did not have to be read."""

    cached_tokens: int


class CompletionDetails(TypedDict):
    """Tokens of answers that are reasoning."""

    reasoning_tokens: int


class Usage(TypedDict):
    """Numbers of tokens."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: NotRequired[CachedTokens]
    completion_tokens_details: NotRequired[CompletionDetails]


def cached_tokens(usage: Usage) -> int:
    """Tokens of prompts that did not have to be read."""
    return usage["prompt_tokens_details"]["cached_tokens"] if "prompt_tokens_details" in usage else 0


class ReportedToken(TypedDict):
    """A token of a stream with who chose it first. The texts, joined, are the answer's."""

    text: str
    origin: Literal["prefill", "draft", "target"]
    drafted_by: str | None


class Report(TypedDict):
    """The tokens of a chunk with rates so far; or, at the end of a choice, what drafts were worth."""

    tokens: NotRequired[list[ReportedToken]]
    method: NotRequired[str]
    rounds: NotRequired[int]
    drafted_tokens: NotRequired[int]
    accepted_tokens: NotRequired[int]
    acceptance_rate: NotRequired[float]
    tokens_per_second: NotRequired[float]
    speedup_estimate: NotRequired[float | None]


class TopLogprob(TypedDict):
    """A token that could have been chosen."""

    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(TopLogprob):
    """A token of a chat's answer with the most likely ones at its place."""

    top_logprobs: list[TopLogprob]


class ChatLogprobs(TypedDict):
    """Log-probabilities of a chat's answer."""

    content: list[TokenLogprob]
    refusal: NotRequired[None]


class CompletionLogprobs(TypedDict):
    """Log-probabilities of a completion, a list of each kind; the prompt's first token has none."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None] | None
    text_offset: list[int]


class CalledFunction(TypedDict):
    """A function with the JSON of its arguments; in a stream, the first of its chunks has the name."""

    name: NotRequired[str]
    arguments: str


class CalledTool(TypedDict):
    """A call of a tool. In a stream, ``index`` says which, and the first of its chunks has id and type."""

    index: NotRequired[int]
    id: NotRequired[str]
    type: NotRequired[Literal["function"]]
    function: CalledFunction


class AnswerMessage(TypedDict):
    """The answer of a chat."""

    role: Literal["assistant"]
    content: str | None
    reasoning_content: NotRequired[str]
    refusal: NotRequired[None]
    tool_calls: NotRequired[list[CalledTool]]


class ChatChoice(TypedDict):
    """One of ``n`` answers."""

    index: int
    message: AnswerMessage
    logprobs: ChatLogprobs | None
    finish_reason: ApiFinishReason


class Delta(TypedDict):
    """What a chunk adds to an answer."""

    role: NotRequired[Literal["assistant"]]
    content: NotRequired[str]
    reasoning_content: NotRequired[str]
    tool_calls: NotRequired[list[CalledTool]]


class ChunkChoice(TypedDict):
    """What a chunk adds to one of ``n`` answers."""

    index: int
    delta: Delta
    logprobs: ChatLogprobs | None
    finish_reason: ApiFinishReason | None


class CompletionChoice(TypedDict):
    """A completion, or in a stream what a chunk adds to it."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: ApiFinishReason | None


class _Answer(TypedDict):
    id: str
    created: int
    model: str
    system_fingerprint: str


class ChatCompletion(_Answer):
    """The answer of ``/v1/chat/completions``; ``selfspec`` is the report of the first choice."""

    object: Literal["chat.completion"]
    choices: list[ChatChoice]
    usage: Usage
    selfspec: NotRequired[Report]


class Completion(_Answer):
    """The answer of ``/v1/completions``, and a chunk of its stream."""

    object: Literal["text_completion"]
    choices: list[CompletionChoice]
    usage: NotRequired[Usage | None]
    selfspec: NotRequired[Report]


class ServedMethods(TypedDict):
    """The methods that a request may name, and the one where it names none."""

    methods: list[str]
    method: str


class ModelCard(TypedDict):
    """A model that is served; ``parent`` is that of an adapter."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    max_model_len: int
    selfspec: ServedMethods
    parent: NotRequired[str]


class ModelList(TypedDict):
    """The models that are served."""

    object: Literal["list"]
    data: list[ModelCard]


class Tokenized(TypedDict):
    """The answer of ``/tokenize``."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: NotRequired[list[str]]


class Detokenized(TypedDict):
    """The answer of ``/detokenize``."""

    prompt: str


class Status(TypedDict):
    """The answer of ``/health`` and ``/ready``."""

    status: str


class Version(TypedDict):
    """The answer of ``/version``."""

    version: str
