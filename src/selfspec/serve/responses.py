"""Bodies of answers, as OpenAI's API has them. ``selfspec`` is this server's own field."""

from typing import Literal

from pydantic import BaseModel, ConfigDict

ApiFinishReason = Literal["stop", "length", "tool_calls"]


class Body(BaseModel):
    """A body, or a part of one. Fields that were not set are left out."""

    model_config = ConfigDict(extra="forbid", protected_namespaces=())

    def to_json(self) -> str:
        """The body without what was not set."""
        return self.model_dump_json(exclude_unset=True)


class ErrorDetail(Body):
    """What is wrong."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(Body):
    """The body of every answer that is an error."""

    error: ErrorDetail


class CachedTokens(Body):
    """Tokens of prompts that did not have to be read."""

    cached_tokens: int


class CompletionDetails(Body):
    """Tokens of answers that are reasoning."""

    reasoning_tokens: int


class Usage(Body):
    """Numbers of tokens."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: CachedTokens | None = None
    completion_tokens_details: CompletionDetails | None = None

    @property
    def cached_tokens(self) -> int:
        """Tokens of prompts that did not have to be read."""
        return 0 if self.prompt_tokens_details is None else self.prompt_tokens_details.cached_tokens


class ReportedToken(Body):
    """A token of a stream with who chose it first. The texts, joined, are the answer's."""

    text: str
    origin: Literal["prefill", "draft", "target"]
    drafted_by: str | None


class Report(Body):
    """The tokens of a chunk with rates so far; or, at the end of a choice, what drafts were worth."""

    tokens: list[ReportedToken] = []
    method: str | None = None
    rounds: int | None = None
    drafted_tokens: int | None = None
    accepted_tokens: int | None = None
    acceptance_rate: float | None = None
    tokens_per_second: float | None = None
    speedup_estimate: float | None = None


class TopLogprob(Body):
    """A token that could have been chosen."""

    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(TopLogprob):
    """A token of a chat's answer with the most likely ones at its place."""

    top_logprobs: list[TopLogprob]


class ChatLogprobs(Body):
    """Log-probabilities of a chat's answer."""

    content: list[TokenLogprob]
    refusal: None = None


class CompletionLogprobs(Body):
    """Log-probabilities of a completion, a list of each kind; the prompt's first token has none."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None] | None
    text_offset: list[int]


class CalledFunction(Body):
    """A function with the JSON of its arguments; in a stream, the first of its chunks has the name."""

    name: str | None = None
    arguments: str


class CalledTool(Body):
    """A call of a tool. In a stream, ``index`` says which, and the first of its chunks has id and type."""

    index: int | None = None
    id: str | None = None
    type: Literal["function"] | None = None
    function: CalledFunction


class AnswerMessage(Body):
    """The answer of a chat."""

    role: Literal["assistant"]
    content: str | None
    reasoning_content: str | None = None
    refusal: None = None
    tool_calls: list[CalledTool] | None = None


class ChatChoice(Body):
    """One of ``n`` answers."""

    index: int
    message: AnswerMessage
    logprobs: ChatLogprobs | None
    finish_reason: ApiFinishReason


class Delta(Body):
    """What a chunk adds to an answer."""

    role: Literal["assistant"] | None = None
    content: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[CalledTool] | None = None


class ChunkChoice(Body):
    """What a chunk adds to one of ``n`` answers."""

    index: int
    delta: Delta
    logprobs: ChatLogprobs | None
    finish_reason: ApiFinishReason | None


class CompletionChoice(Body):
    """A completion, or in a stream what a chunk adds to it."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: ApiFinishReason | None


class _Answer(Body):
    id: str
    created: int
    model: str
    system_fingerprint: str


class ChatCompletion(_Answer):
    """The answer of ``/v1/chat/completions``; ``selfspec`` is the report of the first choice."""

    object: Literal["chat.completion"] = "chat.completion"
    choices: list[ChatChoice]
    usage: Usage
    selfspec: Report | None = None


class ChatChunk(_Answer):
    """A chunk of its stream."""

    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    choices: list[ChunkChoice]
    usage: Usage | None = None
    selfspec: Report | None = None


class Completion(_Answer):
    """The answer of ``/v1/completions``, and a chunk of its stream."""

    object: Literal["text_completion"] = "text_completion"
    choices: list[CompletionChoice]
    usage: Usage | None = None
    selfspec: Report | None = None


class ServedMethods(Body):
    """The methods that a request may name, and the one where it names none."""

    methods: list[str]
    method: str


class ModelCard(Body):
    """A model that is served; ``parent`` is that of an adapter."""

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str
    max_model_len: int
    selfspec: ServedMethods
    parent: str | None = None


class ModelList(Body):
    """The models that are served."""

    object: Literal["list"] = "list"
    data: list[ModelCard]


class Tokenized(Body):
    """The answer of ``/tokenize``."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class Detokenized(Body):
    """The answer of ``/detokenize``."""

    prompt: str


class Status(Body):
    """The answer of ``/health`` and ``/ready``."""

    status: str


class Version(Body):
    """The answer of ``/version``."""

    version: str
