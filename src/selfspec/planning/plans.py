"""What to draft next: the round that is worth most, among those that may be played."""

from collections.abc import Sequence
from typing import NamedTuple

from selfspec.runtimes.costs.rows import CostTable

MOST_DRAFTED = 32
"""Most draft tokens of a round."""

MOST_GUESSES = 7
"""Most guesses in a forward of a layer draft: with the pending token the 8 rows up to which its cost is measured."""

PADDING = 0
"""The draft token of rows that only fill a forward up, where more rows take less time. It is verified as any other."""

_EPSILON = 1e-9

_MORE_A_REQUEST = 0.015
"""Share by which a round with drafts is taken to cost more, for each other request that waits for it.

They wait for the host's work on a draft, a tenth of a millisecond or two; and drafts that were chosen as the likeliest
are accepted less often than estimated.
"""


LEAST_GAIN_TOGETHER = 1.1
"""Times plain decoding that a layer draft in a batch has to promise: all requests wait for its forwards."""


class Plan(NamedTuple):
    """A round: plain, of copied tokens, or of a layer draft, and what it is expected to bring."""

    length: int  # draft tokens; of a layer draft at most
    tokens: float
    seconds: float

    @property
    def tokens_per_second(self) -> float:
        """Of this round."""
        return self.tokens / self.seconds

    def worth(self, rate: float, trust: float = 1.0) -> float:
        """Tokens, minus those that its seconds are worth where decoding gives ``rate`` tokens a second.

        So a round is judged by what it does to all of the decoding, not by its own tokens a second: a chance that is
        better than most is taken for longer. Of the tokens beyond the first a share ``trust`` is believed.
        """
        return 1 + trust * (self.tokens - 1) - rate * self.seconds


def plain(verify: CostTable) -> Plan:
    """A step of plain decoding."""
    return Plan(0, 1.0, verify[1])


def most_that_fits(forward: float, verify: CostTable, longest: float) -> int:
    """Most tokens that can be drafted, a forward each, and verified in ``longest`` seconds; by bisection."""
    fits, fits_not = 0, MOST_DRAFTED + 1
    drafted = MOST_DRAFTED
    while fits_not - fits > 1:
        if drafted * forward + verify[drafted + 1] > longest + _EPSILON:
            fits_not = drafted
        else:
            fits = drafted
        drafted = (fits + fits_not) // 2
    return fits


def best_guesses(draft: CostTable, guessed: Sequence[float]) -> tuple[int, float]:
    """The number of guesses in a draft's forward that makes drafting cheapest, and the seconds per drafted token.

    ``guessed`` is by number of guesses the probability that the draft confirms all of them.
    """
    best, each, expected = 0, draft[1], 1.0
    for count, probability in enumerate(guessed, start=1):
        expected += probability
        if (seconds := draft[1 + count] / expected) < each:
            best, each = count, seconds
    return best, each


def with_caution(verify: CostTable, requests: int) -> CostTable:
    """What rounds of a request cost by their rows, where the others of a batch wait for its drafts."""
    if requests == 1:
        return verify
    more = 1 + _MORE_A_REQUEST * (requests - 1)
    return [*verify[:2], *(more * seconds for seconds in verify[2:])]


def least_acceptance(verify: CostTable, gain: float = 1.0) -> float:
    """Acceptance of the first draft token below which no draft is ``gain`` times as fast as plain decoding.

    That is whatever it takes to draft. ``k`` tokens that are accepted with at most this probability each commit at most
    ``k`` times as many.
    """
    return min((gain * verify[1 + drafted] / verify[1] - 1) / drafted for drafted in range(1, MOST_DRAFTED + 1))


def least_acceptance_of_layers(verify: CostTable, draft: CostTable, gain: float = 1.0) -> float:
    """The same for a layer draft, each of whose forwards gives a token and confirms all guesses at best."""
    cheapest = min(draft[rows] / rows for rows in range(1, MOST_GUESSES + 2))
    return least_acceptance(verify, gain) + gain * cheapest / verify[1]
