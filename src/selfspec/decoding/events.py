"""What happens to sequences in a step."""

from dataclasses import dataclass
from typing import TypeAlias

from selfspec.decoding.request import Request
from selfspec.decoding.sequence import Sequence
from selfspec.errors import SelfSpecError
from selfspec.types import Round


@dataclass(frozen=True)
class Started:
    """A request was admitted.

    Attributes:
        sequence: its sequence.
    """

    sequence: Sequence


@dataclass(frozen=True)
class Prefilled:
    """A prompt was read to its end, and the first token chosen.

    Attributes:
        sequence: the sequence.
    """

    sequence: Sequence


@dataclass(frozen=True)
class Advanced:
    """A round was played.

    Attributes:
        sequence: the sequence.
        round: what came of it.
    """

    sequence: Sequence
    round: Round


@dataclass(frozen=True)
class Finished:
    """An output ended.

    Attributes:
        sequence: the sequence.
    """

    sequence: Sequence


@dataclass(frozen=True)
class Failed:
    """A request cannot be admitted, or its sequence cannot go on; the others can.

    Attributes:
        request: the request.
        error: why.
    """

    request: Request
    error: SelfSpecError


Event: TypeAlias = Started | Prefilled | Advanced | Finished | Failed
