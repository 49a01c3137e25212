"""Requests to ``/v1/responses``, as OpenAI's API has them, and the chats that they are. Nothing is stored."""

import json
from collections.abc import Iterator, Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, ConfigDict, Discriminator, Field, Tag, ValidationInfo, field_validator
from pydantic_core import PydanticCustomError

from selfspec.serve.api_errors import UNSUPPORTED
from selfspec.serve.forms import Ignored, ResponseFormat, schema_format
from selfspec.serve.requests import (
    MOST_LOGPROBS,
    TOOL_NAME,
    AllowedTools,
    ChatRequest,
    Effort,
    FunctionCall,
    FunctionTool,
    LeftOut,
    Message,
    SpeculativeFields,
    StreamOptions,
    Text,
    Tool,
    ToolCall,
    function_tool,
    joined,
    named_tool,
)
from selfspec.serve.strict import Strict

MOST_ITEMS = 4096
MOST_REPEATED = 2**17
"""Characters of the fields of a request that its response repeats, in several events of a stream."""


class TextContent(Strict):
    """Text of a message."""

    type: Literal["input_text", "output_text", "text"]
    text: Text
    annotations: Any = None
    logprobs: Any = None


class RefusalContent(Strict):
    """A refusal in an earlier answer."""

    type: Literal["refusal"]
    refusal: Text

    @property
    def text(self) -> str:
        """Its text."""
        return self.refusal


Contents = Annotated[
    list[Annotated[TextContent | RefusalContent, Field(discriminator="type")]],
    Field(max_length=MOST_ITEMS, fail_fast=True),
]


class LeftOutContent(LeftOut):
    """An image or a file in a tool's output."""

    type: Literal["input_image", "input_file"]


Outputs = Annotated[
    list[Annotated[TextContent | RefusalContent | LeftOutContent, Field(discriminator="type")]],
    Field(max_length=MOST_ITEMS, fail_fast=True),
]


class _Item(Strict):
    id: Text | None = None
    status: Any = None


class MessageItem(_Item):
    """A message."""

    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: Text | Contents
    phase: Any = None


class CallItem(_Item):
    """A call of a tool in an earlier answer."""

    type: Literal["function_call"]
    call_id: Text
    name: Text
    arguments: Text
    namespace: Text | None = None


class OutputItem(_Item):
    """What a tool answered."""

    type: Literal["function_call_output"]
    call_id: Text
    output: Text | Outputs


class ReasoningText(Strict):
    """A part of reasoning, or of its summary."""

    type: Literal["reasoning_text", "summary_text", "text"]
    text: Text


class ReasoningItem(_Item):
    """Reasoning of an earlier answer."""

    type: Literal["reasoning"]
    summary: Annotated[list[ReasoningText], Field(max_length=MOST_ITEMS, fail_fast=True)] = Field(default_factory=list)
    content: Annotated[list[ReasoningText], Field(max_length=MOST_ITEMS, fail_fast=True)] | None = None
    encrypted_content: Any = None


def _type_of(item: Any) -> str:
    kind = item.get("type", "message") if isinstance(item, dict) else getattr(item, "type", "message")
    return kind if isinstance(kind, str) else ""


def _not_stored(name: str, send: str) -> PydanticCustomError:
    """The refusal of what stands for something that a server would have stored."""
    return PydanticCustomError(UNSUPPORTED, f"{name} is not supported: nothing is stored; send {send} in input")


def _no_reference(item: Any) -> Any:
    """An item that is there, and not stored somewhere."""
    if isinstance(item, dict) and item.get("type") == "item_reference":
        raise _not_stored("item_reference", "the item itself")
    return item


Item = Annotated[
    Annotated[MessageItem, Tag("message")]
    | Annotated[CallItem, Tag("function_call")]
    | Annotated[OutputItem, Tag("function_call_output")]
    | Annotated[ReasoningItem, Tag("reasoning")],
    Discriminator(_type_of),
    BeforeValidator(_no_reference),
]


class FlatTool(FunctionTool):
    """A tool that the client runs. Tools that a server would run are not supported."""

    type: Literal["function"]
    defer_loading: Literal[False] | None = None


