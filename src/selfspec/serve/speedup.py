"""What drafts are worth while a server runs: the time that plain decoding would have taken for the same tokens."""

import threading

from selfspec.methods.auto.row_costs import RowCosts, measure_row_costs
from selfspec.runtimes.target import Target
from selfspec.types import Round

_SEQUENCES = (1, 2, 4, 8, 16)
_RATE = 0.02
"""Weight of a round, after the first ones, in the mean of how much longer forwards take than was measured."""


class PlainSteps:
    """What a step of plain decoding takes, by the number of sequences in it.

    Forwards are measured once by their number of rows. How much longer they take while the server runs, since other
    programs use the processors too or contexts are longer, is learned from the verification of every round. Used from
    several threads.

    Args:
        costs: seconds of a forward by its number of rows.
    """

    def __init__(self, costs: RowCosts) -> None:
        self._costs = costs
        self._factor = 1.0
        self._rounds = 0
        self._lock = threading.Lock()

    def share(self, sequences: int) -> float:
        """Seconds of a plain step's forward for each of its sequences.

        Args:
            sequences: how many.
        """
        return self._factor * self._costs(sequences) / sequences

    def learn(self, record: Round, sequences: int) -> None:
        """Takes a round.

        Args:
            record: the round, whose seconds are those of one sequence.
            sequences: how many shared the round; each is taken to have verified as many rows as this one.
        """
        expected = self._costs(sequences * (1 + record.candidates)) / sequences
        with self._lock:
            self._rounds += 1
            rate = max(_RATE, 1 / self._rounds)
            self._factor += rate * (record.seconds.verify / expected - self._factor)


class Savings:
    """What the rounds of a request took, and what plain decoding would have taken.

    Args:
        plain: what a plain step takes; ``None`` if it is not known.

    Attributes:
        plain_seconds: of plain decoding, as estimated.
        round_seconds: of the rounds.
    """

    def __init__(self, plain: PlainSteps | None) -> None:
        self._plain = plain
        self.plain_seconds = 0.0
        self.round_seconds = 0.0

    def note(self, record: Round, sequences: int) -> None:
        """Takes a round.

        Args:
            record: the round, whose seconds are those of one sequence.
            sequences: how many were running.
        """
        if self._plain is None:
            return
        sequences = max(1, sequences)
        self._plain.learn(record, sequences)
        step = self._plain.share(sequences) + record.seconds.other
        self.plain_seconds += len(record.token_ids) * step
        self.round_seconds += record.seconds.total


def measure_forwards(target: Target, most_sequences: int) -> RowCosts:
    """Measures forwards of as many rows as sequences may run together; takes at most a second or so.

    Args:
        target: the model.
        most_sequences: how many may.
    """
    counts = sorted({count for count in _SEQUENCES if count < most_sequences} | {most_sequences})
    return measure_row_costs(target, range(target.sublayer_count), row_counts=counts)
