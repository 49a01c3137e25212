"""What the server's process and its workers say to each other, over a pipe each."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

from selfspec.errors import SelfSpecError
from selfspec.runtimes.costs.rows import RowCosts
from selfspec.serve.backend import Ended, Load, ModelInfo, Token
from selfspec.types import SamplingParams


@dataclass(frozen=True)
class Submit:
    """Asks a worker for an answer."""

    number: int
    token_ids: tuple[int, ...]
    params: SamplingParams
    method: str | None
    request_id: str


@dataclass(frozen=True)
class Cancel:
    """Tells a worker that an answer is no longer needed."""

    number: int


@dataclass(frozen=True)
class Close:
    """Tells a worker to end."""


@dataclass(frozen=True)
class Ready:
    """Says that a worker takes requests, and what a forward takes in it; or why it never will."""

    model: ModelInfo | None
    costs: RowCosts | None = None
    error: SelfSpecError | None = None


@dataclass(frozen=True)
class Accepted:
    """Says that an answer is under way; or why it is not."""

    number: int
    error: Exception | None = None


@dataclass(frozen=True)
class Step:
    """The next tokens of an answer."""

    number: int
    tokens: Sequence[Token]


@dataclass(frozen=True)
class End:
    """The end of an answer; or why it ended early."""

    number: int
    ended: Ended | None
    error: Exception | None = None


@dataclass(frozen=True)
class Busy:
    """What a worker is doing."""

    load: Load


ToWorker: TypeAlias = Submit | Cancel | Close
FromWorker: TypeAlias = Ready | Accepted | Step | End | Busy
