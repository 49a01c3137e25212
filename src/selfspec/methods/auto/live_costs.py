"""Costs as they are now: those that were measured, times what live rounds say."""

import threading

from selfspec.methods.auto.row_costs import CostTable, RowCosts

_WEIGHT = 0.1
_FARTHEST = 1.5


class LiveCosts:
    """Follows the machine: its load, its temperature, and the context, which grows.

    Each round's time ÷ its predicted time moves a factor by a tenth of the way. One round moves it little, whatever
    disturbed it: ratios beyond 1.5 count as 1.5.

    Args:
        measured: of a forward.
    """

    def __init__(self, measured: RowCosts) -> None:
        self._measured = measured
        self._tables: dict[int, CostTable] = {}
        self._lock = threading.Lock()
        self._factor = 1.0

    def now(self, sequences: int = 1) -> CostTable:
        """The costs.

        Args:
            sequences: that share a forward, each with as many rows.
        """
        factor, table = self._factor, self._tables.get(sequences)
        if table is None:
            table = self._tables[sequences] = self._measured.table(sequences)
        return [factor * seconds for seconds in table]

    def note(self, predicted: float, seconds: float) -> None:
        """Counts forwards.

        Args:
            predicted: seconds by ``now``, above 0.
            seconds: what they took.
        """
        ratio = min(_FARTHEST, max(1 / _FARTHEST, seconds / predicted))
        with self._lock:
            self._factor *= 1 + _WEIGHT * (ratio - 1)


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
