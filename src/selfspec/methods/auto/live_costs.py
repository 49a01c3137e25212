"""Costs as they are now: those that were measured, times what live rounds say."""

import threading
from bisect import bisect_left
from collections.abc import Sequence

from selfspec.methods.auto.row_costs import CostTable, RowCosts, monotone

_WEIGHT = 0.1
_FARTHEST = 1.5
_OWN_WEIGHT = 0.05
_FARTHEST_OWN = 4.0
_SHOWN = 0.01
_FADING = 0.95
_LEAST_SPREAD = 1e-6


class LiveCosts:
    """Follows the machine: its load, its temperature, and the context, which grows.

    Each round's time ÷ its predicted time moves a factor by a tenth of the way. One round moves it little, whatever
    disturbed it: ratios beyond 1.5 count as 1.5. Rounds of several requests also move the cost of their own numbers of
    rows, which may have been measured while the machine did something else.

    Args:
        measured: of a forward.
        like: costs whose factor these have too, beside their own; ``None`` for none.
    """

    def __init__(self, measured: RowCosts, like: "LiveCosts | None" = None) -> None:
        self._like = like
        self._measured = self._shown = measured
        self._own = [1.0] * len(measured.rows)
        self._shown_own = [*self._own]
        self._tables: dict[int, CostTable] = {}
        self._lock = threading.Lock()
        self._factor = 1.0

    @property
    def factor(self) -> float:
        """What live rounds have taken ÷ what was measured."""
        return self._factor if self._like is None else self._factor * self._like.factor

    def now(self, sequences: int = 1) -> list[float]:
        """The costs, a ``CostTable``.

        Args:
            sequences: that share a forward, each with as many rows.
        """
        factor, tables = self.factor, self._tables
        table = tables.get(sequences)
        if table is None:
            table = tables[sequences] = self._shown.table(sequences)
        return [factor * seconds for seconds in table]

    def note(self, predicted: float, seconds: float) -> None:
        """Counts forwards.

        Args:
            predicted: seconds by ``now``, above 0.
            seconds: what they took.
        """
        with self._lock:
            self._move(predicted, seconds)

    def note_rows(self, forwards: Sequence[int], seconds: float) -> None:
        """Counts forwards whose numbers of rows are known.

        Args:
            forwards: the rows of each, at least one.
            seconds: what they took together.
        """
        with self._lock:
            ratio = self._move(self.factor * sum(map(self._shown, forwards)), seconds)
            moved = [self._move_own(rows, ratio) for rows in set(forwards)]
            if any(moved):
                each = zip(self._measured.rows, self._measured.seconds, self._own, strict=True)
                self._shown, self._shown_own = (
                    monotone({rows: seconds * own for rows, seconds, own in each}),
                    [*self._own],
                )
                self._tables = {}

    def _move_own(self, rows: int, ratio: float) -> bool:
        """Moves the cost of a number of rows; whether it is by now another one than the tables have."""
        place = min(bisect_left(self._measured.rows, rows), len(self._own) - 1)
        own = self._own[place] * (1 + _OWN_WEIGHT * (ratio - 1))
        self._own[place] = own = min(_FARTHEST_OWN, max(1 / _FARTHEST_OWN, own))
        return abs(own - self._shown_own[place]) > _SHOWN * own

    def _move(self, predicted: float, seconds: float) -> float:
        ratio = min(_FARTHEST, max(1 / _FARTHEST, seconds / predicted))
        self._factor *= 1 + _WEIGHT * (ratio - 1)
        return ratio


class Judging:
    """Seconds that a round of a request takes beside forwards, by its rows: processed scores, noise, acceptance.

    A line through the rounds so far, of which the latest count most. Rows beyond the first cost nothing until there
    was a round with more. What exceeds twice the expected seconds counts as that.
    """

    def __init__(self) -> None:
        self.first = 0.0
        self.each = 0.0
        self._count = self._rows = self._seconds = 0.0
        self._squares = self._products = 0.0

    def note(self, rows: int, seconds: float) -> None:
        """Counts a round.

        Args:
            rows: of its verification, 1 or more.
            seconds: what it took beside forwards.
        """
        more = rows - 1
        if self._count:
            seconds = min(seconds, 2 * (self.first + more * self.each) + more * self.first)
        self._count = _FADING * self._count + 1
        self._rows = _FADING * self._rows + more
        self._seconds = _FADING * self._seconds + seconds
        self._squares = _FADING * self._squares + more * more
        self._products = _FADING * self._products + more * seconds
        spread = self._squares * self._count - self._rows**2
        slope = (self._products * self._count - self._rows * self._seconds) / spread if spread > _LEAST_SPREAD else 0.0
        self.each = max(0.0, slope)
        self.first = max(0.0, (self._seconds - self.each * self._rows) / self._count)

    def added_to(self, forwards: Sequence[float]) -> CostTable:
        """Seconds of rounds by their rows.

        Args:
            forwards: seconds of their verifications.
        """
        each, start = self.each, self.first - self.each
        return [seconds + start + each * rows for rows, seconds in enumerate(forwards)]


class Overhead:
    """Seconds that planning and learning take in a round of a request, as a running mean.

    One round moves it little, whatever disturbed it: what exceeds twice the mean counts as that.
    """

    def __init__(self) -> None:
        self.mean: float | None = None

    def note(self, seconds: float) -> float:
        """Counts a round.

        Args:
            seconds: what planning it and learning from it took.

        Returns:
            The mean with it.
        """
        mean = seconds if self.mean is None else self.mean
        self.mean = mean + _WEIGHT * (min(seconds, 2 * mean) - mean)
        return self.mean
