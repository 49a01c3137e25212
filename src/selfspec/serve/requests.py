"""Requests: the fields of OpenAI's API, and those that vLLM adds. Unknown fields and wrong types are refused."""

from collections.abc import Sequence
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import ConfigDict, Field, model_validator
from typing_extensions import Self

from selfspec.serve.forms import Formed, Ignored
from selfspec.serve.strict import Strict

MOST_STOPS = 16
MOST_LOGPROBS = 20
MOST_BIASES = 1024
MOST_PROMPTS = 1024
MOST_IDS = 2**20
TOOL_NAME = r"^[a-zA-Z0-9_.-]{1,128}$"
MOST_PARTS = 256
"""Parts of a message: texts, calls, annotations."""

Text = Annotated[str, Field(strict=True)]
TokenId = Annotated[int, Field(ge=0, le=2**31 - 1)]
TokenIds = Annotated[list[TokenId], Field(max_length=MOST_IDS, fail_fast=True)]
Stop = Annotated[str, Field(min_length=1, max_length=256)]


class StreamOptions(Strict):
    """Options of a stream: ``include_usage`` adds a last chunk with the numbers of tokens."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = Field(
        default=None, description="With `include_usage`: all chunks have the numbers of tokens so far."
    )
    include_obfuscation: bool | None = Field(default=None, description="Has no effect: nothing is padded.")


class SpeculativeFields(Strict):
    """How drafts are made. The text is the same whatever is chosen here."""

    method: Annotated[str, Field(min_length=1, max_length=200)] | None = Field(
        default=None, description="Name of the method; those that are served are listed by `/v1/models`."
    )
    enabled: bool = Field(default=True, description="False is plain decoding.")
    report: bool = Field(
        default=False, description="Say who drafted each token, and what was saved (field `selfspec`)."
    )


class TextRequest(Strict):
    """The fields that chats and completions share with ``/infill``."""

    model: Text | None = Field(default=None, description="The model's name; without it, the one that is served.")
    temperature: Annotated[float, Field(ge=0, le=2)] | None = Field(default=None, description="Default 1; 0 is greedy.")
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1, le=2**31 - 1)] | None = Field(
        default=None, description="0 and -1 keep all tokens."
    )
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    stream: bool | None = None


class Sampled(TextRequest, Formed, Ignored):
    """The fields of chats and completions."""

    repetition_penalty: Annotated[float, Field(gt=0, le=10)] | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    logit_bias: (
        Annotated[
            dict[Annotated[str, Field(pattern=r"^[0-9]{1,9}$")], Annotated[float, Field(ge=-100, le=100)]],
            Field(max_length=MOST_BIASES),
        ]
        | None
    ) = Field(default=None, description="By token id.")
    seed: Annotated[int, Field(ge=-(2**63), le=2**63 - 1)] | None = Field(
        default=None,
        description="The same seed gives the same text, whatever else the server does and whatever drafts.",
    )
    n: Annotated[int, Field(ge=1)] | None = Field(default=None, description="Number of choices.")
    stop: Stop | Annotated[list[Stop], Field(max_length=MOST_STOPS, fail_fast=True)] | None = None
    stop_token_ids: Annotated[list[TokenId], Field(max_length=MOST_BIASES, fail_fast=True)] | None = None
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    min_tokens: Annotated[int, Field(ge=0)] | None = None
    max_tokens: Annotated[int, Field(ge=0)] | None = None
    return_tokens_as_token_ids: bool = Field(default=False, description="Name tokens of logprobs as `token_id:ID`.")
    skip_special_tokens: Literal[True] | None = Field(default=None, description="Only the default is supported.")
    spaces_between_special_tokens: bool | None = Field(
        default=None, description="Has no effect: special tokens are not shown."
    )
    length_penalty: Annotated[float, Field(ge=1, le=1)] | None = Field(
        default=None, description="Only the default is supported."
    )
    use_beam_search: Literal[False] | None = Field(default=None, description="Only the default is supported.")
    stream_options: StreamOptions | None = None
    speculative: SpeculativeFields = Field(default_factory=SpeculativeFields)
    cache_salt: Annotated[str, Field(max_length=256)] | None = Field(
        default=None, description="Only requests with the same salt, and key, share what is known of their prompts."
    )

    @model_validator(mode="after")
    def _streams_with_options(self) -> "Sampled":
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options is allowed only with stream=true")
        return self

    def without_texts(self) -> Self:
        """A copy without what only its encoding needs, which can be large."""
        dropped = dict.fromkeys((*Formed.model_fields, *Ignored.model_fields))
        return self.model_copy(update=dropped)

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """The stop strings."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())


