"""How long layer drafts go on, by the confidences that its drafts have had."""

from collections.abc import Sequence
from typing import NamedTuple

from selfspec.planning.acceptance import AcceptanceRate
from selfspec.planning.plans import MOST_DRAFTED
from selfspec.planning.stopping import DraftPolicy, Outlook
from selfspec.runtimes.costs.rows import CostTable

_NEAR, _NEAR_STEP = 0.25, 0.05
"""Relative difference of acceptances and drafts, and of rounds, up to which decisions by earlier ones are as good.

A machine that is busy slows all rounds alike, which changes no decision. What is worth most depends on the seconds of a
step directly: drafts are compared with rounds by the costs of today.
"""

_LIMITS = (1, 2, 3, 4, 6, 8, 12, 16, 23, MOST_DRAFTED)
"""Lengths to which layer drafts are cut where time is short."""

_SHARED, _MEMORY = 30.0, 100.0
"""Tokens for which what all requests have seen counts within a request, and most own tokens.

What a confidence says of a token differs little from text to text, much less than what a match says of a copy.
"""

_FIRST_DRAFTED = 6.0
"""Tokens that took a forward each, with which a request begins."""

_FADING = 0.9
"""Share that is kept of what was counted, with each draft."""


_MOST_KEPT = 4
"""Policies of one number of requests and one limit that are kept: texts differ in what is accepted."""


class _Kept(NamedTuple):
    """A policy, and the costs of a round that it was found for: of one row, of two, and of all."""

    policy: DraftPolicy
    costs: tuple[float, float, float]

    def serves(self, outlook: Outlook, each: float, costs: tuple[float, float, float]) -> bool:
        """Whether it decides as the best policy of today would, once scaled to what a step takes today."""
        factor = costs[0] / self.costs[0]
        return (
            abs(factor * self.policy.draft - each) <= _NEAR * each
            and all(abs(factor * own - now) <= _NEAR_STEP * now for own, now in zip(self.costs, costs, strict=True))
            and self.policy.outlook.near(outlook, _NEAR)
        )


class DraftPolicies:
    """The policies that were found for layer drafts, for all requests. May be used by several threads.

    A policy takes much longer to find than a round takes to plan; requests of a model hardly differ in it.
    """

    def __init__(self) -> None:
        # By the number of requests that share the forwards of a draft, and by their limit; the latest first. Entries
        # are replaced whole: what two threads find at the same time, one of them finds again.
        self._known: dict[tuple[int, int], tuple[_Kept, ...]] = {}
        self._rates: dict[int, float] = {}  # that were found last, by the number of requests

    def fastest(self, outlook: Outlook, each: float, verify: CostTable, limit: int, drafting: int) -> DraftPolicy:
        """The policy that brings most tokens a second; one that was found before, where it would decide the same.

        Args:
            outlook: what the next tokens will be like.
            each: seconds of a drafted token.
            verify: seconds of a round by its rows.
            limit: most tokens, 1 or more.
            drafting: requests that share the forwards of the draft.
        """
        known = self._known.get((drafting, limit), ())
        costs = (verify[1], verify[2], verify[1 + limit])
        for own in known:
            if own.serves(outlook, each, costs):
                return own.policy.scaled(costs[0] / own.costs[0])
        policy = DraftPolicy.fastest(outlook, each, verify, limit, self._rates.get(drafting, 0.0))
        self._rates[drafting] = policy.rate
        self._known[drafting, limit] = (_Kept(policy, costs), *known[: _MOST_KEPT - 1])
        return policy


class LayerPlans:
    """What a request has seen of the tokens of layer drafts, and when such a draft of it ends.

    Args:
        confident: what all requests have seen.
        policies: that were found for all requests.
    """

    def __init__(self, confident: AcceptanceRate, policies: DraftPolicies | None = None) -> None:
        self._shared, self._confident = confident, confident.of_request(_SHARED, _MEMORY)
        self._drafted = self._forwards = _FIRST_DRAFTED
        self._policies = policies or DraftPolicies()

    @property
    def likelihood(self) -> float:
        """The mean probability that a drafted token is accepted."""
        return self._confident.outlook().mean

    def fastest(
        self, most: int, verify: CostTable, draft: CostTable, drafting: int, *, together: bool = False
    ) -> DraftPolicy:
        """The policy that brings most tokens a second.

        Args:
            most: tokens of a draft, 1 or more.
            verify: seconds of a round by its rows.
            draft: seconds of the draft's forward by its rows.
            drafting: requests that share it.
            together: whether that is decided for all requests of a batch, by what all requests have seen.
        """
        limit = max(limit for limit in _LIMITS if limit <= most)
        if together:
            return self._policies.fastest(self._shared.outlook(), draft[1], verify, limit, drafting)
        each = draft[1] * self._forwards / self._drafted
        return self._policies.fastest(self._confident.outlook(), each, verify, limit, drafting)

    def acceptance(self, confidence: float) -> float:
        """The probability that a drafted token is accepted if all before it are."""
        return self._confident.rate(confidence)

    def note(self, confidences: Sequence[float], accepted: int) -> None:
        """Scores the tokens of a draft, of which the first ones were accepted."""
        for index, confidence in enumerate(confidences[: accepted + 1]):
            self._confident.note(index < accepted, confidence)

    def note_forwards(self, drafted: int, forwards: float) -> None:
        """Counts the tokens of a draft, and what they took: guesses that were confirmed saved forwards."""
        self._drafted = _FADING * self._drafted + drafted
        self._forwards = _FADING * self._forwards + forwards

    def fade(self, share: float) -> None:
        """Forgets a share of the own tokens."""
        self._confident.fade(share)
