"""Errors of the API, in OpenAI's form: ``{"error": {"message", "type", "param", "code"}}``."""

from collections.abc import Mapping
from typing import Any

from selfspec.errors import (
    ContextLengthError,
    EngineClosedError,
    InvalidParameterError,
    InvalidPromptError,
    InvalidSettingError,
    MethodLoadError,
    MissingPackageError,
    OutOfMemoryError,
    QueueFullError,
    RequestTooLargeError,
    SelfSpecError,
    UnknownMethodError,
    WorkerDiedError,
    first_line,
)

RETRY_SECONDS = 1
"""What ``Retry-After`` says while the queue is full or a worker starts again."""

_KINDS = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}


class ApiError(Exception):
    """An error that is answered with a status and a body.

    Args:
        status: the HTTP status.
        message: what is wrong and what to do about it.
        param: the field at fault, as ``messages[0].content``; ``None`` if there is none.
        code: a word for programs, such as ``model_not_found``.
        retry: whether the same request may succeed a moment later.
    """

    def __init__(
        self, status: int, message: str, *, param: str | None = None, code: str | None = None, retry: bool = False
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.code, self.retry = status, message, param, code, retry

    @property
    def body(self) -> dict[str, Any]:
        """The body of the answer."""
        kind = _KINDS.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        error = {"message": self.message, "type": kind, "param": self.param, "code": self.code}
        # Names of unknown fields come from the client and may hold lone surrogates, which are no UTF-8.
        return {"error": {key: printable(value) for key, value in error.items()}}

    @property
    def headers(self) -> dict[str, str]:
        """Headers of the answer."""
        if self.status == 401:
            return {"WWW-Authenticate": "Bearer"}
        return {"Retry-After": str(RETRY_SECONDS)} if self.retry else {}


def printable(text: str | None) -> str | None:
    """The text with characters replaced that UTF-8 cannot encode."""
    return None if text is None else text.encode("utf-8", "replace").decode("utf-8")


def as_api_error(error: Exception, fields: Mapping[str, str] | None = None, prompt: str = "prompt") -> ApiError:
    """The answer to an error of the library.

    Args:
        error: what was raised.
        fields: the request's names of sampling parameters, where they are not the library's.
        prompt: the field that holds the prompt.
    """
    text = " ".join(str(error).split())
    match error:
        case ApiError():
            return error
        case ContextLengthError():
            return ApiError(400, text, param=prompt, code="context_length_exceeded")
        case InvalidPromptError():
            return ApiError(400, text, param=prompt, code="invalid_value")
        case InvalidParameterError():
            return ApiError(400, text, param=_field(text, fields or {}), code="invalid_value")
        case UnknownMethodError() | InvalidSettingError() | MethodLoadError():
            return ApiError(400, text, param="speculative.method", code="invalid_value")
        case QueueFullError():
            return ApiError(429, text, code="queue_full", retry=True)
        case OutOfMemoryError():
            return ApiError(503, text, code="out_of_memory", retry=True)
        case WorkerDiedError():
            return ApiError(503, text, code="worker_died", retry=True)
        case EngineClosedError():
            return ApiError(503, text, code="not_ready", retry=True)
        case RequestTooLargeError():
            return ApiError(400, text, param=prompt, code="request_too_large")
        case MissingPackageError():
            return ApiError(501, text, code="not_installed")
        case SelfSpecError():
            return ApiError(500, text)
    return ApiError(500, f"the server failed: {type(error).__name__}: {first_line(error)}")


def _field(message: str, fields: Mapping[str, str]) -> str | None:
    """The field that a message about a sampling parameter begins with."""
    word = message.partition(" ")[0].strip(":'`")
    return fields.get(word, word if word.isidentifier() else None)
