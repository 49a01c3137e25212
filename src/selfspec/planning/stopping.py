"""When a layer draft ends: by the best that can still be reached, not by what the next token alone brings."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import mul

import numpy as np
import numpy.typing as npt

from selfspec.runtimes.costs.rows import CostTable

_LEAST = 0.002
"""Probability below which no draft goes on."""

_GRID = np.geomspace(_LEAST, 1.0, 80)
_STRIDE = math.log(_GRID[1] / _GRID[0])
_MATCHED = 1e-9


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
        follows, gained = _expectation(outlook), outlook.mean * _GRID
        self.outlook, self.draft, self.verify_one, self.rate, self.limit = outlook, draft, verify[1], rate, limit
        self.least_survival = [np.inf] * (limit + 1)
        reached, value = np.zeros((len(_GRID), 2)), np.array([1.0, -rate])  # tokens and seconds that are still to come
        for drafted in range(limit - 1, -1, -1):
            reached = follows @ reached
            reached[:, 0] += gained
            reached[:, 1] += draft + verify[drafted + 2] - verify[drafted + 1]
            if drafted:
                worth = reached @ value
                self.least_survival[drafted] = _crossing(worth)
                reached *= (worth > 0)[:, None]
        self.expected_tokens = 1.0 + float(reached[-1, 0])
        self.expected_seconds = verify[1] + float(reached[-1, 1])

    @property
    def worth(self) -> float:
        """Tokens that a round is expected to commit, minus those that its seconds are worth."""
        return self.expected_tokens - self.rate * self.expected_seconds

    def begin(self, calibrated: Callable[[float], float]) -> "WorthwhileDraft":
        """The rule for one draft; ``calibrated`` gives the acceptance at a confidence."""
        return WorthwhileDraft(self.least_survival, calibrated)


def _expectation(outlook: Outlook) -> npt.NDArray[np.float64]:
    """The matrix that takes a function of the survival, on the grid, to its mean after one more token."""
    size, moves = len(_GRID), [0.0] * (2 * len(_GRID))  # the share that moves so far down, from none at ``size`` on
    for weight, acceptance in zip(outlook.weights, outlook.acceptances, strict=True):
        if acceptance < _LEAST:
            continue
        down = math.floor(math.log(acceptance) / _STRIDE + _MATCHED)  # the same from everywhere on a geometric grid
        share = min(1.0, max(0.0, (acceptance / math.exp(down * _STRIDE) - 1) / math.expm1(_STRIDE)))
        moves[size + down] += weight * (1 - share)
        moves[size + down + 1] += weight * share
    rows = np.lib.stride_tricks.sliding_window_view(np.array(moves[1:]), size)
    return np.ascontiguousarray(rows[:size][::-1])


def _crossing(worth: npt.NDArray[np.float64]) -> float:
    """The survival above which going on is worth more than nothing."""
    above = worth > 0
    first = int(above.argmax())
    if not first:
        return 0.0 if above[0] else math.inf
    below, least = float(worth[first - 1]), float(worth[first])
    low, high = float(_GRID[first - 1]), float(_GRID[first])
    return low + (high - low) * -below / (least - below)


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
