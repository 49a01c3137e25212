"""Costs as they are now: those that were measured, times what live rounds say."""

import threading

from selfspec.methods.auto.row_costs import RowCosts

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
        self._lock = threading.Lock()
        self._factor = 1.0

    @property
    def now(self) -> RowCosts:
        """The costs."""
        with self._lock:
            return self._measured.scaled(self._factor)

    def note(self, predicted: float, seconds: float) -> None:
        """Counts forwards.

        Args:
            predicted: seconds by ``now``, above 0.
            seconds: what they took.
        """
        ratio = min(_FARTHEST, max(1 / _FARTHEST, seconds / predicted))
        with self._lock:
            self._factor *= 1 + _WEIGHT * (ratio - 1)
