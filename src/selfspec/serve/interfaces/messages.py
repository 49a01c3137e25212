"""Requests to ``/v1/messages``, as Anthropic's API has them, and the chats that they are."""

import json
from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from selfspec.serve.forms import schema_format
from selfspec.serve.requests import (
    MOST_STOPS,
    TOOL_NAME,
    ChatRequest,
    FunctionCall,
    LeftOut,
    Message,
    Stop,
    Text,
    TextPart,
    ToolCall,
    function_tool,
    joined,
    named_tool,
)
from selfspec.serve.strict import Strict

MOST_BLOCKS = 4096
_BILLING = "x-anthropic-billing-header:"


class _Block(Strict):
    cache_control: Any = Field(default=None, description="Has no effect: every prompt is looked up.")


class TextBlock(TextPart):
    """Text."""

    citations: Any = Field(default=None, description="Has no effect.")


class ThinkingBlock(_Block):
    """Reasoning of an earlier answer."""

    type: Literal["thinking"]
    thinking: Text
    signature: Text | None = None


class RedactedBlock(_Block):
    """Reasoning that cannot be read here; it is left out."""

    type: Literal["redacted_thinking"]
    data: Text


class ToolUseBlock(_Block):
    """A call of a tool in an earlier answer."""

    type: Literal["tool_use"]
    id: Text
    name: Text
    input: dict[str, Any]
    caller: Any = Field(default=None, description="Has no effect.")


class ToolReference(_Block):
    """A tool that a search for tools found; from then on the model may call it."""

    type: Literal["tool_reference"]
    tool_name: Text

    @property
    def text(self) -> str:
        """What the model is told of it."""
        return f"The tool {self.tool_name} can be called now."


class LeftOutBlock(LeftOut):
    """An image or a document in a tool's result."""

    type: Literal["image", "document"]


class SearchResultBlock(_Block):
    """A text that a search found."""

    type: Literal["search_result"]
    source: Text
    title: Text
    content: Annotated[list[TextBlock], Field(max_length=MOST_BLOCKS, fail_fast=True)]
    citations: Any = Field(default=None, description="Has no effect.")

    @property
    def text(self) -> str:
        """The text, after where it is from."""
        return "\n".join((self.title, self.source, joined(self.content)))


Found = Annotated[TextBlock | ToolReference | LeftOutBlock | SearchResultBlock, Field(discriminator="type")]


class ToolResultBlock(_Block):
    """What a tool answered."""

    type: Literal["tool_result"]
    tool_use_id: Text
    content: Text | Annotated[list[Found], Field(max_length=MOST_BLOCKS, fail_fast=True)] | None = None
    is_error: bool | None = None


Block = Annotated[
    TextBlock | ThinkingBlock | RedactedBlock | ToolUseBlock | ToolResultBlock, Field(discriminator="type")
]


class Turn(Strict):
    """A message of the user or of the assistant."""

    role: Literal["user", "assistant", "system"]
    content: Text | Annotated[list[Block], Field(max_length=MOST_BLOCKS, fail_fast=True)]


class ClientTool(Strict):
    """A tool that the client runs. Tools that a server would run are not supported."""

    type: Literal["custom"] | None = None
    name: Annotated[str, Field(pattern=TOOL_NAME)]
    description: Text | None = None
    input_schema: dict[str, Any]
    strict: bool | None = None
    cache_control: Any = None
    input_examples: Any = Field(default=None, description="Has no effect.")
    eager_input_streaming: Any = Field(default=None, description="Has no effect: input is streamed as it forms.")
    defer_loading: bool | None = Field(default=None, description="Offered once a `tool_reference` names it.")
    allowed_callers: Any = Field(default=None, description="Has no effect.")


class ToolChoice(Strict):
    """Whether tools have to be called, and which."""

    type: Literal["auto", "any", "tool", "none"]
    name: Text | None = None
    disable_parallel_tool_use: bool | None = None

    @model_validator(mode="after")
    def _names_its_tool(self) -> "ToolChoice":
        if (self.type == "tool") != (self.name is not None):
            raise ValueError("name is needed for the type tool, and has no meaning for others")
        return self


class ThinkingChoice(Strict):
    """Whether the model reasons. Its budget has no effect: ``max_tokens`` limits reasoning and answer together."""

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: Any = None
    display: Any = None


class OutputFormat(Strict):
    """JSON of a schema."""

    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field(alias="schema")


class OutputConfig(Strict):
    """How much the model reasons, and the form of its answer."""

    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: OutputFormat | None = None


