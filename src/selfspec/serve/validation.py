"""From what pydantic says about a body to an error that names the field."""

from collections.abc import Mapping, Sequence
from typing import Any

from selfspec.serve.errors import ApiError

_MANY = 4
"""Problems that a message names at most."""

_CONSIDERED = 64
"""Problems that are compared with each other. A body can have one in each of a million places."""


def as_invalid(errors: Sequence[Mapping[str, Any]], body: object) -> ApiError:
    """The answer to a body that does not fit.

    Args:
        errors: of pydantic: ``loc``, ``type`` and ``msg`` each.
        body: that they are about.
    """
    if errors[0]["type"] == "json_invalid":
        reason = errors[0].get("ctx", {}).get("error", errors[0]["msg"])
        return ApiError(400, f"the body is not valid JSON: {reason}", code="invalid_json")
    if errors[0]["loc"] in ((), ("body",)) and not isinstance(body, dict):
        return ApiError(400, "the body must be a JSON object, sent as application/json", code="invalid_json")
    found: dict[str, Mapping[str, Any]] = {}
    for error in errors[:_CONSIDERED]:
        path = _path(error["loc"], body)
        if path not in found or _is_type(found[path]):  # an alternative of the right type says more
            found[path] = error
    # Of the alternatives that a value could be, those matter that it nearly was: they complain further inside.
    inner = {path: error for path, error in found.items() if not any(_is_inside(other, path) for other in found)}
    path, error = next(iter(inner.items()))
    if error["type"] == "extra_forbidden":
        return ApiError(400, f"unknown parameter: '{path}'", param=path, code="unknown_parameter")
    if error["type"] == "missing":
        return ApiError(400, f"missing required parameter: '{path}'", param=path, code="missing_required_parameter")
    told = [f"{where}: {_sentence(each)}" if where else _sentence(each) for where, each in inner.items()]
    left = len(told[_MANY:]) + len(errors[_CONSIDERED:])
    more = f" (and {left} more)" if left else ""
    return ApiError(400, "; ".join(told[:_MANY]) + more, param=path or _named(told[0], body), code="invalid_value")


def _path(loc: Sequence[str | int], body: object) -> str:
    """The field that a location means, as ``messages[0].content``. Names of alternatives in it are left out."""
    path, value = "", body
    for index, part in enumerate(loc[1:] if loc and loc[0] in ("body", "query", "path", "header") else loc):
        last = index == len(loc) - 2
        if isinstance(part, int) and isinstance(value, list):
            path += f"[{part}]"
            value = value[part] if part < len(value) else None
        elif isinstance(part, str) and isinstance(value, dict) and (part in value or last):
            path += f".{part}" if path else part
            value = value.get(part)
    return path


def _is_type(error: Mapping[str, Any]) -> bool:
    return str(error["type"]).endswith("_type")


def _is_inside(path: str, outer: str) -> bool:
    return path != outer and outer != "" and path.startswith((f"{outer}.", f"{outer}["))


def _sentence(error: Mapping[str, Any]) -> str:
    text = str(error["msg"]).removeprefix("Value error, ")
    return text[:1].lower() + text[1:]


def _named(message: str, body: object) -> str | None:
    """The field that a message about the whole body begins with."""
    word = message.partition(" ")[0]
    return word if isinstance(body, dict) and word in body else None
