"""Whether live rounds disagree with a latency profile so clearly that it is to be measured again."""

import statistics
import threading
from collections import deque

ROUNDS = 16
"""Rounds that one verdict rests on."""
CLEARLY_FASTER = 1.5
"""A profile is wrong if rounds take less than their predicted time divided by this."""


class LatencyCheck:
    """Compares live rounds with what a latency profile predicts for them.

    A profile holds minima, so no round should be faster than it predicts: a round has more rows, and its time includes
    the host's work. Slower rounds say nothing, because other load on the machine makes every round slower without
    changing which sublayers are cheap. So the profile counts as wrong only if the median of the last ``ROUNDS`` rounds
    is faster than predicted by more than ``CLEARLY_FASTER``: then it was measured while the machine was busy, or
    throttled, which also distorts the ratio of attention and MLP.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._ratios: deque[float] = deque(maxlen=ROUNDS)

    def note(self, predicted: float, measured: float) -> None:
        """Counts a round.

        Args:
            predicted: seconds by the profile, above 0.
            measured: seconds that it took.
        """
        with self._lock:
            self._ratios.append(measured / predicted)

    @property
    def fails(self) -> bool:
        """Whether the profile is clearly too slow."""
        with self._lock:
            full = len(self._ratios) == ROUNDS
            return full and statistics.median(self._ratios) < 1 / CLEARLY_FASTER

    def reset(self) -> None:
        """Forgets all rounds; to be called with a new profile."""
        with self._lock:
            self._ratios.clear()
