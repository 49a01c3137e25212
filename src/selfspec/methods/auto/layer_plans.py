"""How long a layer draft of one request goes on, by the confidences that its drafts have had."""

from collections.abc import Sequence

from selfspec.methods.auto.planned import Round
from selfspec.planning.acceptance import AcceptanceRate
from selfspec.planning.stopping import DraftPolicy, WorthwhileDraft
from selfspec.runtimes.costs.rows import CostTable

_NEAR, _NEAR_TOGETHER = 0.03, 0.1
"""Relative difference up to which decisions by earlier costs and acceptances are as good, alone and in a batch."""

_LIMITS = (1, 2, 3, 4, 6, 8, 12, 16, 23, 32)
"""Lengths to which layer drafts are cut where time is short."""


class LayerPlans:
    """The stopping rules of a request's layer drafts, and the acceptance of their tokens."""

    def __init__(self, confident: AcceptanceRate) -> None:
        self._confident = confident.of_request()
        self._policies: dict[int, DraftPolicy] = {}  # by the number of requests that share the forwards of a draft

    @property
    def likelihood(self) -> float:
        """The mean probability that a drafted token is accepted."""
        return self._confident.outlook().mean

    def policy(self, planned: Round, verify: CostTable, each: float, rate: float, fits: int) -> DraftPolicy:
        """When a draft of at most ``fits`` tokens ends; the last policy, where it would decide the same.

        ``verify`` are the seconds of a round by its rows. A token takes ``each`` seconds; decoding gives ``rate``
        tokens a second.
        """
        limit = max(limit for limit in _LIMITS if limit <= fits)
        outlook, known = self._confident.outlook(), self._policies.get(planned.drafting)
        near = _NEAR if planned.sequences == 1 else _NEAR_TOGETHER
        if (
            known is None
            or known.limit != limit
            or abs(known.draft - each) > near * each
            or abs(known.verify_one - verify[1]) > near * verify[1]
            or abs(known.rate - rate) > near * rate
            or not known.outlook.near(outlook, near)
        ):
            known = self._policies[planned.drafting] = DraftPolicy(outlook, each, verify, rate, limit)
        return known

    def begin(self, policy: DraftPolicy) -> WorthwhileDraft:
        """The rule for one draft."""
        return policy.begin(self._confident.rate)

    def note(self, confidences: Sequence[float], accepted: int) -> None:
        """Scores the tokens of a draft, of which the first ones were accepted."""
        for index, confidence in enumerate(confidences[: accepted + 1]):
            self._confident.note(index < accepted, confidence)

    def fade(self, share: float) -> None:
        """Forgets a share of the own tokens."""
        self._confident.fade(share)
