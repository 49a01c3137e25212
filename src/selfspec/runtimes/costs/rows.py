"""Seconds of a forward by its number of rows."""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

ROW_COUNTS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)
"""Numbers of rows that are measured by default."""

MOST_ROWS = 36
"""Rows up to which ``RowCosts.table`` goes."""

MOST_PROBES = 3
"""Most probes of a forward in a chain."""

MOST_SIBLINGS = 3
"""Most tokens of a forward in a chain that are known for the place of the first, beside it."""

_DISTURBED = 1.5
"""Times as long as more rows that one row takes where a measurement is taken to have been disturbed."""

_LEAST_ALONE = 0.7
"""Share of a measurement's time in which its thread has a processor, where no other process disturbs it."""

_LEAST_RISE = 0.1
"""Share of a proportional rise by which costs rise at least beyond the last measured rows: no row is free for ever."""

_DIP = 0.02
"""Share by which more rows have to take less time for fewer to be filled up to them: less is noise."""

CostTable = Sequence[float]
"""Seconds of a forward by its number of rows, from 1 to ``MOST_ROWS``; entry 0 is 0."""


@dataclass(frozen=True)
class RowCosts:
    """Seconds of a forward with its LM head, by measured numbers of rows, ascending from 1.

    ``alone`` is the share of the time in which the thread that measured had a processor.
    """

    rows: tuple[int, ...]
    seconds: tuple[float, ...]
    alone: float = field(default=1.0, compare=False)

    def __post_init__(self) -> None:
        """Raises ``ValueError`` for rows that do not ascend from 1, or seconds that do not fit them."""
        ascending = tuple(sorted(set(self.rows)))
        if not self.rows or self.rows != ascending or self.rows[0] != 1 or len(self.rows) != len(self.seconds):
            raise ValueError(f"row costs need ascending rows from 1 on with their seconds, not {self!r}")
        if not all(0 < seconds < float("inf") for seconds in self.seconds):
            raise ValueError(f"seconds of a forward must be above 0, not {self.seconds}")

    def __call__(self, rows: float) -> float:
        """Seconds of a forward: interpolated between measured numbers of rows; beyond the last, rows go on rising."""
        place = bisect_left(self.rows, rows)
        if place == len(self.rows):
            return self.seconds[-1] + self._rise * (rows - self.rows[-1])
        if place == 0:
            return self.seconds[0]
        (low, high), (before, after) = self.rows[place - 1 : place + 1], self.seconds[place - 1 : place + 1]
        return before + (after - before) * (rows - low) / (high - low)

    @cached_property
    def _rise(self) -> float:
        """Seconds of each row beyond the last measured one: as in the last doubling of the rows."""
        last, seconds = self.rows[-1], self.seconds[-1]
        proportional = seconds / last
        if last == 1:
            return proportional
        return max(_LEAST_RISE * proportional, (seconds - self(last / 2)) / (last / 2))

    @property
    def disturbed(self) -> bool:
        """Whether other processes computed: one row took much longer than more rows, or the thread had to wait."""
        return self.alone < _LEAST_ALONE or self.seconds[0] > _DISTURBED * min(self.seconds)

    def table(self, sequences: int = 1) -> tuple[float, ...]:
        """The share of each of several sequences in one forward, by rows per sequence; a ``CostTable``."""
        return (0.0, *(self(rows * sequences) / sequences for rows in range(1, MOST_ROWS + 1)))


def filled_up(costs: CostTable) -> list[int]:
    """By a number of rows how many to run for them: more, where these take less time."""
    fills, fastest = [0] * len(costs), len(costs) - 1
    for rows in range(len(costs) - 1, 0, -1):
        if costs[rows] < costs[fastest]:
            fastest = rows
        fills[rows] = fastest if costs[fastest] < (1 - _DIP) * costs[rows] else rows
    return fills
