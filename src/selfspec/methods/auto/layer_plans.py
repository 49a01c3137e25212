"""How long layer drafts go on, by the confidences that its drafts have had."""

from typing import NamedTuple

from selfspec.planning.plans import DraftPolicy, Outlook
from selfspec.runtimes.costs.rows import CostTable

_NEAR, _NEAR_STEP = 0.25, 0.05
"""Relative difference of acceptances and drafts, and of rounds, up to which decisions by earlier ones are as good.

A machine that is busy slows all rounds alike, which changes no decision. What is worth most depends on the seconds of a
step directly: drafts are compared with rounds by the costs of today.
"""

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
