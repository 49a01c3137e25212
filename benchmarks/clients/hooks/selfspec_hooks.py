"""Hooks of schemathesis: makes most of the requests that fit the schema such that the model answers them.

What is drawn from the schema alone names a model that is not served, token ids that do not exist, or more tokens than
the context has, so nearly every request would end at the first of these checks. A quarter of them stays as drawn.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from typing import Any

import schemathesis

MODEL, VOCABULARY, MOST_TOKENS, MOST_CHOICES = "tiny", 4096, 8, 3
METHODS = ("uniform", "suffix", "prompt-lookup", "autoregressive")
UNSUPPORTED = ("best_of", "suffix", "tools", "tool_choice", "parallel_tool_calls", "chat_template_kwargs")


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
    return tamed


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
    schema = {"type": "object", "properties": {"yes": {"type": "boolean"}}, "required": ["yes"]}
    return {**value, "json_schema": {"name": "answer", "schema": schema}}


_TAMED: dict[str, Callable[[Any, int], Any]] = {
    "model": lambda value, _: MODEL if isinstance(value, str) else value,
    "max_tokens": _count(1, MOST_TOKENS),
    "max_completion_tokens": _count(1, MOST_TOKENS),
    "min_tokens": _count(0, 1),
    "n": _count(1, MOST_CHOICES),
    "prompt": _ids,
    "tokens": _ids,
    "stop_token_ids": _ids,
    "logit_bias": _bias,
    "messages": _messages,
    "speculative": _speculative,
    "response_format": _format,
}
