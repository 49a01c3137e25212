"""What happens to sequences in a step."""

import time
from dataclasses import dataclass, field
from typing import TypeAlias

from selfspec.decoding.request import Request
from selfspec.decoding.sequence import Sequence
from selfspec.limits import is_out_of_memory, out_of_memory
from selfspec.types import Round


@dataclass(frozen=True)
class Started:
    """A request was admitted.

    Attributes:
        sequence: its sequence.
        at: when, in seconds of ``time.perf_counter``.
    """

    sequence: Sequence
    at: float = field(default_factory=time.perf_counter)


@dataclass(frozen=True)
class Prefilled:
    """A prompt was read to its end, and the first token chosen.

    Attributes:
        sequence: the sequence.
        at: when, in seconds of ``time.perf_counter``.
    """

    sequence: Sequence
    at: float = field(default_factory=time.perf_counter)


@dataclass(frozen=True)
class Advanced:
    """A round was played.

    Attributes:
        sequence: the sequence.
        round: what came of it.
        at: when, in seconds of ``time.perf_counter``.
    """

    sequence: Sequence
    round: Round
    at: float = field(default_factory=time.perf_counter)


@dataclass(frozen=True)
class Finished:
    """An output ended.

    Attributes:
        sequence: the sequence.
        at: when, in seconds of ``time.perf_counter``.
    """

    sequence: Sequence
    at: float = field(default_factory=time.perf_counter)


@dataclass(frozen=True)
class Failed:
    """A request cannot be admitted, or its sequence cannot go on; the others can.

    Attributes:
        request: the request.
        error: why.
        at: when, in seconds of ``time.perf_counter``.
    """

    request: Request
    error: Exception
    at: float = field(default_factory=time.perf_counter)

    @staticmethod
    def by(request: Request, error: Exception) -> "Failed":
        """A request that an exception ended.

        Args:
            request: the request.
            error: the exception. One that means that memory ran out is replaced, since its frames would keep the
                tensors alive that did not fit.
        """
        if is_out_of_memory(error):
            error = out_of_memory(len(request.prompt_ids), request.max_new_tokens)
        return Failed(request, error)


Event: TypeAlias = Started | Prefilled | Advanced | Finished | Failed
