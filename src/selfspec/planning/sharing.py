"""The rows of a forward that several texts share: what they cost, and whose known tokens they verify."""

import math
from collections.abc import Sequence
from functools import cached_property

from selfspec.planning.plans import MOST_DRAFTED, share_rows
from selfspec.runtimes.costs.live import LiveCosts

_SPREAD = 0.1
"""Share of the rounds that are left for which it is not known which text ends last."""


class SharedStep:
    """What a round of several texts costs.

    Attributes:
        count: of the texts.
        share: a text's seconds of a step of plain decoding.

    Args:
        count: of the texts, 1 or more.
        costs: of the target's forward by its rows.
        of_drafts: seconds that a round with drafts takes more, beside its rows.
    """

    def __init__(self, count: int, costs: LiveCosts, of_drafts: float = 0.0) -> None:
        self.count = count
        self._costs, self._of_drafts = costs, of_drafts
        self._step = costs(count)
        self.share = self._step / count
        row = (self._step - costs(1)) / (count - 1) if count > 1 else self._step  # as texts end, fewer are left
        self._row = min(self.share, max(0.0, row))
        self._rest = self._step - count * self._row
        self._added = {0: 0.0}

    def added(self, rows: int) -> float:
        """Seconds that rows of drafts add to the round."""
        seconds = self._added.get(rows)
        if seconds is None:
            seconds = self._added[rows] = self._costs(self.count + rows) - self._step + self._of_drafts
        return seconds

    @cached_property
    def least_row(self) -> float:
        """Least seconds of a row of drafts; tokens that save less cannot pay."""
        return min(self.added(rows) / rows for rows in range(1, MOST_DRAFTED + 1))

    def values_unknown(self) -> list[float]:
        """Seconds that a known token of each text saves, where it is not known how much each has left.

        A token saves its share of later steps if another text takes the place of its own, and one row of them if none
        does: half of both counts.
        """
        return [(self.share + self._row) / 2] * self.count

    def values(self, left: Sequence[float]) -> list[float]:
        """Seconds that a known token of each text saves, by the rounds that each is expected to have left.

        Each saves its row of a later step. All the rest of a step is saved by a token of the text that ends last, and
        only by that. Which has most rounds left is likeliest to be it; where all have as many, each token saves its
        share of a step.
        """
        most = max(left)
        chances = [math.exp((own - most) / (_SPREAD * most)) for own in left]
        rest = self._rest / sum(chances)
        return [self._row + rest * chance for chance in chances]

    def saved(self, written: int, ahead: int) -> float:
        """Seconds that tokens beyond the first of each round have saved for certain.

        Args:
            written: by all texts together; each saves its row of a later step.
            ahead: by the text that has most left to write; each saves the rest of a step.
        """
        return self._row * written + self._rest * ahead

    def lengths(
        self, survivals: Sequence[Sequence[float]], spare: Sequence[float], values: Sequence[float]
    ) -> tuple[list[int], float]:
        """How many known tokens of each text to verify, and the seconds that each token costs its text.

        They are those that are worth most together, as far as no text takes more than it may.

        Args:
            survivals: for each text, by number of its tokens, the probability that all are right; it never rises.
            spare: seconds that each text may take beside its share of the step.
            values: seconds that a token of each text saves.
        """
        while True:
            lengths = share_rows(survivals, self.added, values)
            total = sum(lengths)
            each = max(0.0, self.added(total) / total) if total else 0.0
            fitting = [
                min(length, max(0, int(most / each))) if each else length
                for length, most in zip(lengths, spare, strict=True)
            ]
            if fitting == lengths:
                return lengths, each
            survivals = [own[:length] for own, length in zip(survivals, fitting, strict=True)]
