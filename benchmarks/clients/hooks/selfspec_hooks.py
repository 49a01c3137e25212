"""Hooks of schemathesis: makes most of the requests that fit the schema such that the model answers them.

What is drawn from the schema alone names a model that is not served, token ids that do not exist, or more tokens than
the context has, so nearly every request would end at the first of these checks. A quarter of them stays as drawn.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from typing import Any

import schemathesis

MODEL, VOCABULARY, MOST_TOKENS, MOST_CHOICES = "agent", 4096, 16, 3
METHODS = ("uniform", "suffix", "prompt-lookup", "autoregressive")
UNSUPPORTED = ("best_of", "chat_template_kwargs")
FORMS = ("response_format", "guided_json", "guided_regex", "guided_choice", "guided_grammar", "structured_outputs")
SCHEMA = {"type": "object", "properties": {"yes": {"type": "boolean"}}, "required": ["yes"]}


@schemathesis.hook
def before_call(context: Any, case: Any, kwargs: Any) -> None:
    """Changes a body before it is sent; hooks that change drawn bodies miss those of the coverage phase."""
    body = case.body
    number = zlib.crc32(repr(body).encode("utf-8", "replace"))
    if isinstance(body, dict) and number % 4:
        case.body = tame(body, number)


def tame(body: dict[str, Any], number: int) -> dict[str, Any]:
    """Changes values of the right type into ones that the server can take; leaves the others.

    Args:
        body: of a request.
        number: decides where there is a choice.
    """
    tamed = {name: _TAMED[name](value, number) if name in _TAMED else value for name, value in body.items()}
    for name in UNSUPPORTED:
        tamed.pop(name, None)
    if tamed.get("top_logprobs") is not None:
        tamed["logprobs"] = True
    if tamed.get("stream_options") is not None:
        tamed["stream"] = True
    if tamed.get("echo") and tamed.get("logprobs") is not None:
        tamed.pop("stream", None)
        tamed.pop("stream_options", None)
    if "prompt" in tamed and "messages" in tamed:  # /tokenize takes one of them
        tamed.pop("prompt")
    if tamed.get("suffix") is not None:  # of one text
        tamed.pop("echo", None)
        tamed["prompt"] = "a"
    for name in [name for name in FORMS if tamed.get(name) is not None][1:]:  # an answer has one form
        tamed.pop(name)
    if not tamed.get("tools"):
        tamed.pop("tool_choice", None)
    elif "tool_choice" in tamed:
        tamed["tool_choice"] = _choice(tamed["tool_choice"], tamed["tools"])
    return tamed


def _choice(value: Any, tools: Any) -> Any:
    """A choice that names one of the tools."""
    first = tools[0] if isinstance(tools, list) and isinstance(tools[0], dict) else {}
    function = first["function"] if isinstance(first.get("function"), dict) else first
    name = function.get("name")
    if not isinstance(value, dict) or not isinstance(name, str):
        return value
    named = {**value, "name": name} if "name" in value else value
    return {**named, "function": {"name": name}} if "function" in named else named


def _tools(value: Any, number: int) -> Any:
    """Few tools, in half of the cases with a schema that a grammar can surely be made of."""
    if not isinstance(value, list):
        return value
    return [_tool(each) if number % 2 else each for each in value[:4]]


def _tool(value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    if isinstance(value.get("function"), dict):
        return {**value, "function": {**value["function"], "parameters": SCHEMA}}
    return {**value, "input_schema" if "input_schema" in value else "parameters": SCHEMA}


def _instead(given: Any) -> Callable[[Any, int], Any]:
    """In half of the cases something that can surely be used."""
    return lambda value, number: given if isinstance(value, str | dict) and number % 2 else value


def _text_options(value: Any, number: int) -> Any:
    if (
        isinstance(value, dict)
        and isinstance(value.get("format"), dict)
        and value["format"].get("type") == "json_schema"
    ):
        return {**value, "format": {**value["format"], "schema": SCHEMA}} if number % 2 else value
    return value


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _count(least: int, most: int) -> Callable[[Any, int], Any]:
    return lambda value, _: least + abs(value) % (most - least + 1) if _is_count(value) else value


def _ids(value: Any, number: int) -> Any:
    """Token ids, or anything with token ids in it."""
    if isinstance(value, list):
        return [_ids(each, number) for each in value[:16]] or ["a"]
    return abs(value) % VOCABULARY if _is_count(value) else value or "a"


def _bias(value: Any, _: int) -> Any:
    if not isinstance(value, dict):
        return value
    return {str(int(key) % VOCABULARY) if key.isascii() and key.isdigit() else key: bias for key, bias in value.items()}


def _messages(value: Any, _: int) -> Any:
    if not isinstance(value, list):
        return value
    return [
        {**message, "content": message.get("content") or "hello"} if isinstance(message, dict) else message
        for message in value[:8]
    ]


def _speculative(value: Any, number: int) -> Any:
    if isinstance(value, dict) and isinstance(value.get("method"), str):
        return {**value, "method": METHODS[number % len(METHODS)]}
    return value


def _format(value: Any, number: int) -> Any:
    """Gives formats the schema that they need, and in half of the cases one that a grammar can surely be made of."""
    if not isinstance(value, dict) or value.get("type") not in ("text", "json_object", "json_schema"):
        return value
    if value["type"] != "json_schema":
        return {name: each for name, each in value.items() if name != "json_schema"}
    given = value.get("json_schema")
    if isinstance(given, dict) and given.get("schema") is not None and number % 2:
        return value
    return {**value, "json_schema": {"name": "answer", "schema": SCHEMA}}


_TAMED: dict[str, Callable[[Any, int], Any]] = {
    "model": lambda value, _: MODEL if isinstance(value, str) else value,
    "max_tokens": _count(1, MOST_TOKENS),
    "max_completion_tokens": _count(1, MOST_TOKENS),
    "max_output_tokens": _count(1, MOST_TOKENS),
    "n_predict": _count(0, MOST_TOKENS),
    "min_tokens": _count(0, 1),
    "n": _count(1, MOST_CHOICES),
    "prompt": _ids,
    "tokens": _ids,
    "stop_token_ids": _ids,
    "logit_bias": _bias,
    "messages": _messages,
    "speculative": _speculative,
    "response_format": _format,
    "tools": _tools,
    "text": _text_options,
    "guided_json": _instead(SCHEMA),
    "guided_regex": _instead("a{1,4}"),
    "guided_grammar": _instead('start: "a" | "b"'),
}
