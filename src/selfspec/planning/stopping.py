"""When a layer draft ends: by the best that can still be reached, not by what the next token alone brings."""

import math
from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import dataclass
from functools import cached_property
from operator import mul

import numpy as np
import numpy.typing as npt

from selfspec.planning.plans import Plan
from selfspec.runtimes.costs.rows import CostTable

_LEAST = 0.002
"""Probability below which no draft goes on."""

_GRID = np.geomspace(_LEAST, 1.0, 80)
_STRIDE = math.log(_GRID[1] / _GRID[0])
_MATCHED = 1e-9

_SAME = 0.01
"""Relative difference between a rate and what rounds bring at it, up to which they are taken to be the same."""

_MOST_STEPS = 12


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
