"""Where the time of a step goes: phases that functions name, and a clock that adds them up where one is running."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import wraps
from typing import Literal, ParamSpec, TypeVar

from selfspec.types import PhaseSeconds

P = ParamSpec("P")
T = TypeVar("T")
Phase = Literal["select", "draft", "verify", "other"]

_running: "ContextVar[PhaseClock | None]" = ContextVar("phase_clock", default=None)


class PhaseClock:
    """Adds up the wall time of the phases of a step. Time inside a nested phase counts for that phase alone."""

    def __init__(self) -> None:
        self._seconds: dict[Phase, float] = dict.fromkeys(("select", "draft", "verify", "other"), 0.0)
        self._phase: Phase = "other"
        self._last = time.perf_counter()

    def switch(self, phase: Phase) -> Phase:
        """Counts the time since the last switch towards the phase so far, and returns that phase."""
        now, before = time.perf_counter(), self._phase
        self._seconds[before] += now - self._last
        self._last, self._phase = now, phase
        return before

    @property
    def seconds(self) -> PhaseSeconds:
        """The time of each phase so far."""
        self.switch(self._phase)
        return PhaseSeconds(**self._seconds)


@contextmanager
def clocked() -> Iterator[PhaseClock]:
    """Measures the phases of what runs inside, on this thread."""
    clock = PhaseClock()
    token = _running.set(clock)
    try:
        yield clock
    finally:
        _running.reset(token)


def phase(name: Phase) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Decorator: the time of a function counts towards a phase while a clock runs."""

    def decorate(function: Callable[P, T]) -> Callable[P, T]:
        """The function, timed."""

        @wraps(function)
        def timed(*args: P.args, **kwargs: P.kwargs) -> T:
            """The function; ``name`` is the phase while it runs."""
            clock = _running.get()
            if clock is None:
                return function(*args, **kwargs)
            before = clock.switch(name)
            try:
                return function(*args, **kwargs)
            finally:
                clock.switch(before)

        return timed

    return decorate
