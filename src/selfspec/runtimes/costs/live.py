"""What forwards cost now: what was measured or estimated, corrected by what live rounds take."""

import math
import threading
from bisect import bisect_left
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from selfspec.runtimes.costs.rows import CostTable, RowCosts, filled_up

# Standard deviations of natural logarithms, of one round where nothing else is said.
_NOISE, _LEAST_NOISE = 0.08, 0.04
"""Of one forward, and least of many that were timed together: what disturbs forwards lasts for several."""

_LOAD_DRIFT = 0.012
_SHAPE_DRIFT = 0.002
_MOST_DRIFT = 16
"""Rounds of a run by which its costs drift at most."""

_LOAD_DOUBT = 0.3
_SHAPE_DOUBT = 0.08
_OUTLIER = math.log(1.5)
"""A round that is farther off counts as this far off, or as three standard deviations of what is expected."""

_SLOW = math.log(1.25)
"""A forward that took more than this beyond what was expected is believed when the next one does, too.

What else happens on a machine makes a forward slower, never faster. One such round would make its rows seem dear, and
then they would not be tried again. The next one is that of as many rows, or of several where it has several.
"""

_MOST_SHARED = 256
"""Rows up to which what forwards take is learned apart from what those of fewer rows take: batches have as many."""

_SHOWN = 0.01
_COLD = 0.5
"""Doubt in the load from which on costs count as not measured."""


