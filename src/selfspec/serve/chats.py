"""From a chat to what a template takes, and to what the answer has to be."""

import hashlib
import json
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from selfspec.constraint import Constraint
from selfspec.serve.api_errors import invalid
from selfspec.serve.formats.dialect import REASONING, Asked, Dialect
from selfspec.serve.requests import (
    AllowedTools,
    ChatAllowedTools,
    ChatRequest,
    FunctionTool,
    Message,
    NamedTool,
    joined,
)

_ROLES = {"developer": "system"}
"""Roles that chat templates do not know, and what they are there."""

_EFFORTS = {"none": "low", "minimal": "low", "xhigh": "high", "max": "high"}
"""Efforts that templates do not know, and the nearest one that they do."""

_NONE = {"type": "object", "properties": {}, "additionalProperties": False}
"""The arguments of a tool that names none."""

_NO_THINKING = ("none", "minimal")
_ID = 9
"""Characters of the ids of calls, where a template takes no others (Mistral)."""


def asked_of(request: ChatRequest, dialect: Dialect, form: Constraint | None) -> Asked:
    """What a chat asks of the form of its answer; refuses what the model or the request's tools cannot do."""
    tools, choice = request.offered_tools or (), request.tool_choice
    if not tools:
        if choice not in (None, "auto", "none"):
            raise invalid("tool_choice needs tools; give some, or leave it out", "tool_choice")
        return Asked({}, form=form)
    if not dialect.reads("tools"):
        raise invalid("the chat template of this model knows no tools; leave tools out", "tools")
    schemas = {tool.function.name: _schema_of(tool.function) for tool in tools}
    names, must_call = list(schemas), choice == "required"
    if isinstance(choice, NamedTool):
        names, must_call = [choice.function.name], True
    elif isinstance(choice, (ChatAllowedTools, AllowedTools)):
        allowed = choice.allowed_tools if isinstance(choice, ChatAllowedTools) else choice
        names, must_call = allowed.names, allowed.mode == "required"
    # A model that has to call seldom stops by itself, so it calls once unless the client asks for more.
    parallel = request.parallel_tool_calls is True if must_call else request.parallel_tool_calls is not False
    for name in names:
        if name not in schemas:
            raise invalid(f"tool_choice names '{name:.64}', which is not among the tools", "tool_choice")
    return Asked(
        {name: schemas[name] for name in names},
        must_call=must_call,
        parallel=parallel and dialect.takes_several_calls,  # else the chat could not go on
        strict=dialect.can_be_strict() and any(tool.function.strict for tool in tools),
        form=form,
    )


def _schema_of(function: FunctionTool) -> Mapping[str, Any]:
    """The schema of a tool's arguments; refuses one whose outermost keywords are not what JSON Schema has there."""
    given = {key: value for key, value in (function.parameters or _NONE).items() if value is not None}
    properties, required = given.get("properties", {}), given.get("required", [])
    kinds = properties.values() if isinstance(properties, dict) else [None]
    fits = (
        all(isinstance(kind, bool) or _is_schema(kind) for kind in kinds)
        and isinstance(required, list)
        and all(isinstance(name, str) for name in required)
    )
    if not fits:
        text = f"the parameters of '{function.name:.64}' are no JSON schema: see their properties and required"
        raise invalid(text, "tools")
    return given


def _is_schema(kind: object) -> bool:
    return isinstance(kind, dict) and isinstance(kind.get("enum", []), list)


def variables_of(request: ChatRequest, dialect: Dialect, reserved: Collection[str]) -> dict[str, Any]:
    """The variables of the template; refuses those that are not for clients."""
    given = request.chat_template_kwargs or {}
    for name in given:
        if name in reserved:
            raise invalid(
                f"'{name}' cannot be set here; chat_template_kwargs are more variables of the template",
                f"chat_template_kwargs.{name}",
            )
    variables: dict[str, Any] = {}
    effort, thinks = request.reasoning_effort, _thinks(request)
    if thinks is not None:
        variables |= {name: thinks for name in ("enable_thinking", "thinking") if dialect.reads(name)}
    if effort is not None and dialect.reads("reasoning_effort"):
        variables["reasoning_effort"] = _EFFORTS.get(effort, effort)
    variables |= given
    if request.offered_tools:
        variables["tools"] = [
            tool.model_dump(exclude_none=True, exclude={"cache_control"}) for tool in request.offered_tools
        ]
    if continues(request):
        variables |= {"add_generation_prompt": False, "continue_final_message": True}
    elif request.add_generation_prompt is not None:
        variables["add_generation_prompt"] = request.add_generation_prompt
    return variables


