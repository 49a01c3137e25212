"""The rows of a forward that several texts share: what they cost, and whose known tokens they verify."""

from collections.abc import Sequence

from selfspec.planning.plans import MOST_DRAFTED
from selfspec.planning.rows import share_rows
from selfspec.runtimes.costs.live import LiveCosts


class SharedStep:
    """What a round of several texts costs.

    Attributes:
        count: of the texts.
        share: a text's seconds of a step of plain decoding.
        token: seconds that a known token saves. Known tokens are of few texts, which end before the others. One that
            ends earlier saves its share of later steps if another takes its place, and one row of them if none does.
            Which of the two is not known, so half of both counts.

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
        row = self._step - costs(count - 1) if count > 1 else self._step
        self.token = (self.share + min(self.share, max(0.0, row))) / 2

    def added(self, rows: int) -> float:
        """Seconds that rows of drafts add to the round."""
        return self._costs(self.count + rows) - self._step + self._of_drafts if rows else 0.0

    def least_acceptance(self) -> float:
        """Acceptance of the first draft token below which no known token can pay."""
        return min(self.added(rows) / rows for rows in range(1, MOST_DRAFTED + 1)) / self.token

    def lengths(self, survivals: Sequence[Sequence[float]], spare: Sequence[float]) -> tuple[list[int], float]:
        """How many known tokens of each text to verify, and the seconds that each token costs its text.

        They are those that are worth most together, as far as no text takes more than it may.

        Args:
            survivals: for each text, by number of its tokens, the probability that all are right; it never rises.
            spare: seconds that each text may take beside its share of the step.
        """
        while True:
            lengths = share_rows(survivals, self.added, self.token)
            total = sum(lengths)
            each = max(0.0, self.added(total) / total) if total else 0.0
            fitting = [
                min(length, max(0, int(most / each))) if each else length
                for length, most in zip(lengths, spare, strict=True)
            ]
            if fitting == lengths:
                return lengths, each
            survivals = [own[:length] for own, length in zip(survivals, fitting, strict=True)]
