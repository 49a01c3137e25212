"""What drafts are worth while a server runs: the time that plain decoding would have taken for the same tokens."""

from selfspec.runtimes.costs.live import LiveCosts
from selfspec.runtimes.costs.rows import RowCosts, measure_row_costs
from selfspec.runtimes.target import Target
from selfspec.types import Round

_SEQUENCES = (1, 2, 4, 8, 16)


class Savings:
    """What the rounds of a request took, and what plain decoding would have taken.

    Args:
        costs: of the target's forward, which follow the verification of every round; ``None`` if they are not known.

    Attributes:
        plain_seconds: of plain decoding, as estimated.
        round_seconds: of the rounds.
    """

    def __init__(self, costs: LiveCosts | None) -> None:
        self._costs = costs
        self.plain_seconds = 0.0
        self.round_seconds = 0.0

    def note(self, record: Round, sequences: int) -> None:
        """Counts a round, whose seconds are one sequence's share, and how many sequences were running.

        Each sequence is taken to have verified as many rows as this one.
        """
        if self._costs is None:
            return
        sequences = max(1, sequences)
        self._costs.note(self._costs(sequences * (1 + record.candidates)) / sequences, record.seconds.verify)
        step = self._costs(sequences) / sequences + record.seconds.other
        self.plain_seconds += len(record.token_ids) * step
        self.round_seconds += record.seconds.total


def measure_forwards(target: Target, most_sequences: int) -> RowCosts:
    """Measures forwards of as many rows as sequences may run together; takes at most a second or so."""
    counts = sorted({count for count in _SEQUENCES if count < most_sequences} | {most_sequences})
    return measure_row_costs(target, range(target.sublayer_count), row_counts=counts)
