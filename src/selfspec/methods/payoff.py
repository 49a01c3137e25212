"""Whether a selection pays for itself: what it is expected to save against what it costs, both measured.

The papers select by a fixed schedule, made for models whose selections take a small part of the time. With
``schedule=ours`` a method asks a ``Payoff`` first, which it shares between its requests. A selection is made

- if it is expected to save more time than it takes: the tokens that the request may still write, times the seconds that
  a token takes now, times the share of them that a new choice is expected to save; or
- if the method's selections, this one included, take no more than an allowance, 3 % of the time. So choices whose
  worth is unknown are tried, and a stream of requests can follow another kind of text.

A choice is judged by its ``Record``: its speedup over plain decoding, in steps, while it was in use. A new choice is
expected to reach what choices so far have reached when they were new.
"""

import statistics
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from selfspec.model.kept import KeptSet
from selfspec.runtimes.precision import FULL_BITS, Precision

ALLOWANCE = 0.03
"""Share of the time that selections may take whose saving is unknown."""

NEW, JUDGED = 24, 64
"""Draft tokens after which a choice counts as tried, and after which it may be declined."""

_LAST_COSTS = 8
_MEMORY = 256.0
"""Tokens, about, over which the seconds of a token are averaged, and draft tokens over which speedups are."""


class Payoff:
    """What selections have cost and rounds have taken, over all requests of a method; safe from several threads."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self.clock = clock
        self._lock = threading.Lock()
        self._costs: deque[float] = deque(maxlen=_LAST_COSTS)
        self._selecting = self._decoding = 0.0
        self._recent_seconds = self._recent_tokens = 0.0
        self._reached: deque[float] = deque(maxlen=_LAST_COSTS)

    @contextmanager
    def selection(self) -> Iterator[None]:
        """Times a selection, which runs inside."""
        started = self.clock()
        yield
        seconds = self.clock() - started
        with self._lock:
            self._costs.append(seconds)
            self._selecting += seconds

    def note_round(self, seconds: float, tokens: int) -> None:
        """Counts a round: its seconds without selections (in a batch those of all requests), and its tokens."""
        with self._lock:
            fade = max(0.0, 1 - tokens / _MEMORY)
            self._decoding += seconds
            self._recent_seconds = fade * self._recent_seconds + seconds
            self._recent_tokens = fade * self._recent_tokens + tokens

    def note_new(self, speedup: float) -> None:
        """Counts what a choice has reached while it was new; 1 is plain decoding."""
        with self._lock:
            self._reached.append(speedup)

    @property
    def cost(self) -> float | None:
        """Seconds of a selection, the median of the last ones; ``None`` before the first."""
        with self._lock:
            return statistics.median(self._costs) if self._costs else None

    @property
    def reached(self) -> float | None:
        """Speedup that new choices reach, the mean of the last ones, at least 1; ``None`` before the first."""
        with self._lock:
            return max(1.0, statistics.fmean(self._reached)) if self._reached else None

    def pays(self, remaining_tokens: int, gain: float | None) -> bool:
        """Whether to select now, for a request that may still generate ``remaining_tokens``.

        ``gain`` is the share of their time that the selection is expected to save; ``None`` if unknown.
        """
        cost = self.cost
        with self._lock:
            if cost is None:  # the first one shows what it costs
                return True
            seconds = remaining_tokens * self._recent_seconds / max(1.0, self._recent_tokens)
            if cost >= seconds:  # it could not even pay if it saved all the time that is left
                return False
            affordable = self._selecting + cost <= ALLOWANCE * (self._selecting + self._decoding)
            return affordable or cost < (gain or 0.0) * seconds


class Record:
    """What came of a choice: the tokens of its rounds against their steps, the last ones counting most.

    ``cost`` is the time of a draft step ÷ that of a target step; ``None`` for plain decoding.
    """

    def __init__(self, payoff: Payoff, cost: float | None = None) -> None:
        self._payoff = payoff
        self._cost = cost
        self.drafted = 0
        self._tokens = self._steps = 0.0

    def note_round(self, drafted: int, accepted: int) -> None:
        """Counts a round that it drafted."""
        if self._cost is None or not drafted:
            return
        was_new = self.drafted < NEW
        fade = max(0.0, 1 - drafted / _MEMORY)
        self.drafted += drafted
        self._tokens = fade * self._tokens + accepted + 1
        self._steps = fade * self._steps + drafted * self._cost + 1
        if was_new and self.drafted >= NEW:
            self._payoff.note_new(self.speedup)

    @property
    def speedup(self) -> float:
        """Committed tokens ÷ (draft steps · ``cost`` + rounds); 1 while nothing was drafted."""
        return self._tokens / self._steps if self._steps else 1.0

    @property
    def declined(self) -> bool:
        """Whether it promises less than plain decoding."""
        return self.drafted >= JUDGED and self.speedup < 1.0

    @property
    def gain(self) -> float | None:
        """Share of the time that a new choice is expected to save; ``None`` if nothing is known of it."""
        reached = self._payoff.reached
        if reached is None or (self._cost is not None and self.drafted < NEW):
            return None
        return max(0.0, 1 - max(1.0, self.speedup) / reached)


def draft_cost(kept: KeptSet, precision: Precision | None, dtype: torch.dtype) -> float:
    """``c``, time of a draft step ÷ time of a target step, by the bits of the sublayers' weights that are read.

    As in the papers' objectives the LM head is not counted. ``dtype`` is that of the target's weights.
    """
    if precision is None:
        return len(kept.sublayers) / kept.total
    full = 8 * dtype.itemsize
    read = sum(full if bits == FULL_BITS else bits for bits in map(precision.bits_of, kept.sublayers))
    return read / (full * kept.total)


def expected_speedup(acceptance: float, cost: float, longest: int) -> float:
    """Highest expected speedup over plain decoding, over draft lengths.

    The same as ``tokens_per_time`` (KnapSpec, equation 4) with a target step as the unit of time, in plain numbers: it
    is called in every round. ``cost`` is the time of a draft step, lengths are 1 to ``longest``.
    """
    best, tokens, power = 0.0, 1.0, 1.0
    for length in range(1, longest + 1):
        power *= acceptance
        tokens += power
        best = max(best, tokens / (length * cost + 1))
    return best