class LiveCosts:
    """Row costs, corrected by a Kalman filter over the logarithms of what rounds take.

    Its state is one load, which multiplies all costs and drifts, and for each known number of rows beyond the first a
    correction of the shape of the costs. Corrections are a Brownian motion over the logarithm of the rows, so that
    rounds of 4 rows say something of 3 and of 6. A round moves what was most in doubt: where rounds of the same rows
    become slower, the machine is taken to be busy; where rounds of other rows disagree with that, the shape was wrong.
    So what rounds of one kind cost does not drift into what others are taken to cost. May be used by several threads.

    Args:
        measured: costs to start from.
        like: costs whose load multiplies these too.
        recorded: counts what was recorded so far (``Target.recorded``); while it grows, rounds say nothing of costs.
        load_doubt: standard deviation of the logarithm of the load at the start.
        shape_doubt: that of the cost of twice the rows against one row.
    """

    def __init__(
        self,
        measured: RowCosts,
        like: "LiveCosts | None" = None,
        *,
        load_doubt: float = _LOAD_DOUBT,
        shape_doubt: float = _SHAPE_DOUBT,
        recorded: Callable[[], int] = lambda: 0,
    ) -> None:
        self._like = like
        self._count_recorded: Callable[[], int] = recorded if like is None else like._count_recorded
        self._recorded = self._count_recorded()
        self._rows = _with_more(measured.rows)
        self._measured = np.array([measured(rows) for rows in self._rows])
        self._state = np.zeros(len(self._rows))  # entry 0 is the load, the others corrections of the shape
        octaves = np.log2(self._rows)
        self._covariance = shape_doubt**2 * np.minimum.outer(octaves, octaves)
        self._covariance[0, 0] = load_doubt**2
        drift = np.full(len(self._rows), _SHAPE_DRIFT**2)
        drift[0] = _LOAD_DRIFT**2
        self._drift = np.diag(drift)
        self._shown, self._shown_state = measured, self._state.copy()
        self._tables: dict[int, CostTable] = {}
        self._filled: tuple[RowCosts, CostTable, Sequence[int]] | None = None  # of the shape that is shown
        self._cold = load_doubt > _COLD
        self.without_step = 0
        """Forwards of more rows that were counted since the last of one row, beside which their costs show."""
        self._slow: set[int] = set()  # rows whose last forward was slow; 2 if the last one of several was
        self._lock = threading.Lock()

    def recorded(self) -> int:
        """What was recorded so far (``Target.recorded``)."""
        return self._count_recorded()

    @property
    def factor(self) -> float:
        """Live seconds of one row ÷ those that the costs started from."""
        own = math.exp(self._state[0])
        return own if self._like is None else own * self._like.factor

    @property
    def doubt(self) -> float:
        """Standard deviation of the logarithm of what one row takes."""
        return math.sqrt(self._covariance[0, 0])

    def doubt_of(self, rows: int) -> float:
        """Standard deviation of the logarithm of what a forward takes."""
        design = self._design([rows])
        return math.sqrt(design @ self._covariance @ design)

    def __call__(self, rows: int) -> float:
        """Seconds of a forward."""
        return self.factor * self._shown(rows)

    def now(self, sequences: int = 1) -> list[float]:
        """The costs as a ``CostTable``: the share of each of several sequences, by rows per sequence."""
        factor, tables = self.factor, self._tables
        table = tables.get(sequences)
        if table is None:
            table = tables[sequences] = self._shown.table(sequences)
        return [factor * seconds for seconds in table]

    def filled_up(self) -> tuple[list[float], Sequence[int]]:
        """The costs of one sequence where rows are filled up to more that cost less, and the rows that it has then.

        They cost less beyond doubt: where they do not, filled rounds would never say so.
        """
        factor, shown, filled = self.factor, self._shown, self._filled
        if filled is None or filled[0] is not shown:
            table = shown.table()
            fills = [
                more if table[rows] > table[more] * math.exp(self._doubt_between(rows, more)) else rows
                for rows, more in enumerate(filled_up(table))
            ]
            filled = self._filled = shown, [table[rows] for rows in fills], fills
        return [factor * seconds for seconds in filled[1]], filled[2]

    def _doubt_between(self, rows: int, more: int) -> float:
        """Standard deviation of the logarithm of what forwards take ÷ that of others; 0 for the same rows."""
        if rows == more:
            return 0.0
        design = self._design([rows]) - self._design([more])
        return math.sqrt(max(0.0, design @ self._covariance @ design))

    def count(self, rows: int) -> None:
        """Counts a forward."""
        self.without_step = 0 if rows == 1 else self.without_step + 1

    def note(self, forwards: Sequence[int], seconds: float) -> None:
        """Counts forwards by the number of rows of each, and the seconds above 0 that they took together."""
        self.note_kinds([(forwards, seconds)])

    def note_kinds(self, timed: Sequence[tuple[Sequence[int], float]]) -> None:
        """The same for several kinds of forwards that ran in turns: what slowed the machine down slowed all of them.

        Where nothing was measured, the first do not count: they touch memory for the first time. Nor do those among
        which a replay was recorded, and one forward alone that was slow (``_SLOW``).
        """
        with self._lock:
            before, self._recorded = self._recorded, self._count_recorded()
            if self._cold or self._recorded != before:
                self._cold = False
                return
            rounds = min(_MOST_DRIFT, sum(len(forwards) for forwards, _ in timed))
            self._covariance = self._covariance + rounds * self._drift
            for forwards, seconds in timed:
                predicted = self.factor * sum(map(self._shown, forwards))
                if (believed := self._believed(forwards, math.log(seconds / predicted))) is not None:
                    self._learn(forwards, believed)

    def _learn(self, forwards: Sequence[int], surprise: float) -> None:
        """Corrects the state by the logarithm of what forwards took ÷ what was expected."""
        design = self._design(forwards)
        spread = self._covariance @ design
        noise = max(_LEAST_NOISE**2, _NOISE**2 / len(forwards))
        variance = float(design @ spread) + noise
        most = max(_OUTLIER, 3 * math.sqrt(variance))
        self._state = self._state + spread * (min(most, max(-most, surprise)) / variance)
        self._covariance = self._covariance - np.outer(spread, spread) / variance
        if np.abs(self._state - self._shown_state)[1:].max(initial=0.0) > _SHOWN:
            shape = np.exp(np.concatenate([[0.0], self._state[1:]]))
            self._shown = RowCosts(self._rows, tuple((self._measured * shape).tolist()))
            self._shown_state, self._tables = self._state.copy(), {}

    def _believed(self, forwards: Sequence[int], surprise: float) -> float | None:
        """How far off forwards are taken to be; ``None`` where that has to be confirmed (``_SLOW``)."""
        if len(forwards) > 1 or self.doubt > _COLD:
            return surprise
        kinds = {forwards[0], min(forwards[0], 2)}
        if surprise <= _SLOW:
            self._slow -= kinds
            return surprise
        is_confirmed = not kinds.isdisjoint(self._slow)
        self._slow |= kinds
        return surprise if is_confirmed else None

    def _design(self, forwards: Sequence[int]) -> Any:
        """The derivative of the logarithm of the seconds by the state."""
        design, total = np.zeros(len(self._rows)), 0.0
        for rows in forwards:
            seconds = self._shown(rows)
            place = bisect_left(self._rows, rows)
            low, high = max(0, place - 1), min(place, len(self._rows) - 1)
            width = self._rows[high] - self._rows[low]
            share = (min(rows, self._rows[high]) - self._rows[low]) / width if width else 1.0
            design[low] += (1 - share) * seconds
            design[high] += share * seconds
            total += seconds
        design /= total
        design[0] = 1.0
        return design


def _with_more(rows: tuple[int, ...]) -> tuple[int, ...]:
    """Numbers of rows with two more in each doubling beyond the last."""
    more = list(rows)
    while more[-1] < _MOST_SHARED:
        last = more[-1]
        more += [last * 3 // 2, 2 * last] if last > 1 else [2]
    return tuple(more)
