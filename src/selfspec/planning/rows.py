"""What fills the rows of a verification for which no layers draft: known tokens, and probes for the next round."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import inf
from operator import itemgetter

from selfspec.planning.plans import MOST_DRAFTED, Plan
from selfspec.planning.stopping import Outlook
from selfspec.runtimes.costs.rows import MOST_PROBES, CostTable

_EPSILON = 1e-9
_PROBED_LENGTHS = 8
"""Known tokens up to which probes are tried beside them."""


@dataclass(frozen=True)
class Known:
    """Tokens that may come next, and by their number the probability that all are right; it never rises."""

    name: str
    token_ids: Sequence[int]
    survival: Sequence[float]


@dataclass(frozen=True)
class FilledRows:
    """What to verify: the first tokens of a chain, and after which of its rows there is a probe (0: the pending one).

    ``gain`` is what the probes are worth, in tokens of the next round.
    """

    known: Known
    plan: Plan
    probed: tuple[int, ...] = ()
    gain: float = 0.0

    def worth(self, rate: float, trust: float) -> float:
        """As ``Plan.worth``, with what the probes are worth."""
        return self.plan.worth(rate, trust) + self.gain

    @property
    def token_ids(self) -> tuple[int, ...]:
        """The known tokens to verify."""
        return tuple(self.known.token_ids[: self.plan.length])


def gain_of_guess(outlook: Outlook, row: float, rate: float) -> float:
    """What a guess of the next round's first draft token is worth, in tokens, where its row takes ``row`` seconds.

    It is verified where it is likelier than what the row's time is worth; ``outlook`` is that of guesses.
    """
    least = rate * row
    kinds = zip(outlook.weights, outlook.acceptances, strict=True)
    return sum(weight * (acceptance - least) for weight, acceptance in kinds if acceptance > least)


def fill_rows(known: Known, verify: CostTable, rate: float, longest: float, gain: float, trust: float) -> FilledRows:
    """The number of known tokens, and the probes, that are worth most in a round of at most ``longest`` seconds.

    Of numbers that are worth the same it is the largest: their rows cost nothing.

    A probe after a row is of use if that row turns out to be the last one accepted, which is worth ``gain``. Costs may
    have any shape: where more rows take less time, more tokens are verified. Of the known tokens' survival a share
    ``trust`` is believed.
    """
    survival, most, likely = known.survival, longest + _EPSILON, len(known.survival)
    best: tuple[Plan, tuple[int, ...], float] = Plan(0, 1.0, verify[1]), (), 0.0
    highest, expected, reached = -inf, 1.0, 1.0
    ends: list[tuple[float, int]] = []  # the likeliest rows that may be the last accepted, but for the chain's own last
    for count in range(min(len(known.token_ids), MOST_DRAFTED) + 1):
        after = survival[count] if count < likely else 0.0  # that the row after this chain's last would be accepted
        seconds, own = verify[1 + count], 0.0
        probes: tuple[int, ...] = ()
        if gain and count <= _PROBED_LENGTHS:
            probes, own = _probes(sorted([*ends, (reached, count)], reverse=True), count, verify, rate, gain)
            if probes and verify[1 + count + len(probes)] <= most:
                seconds = verify[1 + count + len(probes)]
            else:
                probes, own = (), 0.0
            ends = sorted([*ends, (reached - after, count)], reverse=True)[:MOST_PROBES]
        worth = trust * (expected - 1) + own - rate * seconds
        if (seconds <= most or not count) and worth >= highest:
            highest, best = worth, (Plan(count, expected, seconds), probes, own)
        expected, reached = expected + after, after
    return FilledRows(known, *best)


def _probes(
    ends: Sequence[tuple[float, int]], count: int, verify: CostTable, rate: float, gain: float
) -> tuple[tuple[int, ...], float]:
    """The rows after which a probe pays beside ``count`` known tokens, in ascending order, and what they bring.

    ``ends`` are rows by the chance that each is the last one accepted, the likeliest first.
    """
    rows: list[int] = []
    total = 0.0
    for chance, row in ends[:MOST_PROBES]:
        if chance * gain <= rate * (verify[2 + count + len(rows)] - verify[1 + count + len(rows)]):
            break
        rows.append(row)
        total += chance * gain
    return tuple(sorted(rows)), total


def share_rows(
    survivals: Sequence[Sequence[float]], seconds: Callable[[int], float], values: Sequence[float]
) -> list[int]:
    """How many known tokens of each of several texts to verify in one forward: those that are worth most together.

    The tokens that are expected to save most come first, whosever they are; their number is the one at which the
    seconds that they are expected to save exceed those that their rows take by most, whatever shape the costs have.

    Args:
        survivals: for each text, by number of its tokens, the probability that all are right; it never rises.
        seconds: what a number of such tokens adds to the round.
        values: seconds that a token of each text is worth.
    """
    worth_of = enumerate(zip(survivals, values, strict=True))
    likely = [(value * chance, text) for text, (own, value) in worth_of for chance in own]
    likely.sort(key=itemgetter(0), reverse=True)
    saved = highest = 0.0
    taken = 0
    for number, (gain, _) in enumerate(likely, start=1):
        saved += gain
        if (worth := saved - seconds(number)) > highest:
            highest, taken = worth, number
    lengths = [0] * len(survivals)
    for _, text in likely[:taken]:
        lengths[text] += 1
    return lengths
