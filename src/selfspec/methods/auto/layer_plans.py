"""How long a layer draft of one request goes on, by the confidences that its drafts have had."""

from collections.abc import Sequence

from selfspec.planning.acceptance import AcceptanceRate
from selfspec.planning.plans import MOST_DRAFTED
from selfspec.planning.stopping import DraftPolicy
from selfspec.runtimes.costs.rows import CostTable

_NEAR, _NEAR_STEP = 0.25, 0.05
"""Relative difference of acceptances and drafts, and of a step, up to which decisions by earlier ones are as good.

What is worth most depends on the seconds of a step directly: drafts are compared with rounds by the costs of today.
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


class LayerPlans:
    """The stopping rules of a request's layer drafts, and what it has seen of their tokens."""

    def __init__(self, confident: AcceptanceRate) -> None:
        self._confident = confident.of_request(_SHARED, _MEMORY)
        self._drafted = self._forwards = _FIRST_DRAFTED
        # By the number of requests that share the forwards of a draft, and by their limit.
        self._policies: dict[tuple[int, int], DraftPolicy] = {}

    @property
    def likelihood(self) -> float:
        """The mean probability that a drafted token is accepted."""
        return self._confident.outlook().mean

    def fastest(self, most: int, verify: CostTable, draft: CostTable, drafting: int) -> DraftPolicy:
        """The policy that brings most tokens a second; the last one, where it would decide the same.

        Args:
            most: tokens of a draft, 1 or more.
            verify: seconds of a round by its rows.
            draft: seconds of the draft's forward by its rows.
            drafting: requests that share it.
        """
        limit = max(limit for limit in _LIMITS if limit <= most)
        outlook, known = self._confident.outlook(), self._policies.get((drafting, limit))
        each = draft[1] * self._forwards / self._drafted
        if (
            known is None
            or abs(known.draft - each) > _NEAR * each
            or abs(known.verify_one - verify[1]) > _NEAR_STEP * verify[1]
            or not known.outlook.near(outlook, _NEAR)
        ):
            known = DraftPolicy.fastest(outlook, each, verify, limit, 0.0 if known is None else known.rate)
            self._policies[drafting, limit] = known
        return known

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
