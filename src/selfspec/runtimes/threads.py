"""The threads of native calls: how many a call takes, and what another thread does meanwhile.

A call takes as many as torch has, or fewer while other processes use the processor. Threads of a call wait for each
other many times, so a single one that shares its core with another process delays all of them. Whether fewer are faster
is tried out: a few calls take the next number, and are compared with what calls of their kind take usually. It is tried
at once where calls take clearly longer than usual, and now and then else, in both directions. Results do not depend on
the number of threads, bit for bit.
"""

import ctypes
import math
import os
import sys
import time
from collections import deque
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import cache
from statistics import median
from threading import Lock

import torch

from selfspec.control_group import processor_limit
from selfspec.runtimes.kernels import find

_FIRST, _SHORTEST, _LONGEST = 1.0, 0.25, 8.0
"""Seconds before the first try and between two; each try that did not help doubles them."""

_SHARE = 0.04
"""Share of the time that tries may lose, up to the longest time between two."""

_SLOWER = 1.4
"""Times as long as usual that recent calls take when fewer threads are tried at once."""

_RECENT = 3
"""Recent calls; what a try is compared with is how long they took, at the median: two of them have to be slow. One is
enough if it had several forwards and took ``_SECONDS``.
"""

_FASTER = 0.93
"""Times as long as recent calls that those of a try may take for its number to be kept."""

_FORWARDS, _SECONDS = 4, 0.05
"""Of a try: forwards of calls with a kind that is known, or their time, whichever is reached first."""

_HOPELESS = 1.3
"""Times as long as recent calls at which a try ends early, after ``_LEAST`` seconds."""

_LEAST = 0.012
_STRANGE = 16
"""Calls of a try with kinds that are not known, after which it ends."""

_KINDS = 512
"""Most kinds that are remembered."""

_RISE, _FALL = 0.02, 0.2
"""Share of a call's time in what is usual, where it took longer and where less: first calls of a kind take long."""

_MOST_RATIO = 4.0
"""Times as long as usual that a single call counts at most."""

_SOFT = 1
"""``omp_pause_soft`` of OpenMP 5: settings stay."""

_waiting: ContextVar[Callable[[], None] | None] = ContextVar("overlapped", default=None)


@dataclass
class _Try:
    """A number of threads that some calls take, and how long these take beside what is usual."""

    level: int
    now: float
    """Times as long as usual that calls took right before."""

    forwards: int = 0
    strange: int = 0
    seconds: float = 0.0
    usual: float = 0.0
    found: dict[Hashable, float] = field(default_factory=dict)


