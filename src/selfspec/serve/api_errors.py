"""Errors of the API, in OpenAI's form: ``{"error": {"message", "type", "param", "code"}}``, and in Anthropic's."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

from selfspec import errors
from selfspec.errors import first_line

RETRY_SECONDS = 1
"""What ``Retry-After`` says while the queue is full or the server ends."""

UNSUPPORTED = "unsupported_parameter"
"""The code of errors about what no request can ask of this server."""

_MANY = 4
"""Most problems that a message names."""

_CONSIDERED = 64
"""Most problems that are compared with each other: a body can have a million."""

_MOST_MESSAGE, _MOST_PARAM = 2000, 200
"""Characters of an answer that may repeat what a client sent, such as the name of an unknown field."""

_KINDS = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}
_MESSAGES_KINDS = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
    529: "overloaded_error",
}
"""Types of errors by status, in OpenAI's interfaces and in Anthropic's; others by their hundreds."""


class ApiError(Exception):
    """An error that is answered with a status and a body.

    ``param`` is the field at fault, as ``messages[0].content``; ``code`` is for programs, as ``model_not_found``; with
    ``retry`` the same request may succeed a moment later.
    """

    def __init__(
        self, status: int, message: str, *, param: str | None = None, code: str | None = None, retry: bool = False
    ) -> None:
        super().__init__(message)
        self.status, self.code, self.retry = status, code, retry
        self.message = _cut(message, _MOST_MESSAGE)
        self.param = None if param is None else _cut(param, _MOST_PARAM)

    def __reduce__(self) -> tuple[Any, ...]:
        """It comes from other processes, too."""
        made = partial(ApiError, self.status, self.message, param=self.param, code=self.code, retry=self.retry)
        return made, ()

    @property
    def body(self) -> dict[str, Any]:
        """The body of the answer."""
        return {"error": self._said(_KINDS, "server_error")}

    @property
    def messages_body(self) -> dict[str, Any]:
        """The body of the answer as Anthropic's interface has it."""
        return {"type": "error", "error": self._said(_MESSAGES_KINDS, "api_error")}

    def _said(self, kinds: Mapping[int, str], failed: str) -> dict[str, str | None]:
        kind = kinds.get(self.status, "invalid_request_error" if self.status < 500 else failed)
        error = {"message": self.message, "type": kind, "param": self.param, "code": self.code}
        # Names of unknown fields come from the client and may hold lone surrogates, which are no UTF-8.
        return {key: printable(value) for key, value in error.items()}

    @property
    def headers(self) -> dict[str, str]:
        """Headers of the answer."""
        if self.status == 401:
            return {"WWW-Authenticate": "Bearer"}
        if self.code == "timeout":
            return {"x-should-retry": "false"}  # clients of OpenAI would send it again
        return {"Retry-After": str(RETRY_SECONDS)} if self.retry else {}


def _cut(text: str, most: int) -> str:
    return text if len(text) <= most else f"{text[: most - 1]}…"


def invalid(message: str, param: str | None, code: str = "invalid_value") -> ApiError:
    """The answer to a value that a field cannot have."""
    return ApiError(400, message, param=param, code=code)


def exceeds_context(message: str, param: str | None) -> ApiError:
    """The answer to what does not fit the context, or a limit that stands for it."""
    return invalid(message, param, "context_length_exceeded")


def too_long(count: int, most: int, param: str, unit: str = "tokens", more: str = "") -> ApiError:
    """The answer to a prompt that is too long; agents find in these words that they have to shorten their chat."""
    return exceeds_context(f"prompt is too long: {count} {unit} > {most} maximum; shorten it{more}", param)


def printable(text: str | None) -> str | None:
    """The text with characters replaced that UTF-8 cannot encode."""
    return None if text is None else text.encode("utf-8", "replace").decode("utf-8")


def as_api_error(error: Exception) -> ApiError:
    """The answer to an error of the library, which names the parameter at fault as the library does."""
    text = " ".join(str(error).split())
    match error:
        case ApiError():
            return error
        case errors.ContextLengthError():
            return exceeds_context(text, "prompt")
        case errors.InvalidPromptError():
            return invalid(text, "prompt")
        case errors.InvalidParameterError():
            return invalid(text, _field(text))
        case errors.UnknownMethodError() | errors.InvalidSettingError() | errors.MethodLoadError():
            return invalid(text, "speculative.method")
        case errors.QueueFullError():
            return ApiError(429, text, code="queue_full", retry=True)
        case errors.RequestTimeoutError():
            return ApiError(408, text, code="timeout")
        case errors.OutOfMemoryError():
            return ApiError(503, text, code="out_of_memory", retry=True)
        case errors.EngineFailedError():
            return ApiError(503, text, code="engine_failed", retry=True)
        case errors.EngineClosedError():
            return ApiError(503, text, code="not_ready", retry=True)
        case errors.RequestTooLargeError():
            return invalid(text, "prompt", "request_too_large")
        case errors.MissingPackageError():
            return ApiError(501, text, code="not_installed")
        case errors.SelfSpecError():
            return ApiError(500, text)
    return ApiError(500, f"the server failed: {type(error).__name__}: {first_line(error)}")


@contextmanager
def renaming(fields: Mapping[str, str]) -> Iterator[None]:
    """Makes errors of the API from those of the library, and names the field at fault by ``fields``."""
    try:
        yield
    except ApiError as error:
        error.param = fields.get(error.param or "", error.param)
        raise
    except errors.SelfSpecError as error:
        told = as_api_error(error)
        told.param = fields.get(told.param or "", told.param)
        raise told from error


def _field(message: str) -> str | None:
    """The field that a message about a sampling parameter begins with."""
    word = message.partition(" ")[0].strip(":'`")
    return word if word.isidentifier() else None


def as_invalid(problems: Sequence[Mapping[str, Any]], body: object) -> ApiError:
    """The answer to a body that does not fit: the error of the field that pydantic's errors are about."""
    if problems[0]["loc"] == () and not isinstance(body, dict):
        return ApiError(400, "the body must be a JSON object, sent as application/json", code="invalid_json")
    found: dict[str, Mapping[str, Any]] = {}
    for error in problems[:_CONSIDERED]:
        path = _path(error["loc"], body)
        if path not in found or _is_type(found[path]):  # an alternative of the right type says more
            found[path] = error
    # Of the alternatives that a value could be, those matter that it nearly was: they complain further inside.
    inner = {path: error for path, error in found.items() if not any(_is_inside(other, path) for other in found)}
    path, error = next(iter(inner.items()))
    if error["type"] == "extra_forbidden":
        return invalid(f"unknown parameter: '{path}'", path, "unknown_parameter")
    if error["type"] == UNSUPPORTED:
        return invalid(str(error["msg"]), path, UNSUPPORTED)
    if error["type"] == "missing":
        return invalid(f"missing required parameter: '{path}'", path, "missing_required_parameter")
    told = [f"{where}: {_sentence(each)}" if where else _sentence(each) for where, each in inner.items()]
    left = len(told[_MANY:]) + len(problems[_CONSIDERED:])
    more = f" (and {left} more)" if left else ""
    return invalid("; ".join(told[:_MANY]) + more, path or _named(told[0], body))


def _path(loc: Sequence[str | int], body: object) -> str:
    """The field that a location means, as ``messages[0].content``. Names of alternatives in it are left out."""
    path, value = "", body
    for index, part in enumerate(loc):
        last = index == len(loc) - 1
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
