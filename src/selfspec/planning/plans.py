"""What to draft next: the round that is worth most, among those that may be run.

A ``Plan`` is a round and what it is expected to bring. A ``DraftPolicy`` says when a layer draft ends: by the best that
can still be reached, not by what the next token alone brings. ``fill_rows`` plans a verification for which no layers
draft, of known tokens and probes for the next round; ``share_rows`` one of the known tokens of several texts.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from functools import cached_property
from operator import itemgetter, mul
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from selfspec.runtimes.costs.rows import MOST_PROBES, CostTable

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

_LEAST = 0.002
"""Probability below which no draft goes on."""

_GRID = np.geomspace(_LEAST, 1.0, 80)
_STRIDE = math.log(_GRID[1] / _GRID[0])
_MATCHED = 1e-9

_SAME = 0.01
"""Relative difference between a rate and what rounds bring at it, up to which they are taken to be the same."""

_MOST_STEPS = 12

_PROBED_LENGTHS = 8
"""Known tokens up to which probes are tried beside them."""


class Plan(NamedTuple):
    """A round: plain, of known tokens, or of a layer draft, and what it is expected to bring."""

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


@dataclass(frozen=True)
class Outlook:
    """What the next tokens of a layer draft will be like: kinds of tokens, each as likely as its ``weight``.

    A token of a kind is accepted with its ``acceptance`` if all before it are. Weights add up to 1.
    """

    weights: Sequence[float]
    acceptances: Sequence[float]

    @property
    def mean(self) -> float:
        """The probability that the next token is accepted if all before it are."""
        return float(sum(map(mul, self.weights, self.acceptances)))

    @cached_property
    def moves(self) -> npt.NDArray[np.float64]:
        """The matrix ``[grid, grid]`` that takes a function of the survival, on its right side, to its mean one on."""
        size, moves = len(_GRID), [0.0] * (2 * len(_GRID))  # the share that moves so far down, none at ``size`` on
        for weight, acceptance in zip(self.weights, self.acceptances, strict=True):
            if acceptance < _LEAST:
                continue
            down = math.floor(math.log(acceptance) / _STRIDE + _MATCHED)  # from everywhere on a geometric grid
            share = min(1.0, max(0.0, (acceptance / math.exp(down * _STRIDE) - 1) / math.expm1(_STRIDE)))
            moves[size + down] += weight * (1 - share)
            moves[size + down + 1] += weight * share
        rows = np.lib.stride_tricks.sliding_window_view(np.array(moves[1:]), size)
        return np.ascontiguousarray(rows[:size][::-1].T)

    def near(self, other: "Outlook", tolerance: float) -> bool:
        """Whether decisions by one of the two are as good by the other."""
        weights = zip(self.weights, other.weights, strict=True)
        acceptances = zip(self.acceptances, other.acceptances, strict=True)
        return bool(
            sum(abs(own - its) for own, its in weights) < tolerance
            and max(abs(own - its) for own, its in acceptances) < tolerance
        )


class DraftPolicy:
    """Decides after each token of a draft whether to go on, and says what such a round brings.

    A second is worth ``rate`` tokens, what decoding gives in it in the long run, so a round is worth the tokens that
    it is expected to commit minus its seconds times ``rate``. With ``k`` tokens drafted of which all survive with
    probability ``s``, going on is worth, by backward induction,

        g(k, s) = max(0, E_a[s a + g(k + 1, s a)] - rate (draft + verify(k + 2) - verify(k + 1)))

    over the acceptance ``a`` of the next token. It rises with ``s``, so that a draft goes on above a least survival for
    each ``k``. Costs may have any shape: a dear row is passed where cheap ones follow it.

    Args:
        outlook: what the next tokens will be like.
        draft: seconds of a drafted token.
        verify: seconds of a round beside its drafts.
        rate: tokens a second.
        limit: most tokens, 1 or more.
    """

    def __init__(self, outlook: Outlook, draft: float, verify: CostTable, rate: float, limit: int) -> None:
        self.outlook, self.draft, self.rate, self.limit = outlook, draft, rate, limit
        rows = np.array(verify[1 : limit + 2])
        gained = outlook.mean * _GRID  # by the next token
        added = np.empty((limit, 2, len(_GRID)))
        added[:, 0], added[:, 1] = gained, gained - rate * (draft + np.diff(rows))[:, None]
        reached, going_on = np.zeros((2, len(_GRID))), np.empty((limit, 2, len(_GRID)))  # tokens and worth to come
        for drafted in range(limit - 1, -1, -1):
            best = np.matmul(reached, outlook.moves, out=going_on[drafted])
            best += added[drafted]
            np.multiply(best, best[1] > 0, out=reached)
        self.least_survival = [math.inf, *_crossings(going_on[1:, 1]), math.inf]
        tokens, worth = going_on[0, :, -1].tolist()  # the first token is drafted, whatever it is worth
        self.plan = Plan(limit, 1.0 + tokens, verify[1] + (tokens - worth) / rate)

    @classmethod
    def fastest(cls, outlook: Outlook, draft: float, verify: CostTable, limit: int, rate: float = 0.0) -> "DraftPolicy":
        """The policy whose rounds bring most tokens a second; its ``rate`` is what they bring, or plain decoding does.

        At the highest rate that rounds keep up the best of them is worth nothing. The rate that the best policy of one
        rate brings is the next one to try, which rises to the highest in a few steps (Dinkelbach 1967, "On nonlinear
        fractional programming"). ``rate`` is where to begin, for example what was found for nearly the same costs.
        """
        plain = 1 / verify[1]
        rate = max(rate, plain)
        for _ in range(_MOST_STEPS):
            policy = cls(outlook, draft, verify, rate, limit)
            brought = max(plain, policy.plan.tokens_per_second)
            if abs(brought - rate) <= _SAME * rate:
                break
            rate = brought
        return policy

    def scaled(self, factor: float) -> "DraftPolicy":
        """The policy of costs that are all higher by a factor: it decides the same."""
        if factor == 1:
            return self
        scaled = copy(self)
        scaled.draft, scaled.rate = factor * self.draft, self.rate / factor
        scaled.plan = self.plan._replace(seconds=factor * self.plan.seconds)
        return scaled

    def begin(self, calibrated: Callable[[float], float]) -> "WorthwhileDraft":
        """The rule for one draft; ``calibrated`` gives the acceptance at a confidence."""
        return WorthwhileDraft(self.least_survival, calibrated)


def _crossings(worth: npt.NDArray[np.float64]) -> list[float]:
    """For each row the survival above which going on is worth more than nothing."""
    above = worth > 0
    least = []
    for row, first in enumerate(above.argmax(1).tolist()):
        if first:
            below, over = worth[row, first - 1 : first + 1].tolist()
            low, high = _GRID[first - 1 : first + 1].tolist()
            least.append(low + (high - low) * -below / (over - below))
        else:
            least.append(0.0 if above[row, 0] else math.inf)
    return least


class WorthwhileDraft:
    """Stops one layer draft where going on is not worth its time (``DraftPolicy``)."""

    def __init__(self, least_survival: list[float], calibrated: Callable[[float], float]) -> None:
        self._least = least_survival
        self._calibrated = calibrated
        self._survival = 1.0
        self._drafted = 0

    @property
    def threshold(self) -> float:
        """The confidence below which it stops now, if acceptance were what the confidence says."""
        following = min(self._drafted + 1, len(self._least) - 1)
        return float(min(1.0, self._least[following] / max(self._survival, _LEAST)))

    def stops(self, confidence: float) -> bool:
        """Whether the token just drafted is the last one."""
        self._drafted += 1
        self._survival *= self._calibrated(confidence)
        return self._drafted >= len(self._least) or self._survival < self._least[self._drafted]


@dataclass(frozen=True)
class Known:
    """Tokens that may come next, and by their number the probability that all are right; it never rises.

    ``siblings`` may come in place of the first of them, each with its probability, the likeliest first.
    """

    name: str
    token_ids: Sequence[int]
    survival: Sequence[float]
    siblings: Sequence[tuple[int, float]] = ()


@dataclass(frozen=True)
class FilledRows:
    """What to verify: the first tokens of a chain, some of their siblings, and after which rows there is a probe.

    Row 0 is the pending one's, those of the siblings follow those of the chain. ``gain`` is what the probes are worth,
    in tokens of the next round.
    """

    known: Known
    plan: Plan
    beside: int = 0
    probed: tuple[int, ...] = ()
    gain: float = 0.0

    def worth(self, rate: float, trust: float) -> float:
        """As ``Plan.worth``, with what the probes are worth."""
        return self.plan.worth(rate, trust) + self.gain

    @property
    def token_ids(self) -> tuple[int, ...]:
        """The known tokens to verify, as a chain."""
        return tuple(self.known.token_ids[: self.plan.length])

    @property
    def siblings(self) -> tuple[int, ...]:
        """Those to verify in place of the first."""
        return tuple(token_id for token_id, _ in self.known.siblings[: self.beside])

    @property
    def rows(self) -> int:
        """Of the verification."""
        return 1 + self.plan.length + self.beside + len(self.probed)


def gain_of_probe(outlook: Outlook, row: float, rate: float) -> float:
    """What a probe for the next round's first draft token is worth, in tokens, where its row takes ``row`` seconds.

    Its token is verified where it is likelier than what the row's time is worth; ``outlook`` is that of probed tokens.
    """
    least = rate * row
    kinds = zip(outlook.weights, outlook.acceptances, strict=True)
    return sum(weight * (acceptance - least) for weight, acceptance in kinds if acceptance > least)


def fill_rows(known: Known, verify: CostTable, rate: float, longest: float, gain: float, trust: float) -> FilledRows:
    """The known tokens and the probes that are worth most in a round of at most ``longest`` seconds.

    Each token is worth the chance that it is accepted, whatever the others are, so the likeliest are taken first: those
    of the chain in their order, and siblings. Of numbers of them that are worth the same it is the largest: their rows
    cost nothing.

    A probe after a row is of use if that row turns out to be the last one accepted, which is worth ``gain``. Costs may
    have any shape: where more rows take less time, more tokens are verified. Of what the tokens are worth a share
    ``trust`` is believed.
    """
    survival, siblings, most = known.survival, known.siblings, longest + _EPSILON
    longest_chain, likely = min(len(known.token_ids), MOST_DRAFTED), len(survival)
    best: tuple[Plan, int, tuple[int, ...], float] = Plan(0, 1.0, verify[1]), 0, (), 0.0
    highest, expected, count, beside = -math.inf, 1.0, 0, 0
    ends = {0: 1.0}  # the chance of each row that it is the last one accepted; below 0 are those of siblings
    while True:
        rows, own = 1 + count + beside, 0.0
        probed: tuple[int, ...] = ()
        seconds = verify[rows]
        if gain and rows <= 1 + _PROBED_LENGTHS:
            probed, own = _probes(ends, rows, verify, rate, gain)
            if probed and verify[rows + len(probed)] <= most:
                seconds = verify[rows + len(probed)]
            else:
                probed, own = (), 0.0
        worth = trust * (expected - 1) + own - rate * seconds
        if (seconds <= most or rows == 1) and worth >= highest:
            highest, best = worth, (Plan(count, expected, seconds), beside, probed, own)
        following = survival[count] if count < likely else 0.0
        other = siblings[beside][1] if count and beside < len(siblings) else -1.0
        if count == longest_chain and other < 0:
            break
        if rows > MOST_DRAFTED:
            break
        if count == longest_chain or other > following:
            ends[0] -= other
            beside += 1
            ends[-beside] = other
            expected += other
        else:
            ends[count] -= following
            count += 1
            ends[count] = following
            expected += following
    plan, beside, probed, own = best
    return FilledRows(known, plan, beside, tuple(sorted(row if row >= 0 else plan.length - row for row in probed)), own)


def _probes(
    ends: Mapping[int, float], rows: int, verify: CostTable, rate: float, gain: float
) -> tuple[tuple[int, ...], float]:
    """The rows after which a probe pays beside ``rows`` of tokens, and what they bring.

    ``ends`` are the chances of rows that each is the last one accepted.
    """
    likeliest = sorted(((chance, row) for row, chance in ends.items()), reverse=True)[:MOST_PROBES]
    probed: list[int] = []
    total = 0.0
    for chance, row in likeliest:
        if chance * gain <= rate * (verify[1 + rows + len(probed)] - verify[rows + len(probed)]):
            break
        probed.append(row)
        total += chance * gain
    return tuple(probed), total


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