class NamespaceTool(Strict):
    """Tools whose names are their own within a namespace: the model sees ``namespace.name``."""

    type: Literal["namespace"]
    name: Annotated[str, Field(pattern=TOOL_NAME)]
    description: Text | None = None
    tools: Annotated[list[FlatTool], Field(max_length=128, fail_fast=True)]


class WebSearch(Strict):
    """A search that a server would make, if the model asked for it: it is not offered to the model."""

    model_config = ConfigDict(extra="ignore")

    type: Literal["web_search"]


AnyTool = Annotated[FlatTool | NamespaceTool | WebSearch, Field(discriminator="type")]


class FlatNamedTool(Strict):
    """The tool that has to be called."""

    type: Literal["function"]
    name: Text


class TextFormat(Strict):
    """What the text has to be: any text, any JSON object, or JSON of a schema."""

    type: Literal["text", "json_object", "json_schema"]
    name: Text | None = None
    description: Text | None = None
    schema_: dict[str, Any] | None = Field(default=None, alias="schema")
    strict: bool | None = None


class TextOptions(Strict):
    """Options of the text."""

    format: TextFormat | None = None
    verbosity: Literal["medium"] | None = Field(default=None, description="Only the default is supported.")


class Reasoning(Strict):
    """How much the model reasons; there are no summaries."""

    effort: Effort | None = None
    summary: Any = Field(default=None, description="Has no effect: the reasoning itself is in the answer.")
    generate_summary: Any = Field(default=None, description="Has no effect.")


class ResponsesRequest(Ignored):
    """A request to ``/v1/responses``."""

    fields: ClassVar[dict[str, str]] = {
        "messages": "input",
        "max_tokens": "max_output_tokens",
        "response_format.json_schema.schema": "text.format.schema",
        "response_format": "text.format",
        "reasoning_effort": "reasoning.effort",
    }
    """Names of the chat's fields here."""

    model: Text | None = None
    input: Text | Annotated[list[Item], Field(min_length=1, max_length=MOST_ITEMS, fail_fast=True)]
    instructions: Text | None = None
    max_output_tokens: Annotated[int, Field(ge=1)] | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MOST_LOGPROBS)] | None = Field(
        default=None, description="Has no effect: responses report no log-probabilities."
    )
    tools: Annotated[list[AnyTool], Field(max_length=128, fail_fast=True)] | None = None
    tool_choice: Literal["auto", "none", "required"] | FlatNamedTool | AllowedTools | None = None
    parallel_tool_calls: bool | None = None
    max_tool_calls: Any = Field(default=None, description="Has no effect: the client runs the tools.")
    text: TextOptions | None = None
    reasoning: Reasoning | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    speculative: SpeculativeFields = Field(default_factory=SpeculativeFields)
    include: Any = Field(default=None, description="Has no effect.")
    truncation: Literal["disabled"] | None = Field(default=None, description="A chat is never shortened.")
    background: Literal[False] | None = None
    client_metadata: Any = Field(default=None, description="Has no effect.")
    previous_response_id: None = Field(default=None, description="Not supported: send the whole conversation.")
    conversation: None = Field(default=None, description="Not supported: send the whole conversation.")
    prompt: None = Field(default=None, description="Not supported.")

    @field_validator("previous_response_id", "conversation", "prompt", mode="before")
    @classmethod
    def _names_nothing_stored(cls, value: Any, field: ValidationInfo) -> Any:
        if value is not None:
            raise _not_stored(str(field.field_name), "the whole conversation")
        return value

    def as_chat(self) -> ChatRequest:
        """The chat that this request is."""
        given = [Message(role="user", content=self.input)] if isinstance(self.input, str) else _messages(self.input)
        system = [Message(role="system", content=self.instructions)] if self.instructions else []
        names = ("model", "temperature", "top_p", "parallel_tool_calls", "stream", "speculative")
        fields: dict[str, Any] = {name: getattr(self, name) for name in names}
        if tools := [each for tool in self.tools or () for each in _tools(tool)]:
            fields["tools"] = tools
        choice: Any = self.tool_choice
        if isinstance(choice, FlatNamedTool):
            choice = named_tool(choice.name)
        if self.text is not None and self.text.format is not None:
            fields["response_format"] = _format(self.text.format)
        return ChatRequest(
            messages=[*system, *given],
            max_tokens=self.max_output_tokens,
            tool_choice=choice,
            reasoning_effort=None if self.reasoning is None else self.reasoning.effort,
            **fields,
        )

    def namespaces(self) -> dict[str, tuple[str, str]]:
        """The namespaces of tools, with their names there, by the names that the model sees."""
        spaces = [tool for tool in self.tools or () if isinstance(tool, NamespaceTool)]
        return {qualified(space.name, tool.name): (space.name, tool.name) for space in spaces for tool in space.tools}

    def repeated(self) -> str:
        """The fields of the request that its response repeats, as a JSON object; large ones are left out."""
        said = self.model_dump(by_alias=True, include={"tools", "tool_choice", "text", "reasoning", "metadata"})
        default = {"strict": False, "parameters": {}}
        tools = [{**(default if tool["type"] == "function" else {}), **_given(tool)} for tool in said["tools"] or []]
        choice = self.tool_choice
        fields = {
            "instructions": self.instructions,
            "max_output_tokens": self.max_output_tokens,
            "metadata": said["metadata"] if isinstance(said["metadata"], dict) else {},
            "parallel_tool_calls": self.parallel_tool_calls is not False,
            "reasoning": {"effort": None if self.reasoning is None else self.reasoning.effort, "summary": None},
            "temperature": 1.0 if self.temperature is None else self.temperature,
            "text": {"format": _given((said["text"] or {}).get("format") or {"type": "text"})},
            "tool_choice": "auto" if choice is None else said["tool_choice"],
            "tools": tools,
            "top_p": 1.0 if self.top_p is None else self.top_p,
        }
        if len(text := json.dumps(fields)) > MOST_REPEATED:
            fields |= {"instructions": None, "metadata": {}, "text": {"format": {"type": "text"}}, "tools": []}
            text = json.dumps(fields)
        return text


