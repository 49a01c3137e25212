"""What a server answered, and how it can fail to."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from selfspec.errors import SelfSpecError

_REFUSALS = (400, 404, 405, 415, 422, 501)
"""Statuses by which servers say that they do not have what was asked for."""


class ServerFaultError(SelfSpecError):
    """The server did not answer as OpenAI's API does.

    Args:
        message: what it did, in one line.
        status: of HTTP, if the server answered with an error.
    """

    def __init__(self, message: str, status: int | None = None) -> None:
        super().__init__(message)
        self.status = status

    @property
    def refused(self) -> bool:
        """Whether the server says that it does not have what was asked for."""
        return self.status in _REFUSALS


class NotSupportedError(SelfSpecError):
    """A check cannot be made with this server; the message says why."""


@dataclass(frozen=True)
class Token:
    """A token of an answer.

    Attributes:
        text: its text.
        logprob: its log-probability.
        alternatives: the most probable tokens at its place, with their log-probabilities.
    """

    text: str
    logprob: float
    alternatives: tuple[tuple[str, float], ...]


@dataclass(frozen=True)
class Answer:
    """An answer, or in a stream what an event adds to it.

    Attributes:
        text: of the answer.
        finish_reason: why it ended; ``None`` if it has not.
        tokens: its tokens, if log-probabilities were asked for and given.
        cached_tokens: tokens of the prompt that were not read again; ``None`` if the server does not say.
    """

    text: str
    finish_reason: str | None
    tokens: tuple[Token, ...] | None = None
    cached_tokens: int | None = None


def member(value: Any, *path: str | int) -> Any:
    """The value at a path of keys and indices in a JSON value; ``None`` where there is none."""
    for key in path:
        if isinstance(value, dict) and isinstance(key, str):
            value = value.get(key)
        elif isinstance(value, Sequence) and not isinstance(value, str) and isinstance(key, int) and key < len(value):
            value = value[key]
        else:
            return None
    return value


def text_or_empty(value: Any) -> str:
    """A JSON value if it is a text."""
    return value if isinstance(value, str) else ""