class ThreadCount:
    """The number of threads of native calls, by how long calls have taken.

    Args:
        most: gives the most threads; asked before each call, so that ``torch.set_num_threads`` counts at once.
        clock: seconds, for the time between tries.

    Attributes:
        limit: fewer threads than the most, where some cores are left out (``cores.choose_cores``).
    """

    def __init__(
        self, most: Callable[[], int] = torch.get_num_threads, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self.limit: int | None = None
        self._most, self._clock, self._lock = most, clock, Lock()
        self._start(1)

    def _start(self, most: int) -> None:
        self._highest = most
        self._counts = sorted({most} | {max(1, each) for each in (most - 1, most // 2, most // 4)}, reverse=True)
        self._level, self._turn = 0, 0
        self._usual: dict[Hashable, float] = {}
        self._current = most
        self._recent: deque[float] = deque(maxlen=_RECENT)
        self._try: _Try | None = None
        self._patience = _FIRST
        self._next_try = self._clock() + self._patience

    @property
    def settled(self) -> int:
        """The number that calls take now, tries aside."""
        return self._counts[self._level]

    @property
    def most(self) -> int:
        """The most that calls may take now."""
        return min(self._most(), self.limit or sys.maxsize)

    def take(self) -> int:
        """The threads of the next call, whose time ``measured`` is then told."""
        most = self.most
        if most != self._highest:
            with self._lock:
                self._start(most)
        return self._current

    def measured(self, kind: Hashable, count: int, seconds: float, forwards: int = 1) -> None:
        """Takes note of a call's time.

        Args:
            kind: forwards of one kind take about the same time, such as those with the same sublayers and rows.
            count: threads that it took.
            seconds: that it took.
            forwards: one after the other in the call.
        """
        if self._highest == 1:
            return
        with self._lock:
            if self._try is not None and count == self._counts[self._try.level]:
                self._follow(self._try, kind, seconds, forwards)
            elif count == self._counts[self._level]:
                self._learn(kind, seconds, forwards)

    def _learn(self, kind: Hashable, seconds: float, forwards: int) -> None:
        """A call with the settled number."""
        usual = self._usual.get(kind)
        if usual is None:
            if len(self._usual) >= _KINDS:
                self._usual.clear()
            self._usual[kind] = seconds / forwards
            return
        ratio = min(seconds / forwards / usual, _MOST_RATIO)
        self._recent.append(ratio)
        self._usual[kind] = usual * (1 + (_RISE if ratio > 1 else _FALL) * (ratio - 1))
        long = forwards > 1 and seconds >= _SECONDS and ratio > _SLOWER
        if len(self._recent) < _RECENT and not long:
            return
        now = ratio if long else median(self._recent)
        slower = now > _SLOWER and self._level + 1 < len(self._counts)
        early = self._patience - max(_SHORTEST, self._patience / 8) if slower else 0.0
        if self._clock() >= self._next_try - early:
            self._try = _Try(self._other(slower), now)
            self._current = self._counts[self._try.level]

    def _other(self, slower: bool) -> int:
        """The number to try: each of the others in turn, or each of the lower ones."""
        first = self._level + 1 if slower else 0
        others = [level for level in range(first, len(self._counts)) if level != self._level]
        self._turn += 1
        return others[self._turn % len(others)]

    def _follow(self, current: _Try, kind: Hashable, seconds: float, forwards: int) -> None:
        """A call of a try."""
        each = seconds / forwards
        current.found[kind] = min(each, current.found.get(kind, each))
        usual = self._usual.get(kind)
        if usual is None:
            current.strange += 1
            if current.strange < _STRANGE:
                return
        else:
            current.forwards += forwards
            current.seconds += seconds
            current.usual += usual * forwards
        ratio = current.seconds / (current.usual * current.now) if current.forwards else 1.0
        enough = (
            current.forwards >= _FORWARDS
            or current.strange >= _STRANGE
            or (current.forwards > 1 and current.seconds >= _SECONDS)
        )
        if not enough and not (ratio > _HOPELESS and current.seconds >= _LEAST):
            return
        if ratio < _FASTER:
            self._level, self._usual, self._patience = current.level, current.found, _SHORTEST
        else:
            lost = current.seconds - current.usual * current.now
            self._patience = min(max(2 * self._patience, lost / _SHARE), _LONGEST)
        self._try, self._current = None, self._counts[self._level]
        self._recent.clear()
        self._next_try = self._clock() + self._patience


THREADS = ThreadCount()
"""That of this process."""


@cache
def keep_to_limit() -> int | None:
    """Gives torch at most as many threads as a control group gives this process processors, once a process.

    A group that has used up its time stops until the next period: with threads for all processors of the machine, which
    wait busily for each other, it has done so after few products. Nothing changes where the user sets a number.

    Returns:
        The number that was set, if one was.
    """
    limit = processor_limit()
    if limit is None or math.ceil(limit) >= torch.get_num_threads() or os.environ.get("OMP_NUM_THREADS"):
        return None
    torch.set_num_threads(math.ceil(limit))
    return math.ceil(limit)


@contextmanager
def overlapped(task: Callable[[], None]) -> Iterator[None]:
    """Runs a task once, on this thread: before the first native forward inside, or at the end without one.

    Kernels release the GIL: wake other threads, such as an event loop, right before a kernel starts, not earlier. Else
    both threads would compete for it while the processors are idle. The task takes microseconds, and raises nothing.
    """
    token = _waiting.set(task)
    try:
        yield
    finally:
        start_overlapped()
        _waiting.reset(token)


def start_overlapped() -> None:
    """Runs the task that waits on this thread, if there is one; called before a native forward."""
    task = _waiting.get()
    if task is not None:
        _waiting.set(None)
        task()


def release_threads() -> None:
    """Ends the threads that GCC's OpenMP keeps for the calling one, whose next parallel work starts them again.

    It keeps some for every thread that has computed. Where they are more than the processors, all of them sleep instead
    of waiting for each other, which they do many times in a forward: a tenth of the speed of decoding is lost.
    """
    if sys.platform == "linux" and find.cache_info().currsize:
        with suppress(AttributeError):  # of an older OpenMP
            ctypes.CDLL(None).omp_pause_resource_all(_SOFT)