def _given(fields: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if value is not None}


def _messages(items: Sequence[Any]) -> list[Message]:
    """The messages of a chat; reasoning and calls that follow each other are of one message."""
    messages: list[Message] = []
    open_ = False  # the last message is the assistant's, and takes calls
    for item in items:
        if isinstance(item, OutputItem):
            messages.append(Message(role="tool", tool_call_id=item.call_id, content=joined(item.output)))
            open_ = False
            continue
        if isinstance(item, MessageItem) and item.role != "assistant":
            messages.append(Message(role=item.role, content=joined(item.content)))
            open_ = False
            continue
        last = messages[-1] if open_ else Message(role="assistant", content="")
        if not open_ or (isinstance(item, MessageItem) and last.content):
            last = Message(role="assistant", content="")
            messages.append(last)
        open_ = True
        if isinstance(item, MessageItem):
            last.content = joined(item.content)
        elif isinstance(item, CallItem):
            function = FunctionCall(name=qualified(item.namespace, item.name), arguments=item.arguments)
            last.tool_calls = [*(last.tool_calls or ()), ToolCall(id=item.call_id, function=function)]
        elif isinstance(item, ReasoningItem):
            parts = item.content or item.summary
            last.reasoning_content = (last.reasoning_content or "") + "\n".join(part.text for part in parts)
    return messages


def qualified(namespace: str | None, name: str) -> str:
    """The name of a tool as the model sees it."""
    return name if namespace is None else f"{namespace}.{name}"


def _tools(tool: FlatTool | NamespaceTool | WebSearch, namespace: str | None = None) -> Iterator[Tool]:
    """The tools that the model may call."""
    if isinstance(tool, NamespaceTool):
        for each in tool.tools:
            yield from _tools(each, tool.name)
    elif isinstance(tool, FlatTool):
        name = qualified(namespace, tool.name)
        yield function_tool(name, tool.description, tool.parameters, strict=tool.strict)


def _format(wanted: TextFormat) -> ResponseFormat:
    if wanted.type != "json_schema":
        return ResponseFormat(type=wanted.type)
    return schema_format(wanted.name or "answer", wanted.schema_ or {})