def continues(request: ChatRequest) -> bool:
    """Whether the answer continues the last message; refuses what cannot be continued."""
    last = request.messages[-1]
    if not (request.continue_final_message or last.prefix):
        return False
    if last.role != "assistant" or last.tool_calls or not last.content:
        raise invalid(
            "only a last message of the assistant, with content and without calls, can be continued", "messages"
        )
    if request.add_generation_prompt:
        raise invalid("add_generation_prompt and continue_final_message exclude each other", "add_generation_prompt")
    return True


def prefilled(request: ChatRequest) -> str:
    """What an answer that continues the last message begins with."""
    return joined(request.messages[-1].content) if continues(request) else ""


def as_dicts(messages: Sequence[Message], dialect: Dialect) -> list[dict[str, Any]]:
    """Messages as the chat template takes them.

    System messages at the beginning are one, since many templates know one alone; a later one is the user's where the
    template refuses it. Messages of the user that follow each other are one where it refuses that.
    """
    given = [_as_dict(message, dialect) for message in messages]
    first = next((index for index, each in enumerate(given) if each["role"] != "system"), len(given))
    if first > 1:
        text = "\n\n".join(each["content"] for each in given[:first] if each["content"])
        given[:first] = [{**given[0], "content": text}]
    if not dialect.takes_late_system:
        for each in given[1:] if dialect.takes_system else given:
            each["role"] = "user" if each["role"] == "system" else each["role"]
    return _alternating(given) if dialect.alternates else given


def _alternating(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Messages in which none of the user follows another one, or what a tool found: their texts are joined."""
    kept: list[dict[str, Any]] = []
    for each in messages:
        if each["role"] == "user" and kept and kept[-1]["role"] in ("user", "tool"):
            kept[-1]["content"] += f"\n\n{each['content']}"
        else:
            kept.append(each)
    return kept


def _as_dict(message: Message, dialect: Dialect) -> dict[str, Any]:
    """A message as chat templates take it: content as one text, and reasoning under the names that they read."""
    given: dict[str, Any] = {"role": _ROLES.get(message.role, message.role), "content": joined(message.content)}
    if message.name is not None:
        given["name"] = message.name
    reasoning = message.reasoning_content or message.reasoning
    if reasoning:
        given |= {name: reasoning for name in REASONING if dialect.reads(name)}
        if message.tool_calls and dialect.text_or_reasoning:
            given["content"] = ""
    if message.tool_calls:
        given["tool_calls"] = [
            {
                "id": _id(call.id, dialect),
                "type": "function",
                "function": {"name": call.function.name, "arguments": _arguments(call.function.arguments, dialect)},
            }
            for call in message.tool_calls
        ]
    if message.tool_call_id is not None:
        given["tool_call_id"] = _id(message.tool_call_id, dialect)
    return given


def _thinks(request: ChatRequest) -> bool | None:
    """Whether the model is to reason; ``None`` for what its template does by itself."""
    if isinstance(request.thinking, bool) or request.thinking is None:
        if request.thinking is None and request.reasoning_effort is not None:
            return request.reasoning_effort not in _NO_THINKING
        return request.thinking
    return request.thinking.type == "enabled"


def _arguments(text: str, dialect: Dialect) -> Any:
    """Arguments as the template takes them."""
    return text if dialect.arguments_as_text else as_object(text)


def as_object(arguments: str) -> dict[str, Any]:
    """The arguments of a call as an object; those that were cut off, or are none, as text in it."""
    try:
        found = json.loads(arguments or "{}")
    except (ValueError, RecursionError):
        found = None
    return found if isinstance(found, dict) else {"arguments": arguments}


def _id(given: str, dialect: Dialect) -> str:
    if not dialect.short_ids or (len(given) == _ID and given.isalnum()):
        return given
    return hashlib.sha256(given.encode("utf-8", "replace")).hexdigest()[:_ID]