class CompletionRequest(Sampled):
    """A request to ``/v1/completions``."""

    prompt: (
        Text
        | Annotated[list[Text], Field(min_length=1, max_length=MOST_PROMPTS, fail_fast=True)]
        | Annotated[TokenIds, Field(min_length=1)]
        | Annotated[
            list[Annotated[TokenIds, Field(min_length=1)]], Field(min_length=1, max_length=MOST_PROMPTS, fail_fast=True)
        ]
    )
    echo: bool | None = None
    logprobs: Annotated[int, Field(ge=0, le=MOST_LOGPROBS)] | None = None
    best_of: Annotated[int, Field(ge=1)] | None = Field(default=None, description="Not supported above `n`.")
    suffix: Text | None = Field(default=None, description="What follows the text that is written, for code models.")
    add_special_tokens: bool = Field(default=True, description="Let the tokenizer add its special tokens to text.")

    @property
    def prompts(self) -> Sequence[str | list[int]]:
        """The prompts, each as text or token ids."""
        given = self.prompt
        return given if isinstance(given, list) and not isinstance(given[0], int) else [given]

    def without_texts(self) -> Self:
        """See ``Sampled``."""
        return super().without_texts().model_copy(update={"prompt": "", "suffix": None})

    @property
    def alternatives(self) -> int | None:
        """The number of alternatives to report with each token; ``None`` for no log-probabilities."""
        return self.logprobs


class TextPart(Strict):
    """A part of a message's content."""

    type: Literal["text"]
    text: Text
    cache_control: Any = Field(default=None, description="Has no effect: every prompt is looked up.")


def joined(content: str | list[Any] | None) -> str:
    """The text of a message or a result, which may be given in parts; a line break is between them."""
    return content if isinstance(content, str) else "\n".join(part.text for part in content or ())


class LeftOut(Strict):
    """A part of what a tool found that is no text. The model is told that it came, and the chat goes on."""

    model_config = ConfigDict(extra="ignore")

    type: str

    @property
    def text(self) -> str:
        """What the model is told instead."""
        what = self.type.removeprefix("input_")
        return f"[{'an' if what == 'image' else 'a'} {what} was left out: this model reads text]"


class FunctionCall(Strict):
    """What a tool is called with."""

    name: Text
    arguments: Text


class ToolCall(Strict):
    """A call of a tool, in a message of the assistant."""

    index: int | None = Field(default=None, description="Has no effect.")
    id: Text
    type: Literal["function"] = "function"
    function: FunctionCall
    provider_specific_fields: Any = Field(default=None, description="Has no effect; litellm sends it back.")


class Message(Strict):
    """A message of a chat. The last fields are those of answers, which clients send back; they have no effect.

    With ``prefix``, which is for the last message, the answer continues it.
    """

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Text | Annotated[list[TextPart], Field(min_length=1, max_length=MOST_PARTS, fail_fast=True)] | None = None
    name: Text | None = None
    tool_calls: Annotated[list[ToolCall], Field(max_length=MOST_PARTS, fail_fast=True)] | None = None
    tool_call_id: Text | None = None
    reasoning_content: Text | None = Field(default=None, description="Given to templates that take it.")
    reasoning: Text | None = Field(default=None, description="Another name of `reasoning_content`.")
    prefix: bool | None = None
    cache_control: Any = Field(default=None, description="Has no effect: every prompt is looked up.")
    provider_specific_fields: Any = Field(default=None, description="Has no effect; litellm sends it back.")
    refusal: Text | None = None
    annotations: Annotated[list[dict[str, Any]], Field(max_length=MOST_PARTS, fail_fast=True)] | None = None
    audio: None = None
    function_call: None = None

    @model_validator(mode="after")
    def _says_something(self) -> "Message":
        own = self.tool_calls or self.reasoning_content or self.reasoning
        if self.content is None and not (self.role == "assistant" and own):
            raise ValueError(f"a message of the role {self.role} needs content")
        return self


class FunctionTool(Strict):
    """A function that the model may call."""

    name: Annotated[str, Field(pattern=TOOL_NAME)]
    description: Text | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Strict):
    """A tool; all of them are functions."""

    type: Literal["function"]
    function: FunctionTool
    cache_control: Any = Field(default=None, description="Has no effect: every prompt is looked up.")