class _Conversation(Strict):
    """What an answer is to and how it is to be, without how long it may be."""

    model: Text | None = None
    messages: Annotated[list[Turn], Field(min_length=1, max_length=4096, fail_fast=True)]
    system: Text | Annotated[list[TextBlock], Field(max_length=MOST_BLOCKS, fail_fast=True)] | None = None
    tools: Annotated[list[ClientTool], Field(max_length=128, fail_fast=True)] | None = None
    tool_choice: ToolChoice | None = None
    thinking: ThinkingChoice | None = None
    output_config: OutputConfig | None = None
    cache_control: Any = Field(default=None, description="Has no effect.")
    context_management: Any = Field(default=None, description="Has no effect: nothing is removed from a chat.")

    def as_chat(self, **fields: Any) -> ChatRequest:
        """The chat that this request is."""
        system = _without_billing(joined(self.system))
        messages = [Message(role="system", content=system)] if system else []
        for turn in self.messages:
            messages += _messages(turn)
        fields["continue_final_message"] = self.messages[-1].role == "assistant"
        choice = self.tool_choice or ToolChoice(type="auto")
        fields["parallel_tool_calls"] = False if choice.disable_parallel_tool_use else None
        if tools := self._offered():
            fields["tools"] = [
                function_tool(tool.name, tool.description, tool.input_schema, strict=tool.strict) for tool in tools
            ]
            choices = {"any": "required", "tool": named_tool(choice.name or "")}
            fields["tool_choice"] = choices.get(choice.type, choice.type)
        elif choice.type in ("any", "tool"):
            fields["tool_choice"] = "required"  # which is refused without tools
        if self.thinking is not None:
            fields["thinking"] = self.thinking.type != "disabled"
        if self.output_config is not None:
            fields["reasoning_effort"] = self.output_config.effort
            if self.output_config.format is not None:
                fields["response_format"] = schema_format("answer", self.output_config.format.schema_)
        return ChatRequest(model=self.model, messages=messages, **fields)

    def _offered(self) -> list[ClientTool]:
        """The tools without those that are to be found first, and have not been."""
        found = {
            part.tool_name
            for turn in self.messages
            for block in (() if isinstance(turn.content, str) else turn.content)
            if isinstance(block, ToolResultBlock) and not isinstance(block.content, str)
            for part in block.content or ()
            if isinstance(part, ToolReference)
        }
        return [tool for tool in self.tools or () if not tool.defer_loading or tool.name in found]


class CountTokensRequest(_Conversation):
    """A request to ``/v1/messages/count_tokens``."""


class MessagesRequest(_Conversation):
    """A request to ``/v1/messages``."""

    max_tokens: Annotated[int, Field(ge=1)]
    stop_sequences: Annotated[list[Stop], Field(max_length=MOST_STOPS, fail_fast=True)] | None = None
    stream: bool | None = None
    temperature: Annotated[float, Field(ge=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=0)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    metadata: Any = Field(default=None, description="Has no effect.")
    service_tier: Any = Field(default=None, description="Has no effect.")
    speed: Any = Field(default=None, description="Has no effect.")
    inference_geo: Any = Field(default=None, description="Has no effect.")

    def as_chat(self, **fields: Any) -> ChatRequest:
        """The chat that this request is."""
        names = ("max_tokens", "stream", "temperature", "top_k", "top_p")
        given = {name: getattr(self, name) for name in names}
        return super().as_chat(**given, stop=self.stop_sequences or None, **fields)


def _without_billing(system: str) -> str:
    """A system text without the line that Claude Code begins it with.

    It is for Anthropic's server, and different in each request: no prompt would begin like an earlier one.
    """
    line, _, rest = system.partition("\n")
    return rest if line.startswith(_BILLING) else system


def _messages(turn: Turn) -> Iterator[Message]:
    """The messages of a chat that a turn is: what tools answered are messages of their own, before the rest."""
    if isinstance(turn.content, str):
        yield Message(role=turn.role, content=turn.content)
        return
    blocks = turn.content
    for block in blocks:
        if isinstance(block, ToolResultBlock):
            text = joined(block.content)
            yield Message(
                role="tool", tool_call_id=block.tool_use_id, content=f"Error: {text}" if block.is_error else text
            )
    text = joined([block for block in blocks if isinstance(block, TextBlock)])
    reasoning = "".join(block.thinking for block in blocks if isinstance(block, ThinkingBlock))
    calls = [
        ToolCall(id=block.id, function=FunctionCall(name=block.name, arguments=json.dumps(block.input)))
        for block in blocks
        if isinstance(block, ToolUseBlock)
    ]
    if text or calls or reasoning or not any(isinstance(block, ToolResultBlock) for block in blocks):
        yield Message(role=turn.role, content=text, tool_calls=calls or None, reasoning_content=reasoning or None)
