"""What happens to requests in a step; ``at`` is when, in seconds of ``time.perf_counter``."""

import time
from dataclasses import dataclass, field
from typing import TypeAlias

from selfspec.decoding.request import Request
from selfspec.decoding.sequence import Sequence
from selfspec.limits import is_out_of_memory, out_of_memory
from selfspec.types import Round


@dataclass(frozen=True)
class _OfSequence:
    sequence: Sequence

    @property
    def request(self) -> Request:
        """Whose event it is."""
        return self.sequence.request


@dataclass(frozen=True)
class Started(_OfSequence):
    """A request was admitted."""

    at: float = field(default_factory=time.perf_counter)


@dataclass(frozen=True)
class Prefilled(_OfSequence):
    """A prompt was read to its end, and the first token chosen."""

    at: float = field(default_factory=time.perf_counter)


@dataclass(frozen=True)
class Advanced(_OfSequence):
    """A round ended."""

    round: Round
    at: float = field(default_factory=time.perf_counter)


@dataclass(frozen=True)
class Finished(_OfSequence):
    """An output ended."""

    at: float = field(default_factory=time.perf_counter)


@dataclass(frozen=True)
class Failed:
    """A request cannot be admitted, or its sequence cannot go on; the others can."""

    request: Request
    error: Exception
    at: float = field(default_factory=time.perf_counter)

    @staticmethod
    def by(request: Request, error: Exception) -> "Failed":
        """A request that an exception ended.

        One that means that memory ran out is replaced: its frames would keep the tensors alive that did not fit.
        """
        if is_out_of_memory(error):
            error = out_of_memory(len(request.prompt_ids), request.max_new_tokens)
        return Failed(request, error)


Event: TypeAlias = Started | Prefilled | Advanced | Finished | Failed