def function_tool(
    name: str, description: str | None, parameters: dict[str, Any] | None, *, strict: bool | None
) -> Tool:
    """The tool that is a function."""
    function = FunctionTool(name=name, description=description, parameters=parameters, strict=strict)
    return Tool(type="function", function=function)


class NamedFunction(Strict):
    """The name of a function."""

    name: Text


class NamedTool(Strict):
    """The tool that has to be called."""

    type: Literal["function"]
    function: NamedFunction


def named_tool(name: str) -> NamedTool:
    """The choice of a function."""
    return NamedTool(type="function", function=NamedFunction(name=name))


class AllowedTool(Strict):
    """A tool that may be called, as chats name it or as responses do."""

    type: Literal["function"]
    function: NamedFunction | None = None
    name: Text | None = None


class ToolChoices(Strict):
    """Some of the tools, and whether one of them has to be called."""

    mode: Literal["auto", "required"]
    tools: Annotated[list[AllowedTool], Field(min_length=1, max_length=128, fail_fast=True)]

    @property
    def names(self) -> list[str]:
        """The names of the tools."""
        return [tool.name or (tool.function.name if tool.function else "") for tool in self.tools]


class ChatAllowedTools(Strict):
    """Only some of the tools may be called, as chats say it."""

    type: Literal["allowed_tools"]
    allowed_tools: ToolChoices


class AllowedTools(ToolChoices):
    """Only some of the tools may be called, as responses say it."""

    type: Literal["allowed_tools"]


Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
ToolChoice: TypeAlias = Literal["auto", "none", "required"] | NamedTool | ChatAllowedTools | AllowedTools


class ThinkingMode(Strict):
    """Whether the model reasons."""

    type: Literal["enabled", "disabled"]


class ChatRequest(Sampled):
    """A request to ``/v1/chat/completions``."""

    echo: Literal[False] | None = Field(default=None, description="Only the default is supported.")
    messages: Annotated[list[Message], Field(min_length=1, max_length=4096, fail_fast=True)]
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MOST_LOGPROBS)] | None = None
    tools: Annotated[list[Tool], Field(min_length=1, max_length=128, fail_fast=True)] | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: Effort | None = Field(default=None, description="Given to templates that take it.")
    thinking: bool | ThinkingMode | None = Field(
        default=None, description="Whether the model reasons, where its template can turn that on or off."
    )
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = Field(
        default=None, description="The answer continues the last message, which is the assistant's."
    )
    chat_template_kwargs: dict[str, Any] | None = Field(
        default=None, description="More variables of the chat template."
    )
    verbosity: Literal["medium"] | None = Field(default=None, description="Only the default is supported.")
    modalities: list[Literal["text"]] | None = None
    include_reasoning: Literal[True] | None = Field(default=None, description="Reasoning is in the answer.")

    @model_validator(mode="after")
    def _is_consistent(self) -> "ChatRequest":
        if self.top_logprobs is not None and not self.logprobs:
            raise ValueError("top_logprobs is allowed only with logprobs=true")
        return self

    @property
    def alternatives(self) -> int | None:
        """The number of alternatives to report with each token; ``None`` for no log-probabilities."""
        return (self.top_logprobs or 0) if self.logprobs else None

    @property
    def offered_tools(self) -> list[Tool] | None:
        """The tools that the model may call."""
        return None if self.tool_choice == "none" else self.tools

    def without_texts(self) -> Self:
        """See ``Sampled``."""
        dropped = dict.fromkeys(("chat_template_kwargs", "tools", "tool_choice"))
        return super().without_texts().model_copy(update={**dropped, "messages": []})


GenerationRequest: TypeAlias = ChatRequest | CompletionRequest
"""A request for text."""


class TokenizeRequest(Strict):
    """A request to ``/tokenize``: text, or a chat."""

    model: Text | None = None
    prompt: Text | None = None
    messages: Annotated[list[Message], Field(min_length=1, max_length=4096, fail_fast=True)] | None = None
    add_special_tokens: bool = True
    add_generation_prompt: bool = True
    return_token_strs: bool = False

    @model_validator(mode="after")
    def _has_one_prompt(self) -> "TokenizeRequest":
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("give either prompt or messages")
        return self


class DetokenizeRequest(Strict):
    """A request to ``/detokenize``."""

    model: Text | None = None
    tokens: Annotated[TokenIds, Field(max_length=2**20)]
