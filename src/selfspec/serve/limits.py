"""What a server takes at most."""

from dataclasses import dataclass, fields

from selfspec.errors import InvalidParameterError


@dataclass(frozen=True)
class Limits:
    """The largest request that is taken.

    Attributes:
        body_bytes: bytes of a request's body.
        prompt_tokens: tokens of a prompt; ``None`` for what fits the model's context.
        new_tokens: tokens of an answer; ``None`` for what fits.
        default_new_tokens: tokens of a chat's answer where the request names no number, if they fit.
        choices: choices of one request: prompts times ``n``.
        waiting: requests that may wait; more are answered with status 429.
        body_seconds: time for a client to send a body.
    """

    body_bytes: int = 4 * 2**20
    prompt_tokens: int | None = None
    new_tokens: int | None = None
    default_new_tokens: int = 1024
    choices: int = 128
    waiting: int = 256
    body_seconds: float = 60.0

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if value is not None and value <= 0:
                raise InvalidParameterError(f"{field.name} must be above 0, not {value}")
