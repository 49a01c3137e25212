"""When a draft stops: rules that a method gives to its layer drafts."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol


class StoppingRule(Protocol):
    """Decides after every draft token whether drafting goes on. Drafts of fixed length have no rule at all."""

    @property
    def threshold(self) -> float:
        """The confidence, 0 to 1, below which it stops now."""

    def stops(self, confidence: float) -> bool:
        """Whether the token just drafted is the last one.

        Args:
            confidence: the draft's largest probability at that token, 0 to 1.
        """


@dataclass(frozen=True)
class ConfidenceThreshold:
    """Stops after the first token whose confidence is below a threshold; that token is still verified."""

    threshold: float

    def stops(self, confidence: float) -> bool:
        """Whether the confidence is below the threshold."""
        return confidence < self.threshold


class JointConfidence:
    """Stops one draft when the product of its confidences falls below a threshold; the last token is still verified.

    The product is the probability that all of the draft is accepted, as far as confidences tell. So a draft of many
    tokens that are rather likely ends, too, before most of it is verified in vain.
    """

    def __init__(self, threshold: float) -> None:
        self.threshold = threshold
        self._product = 1.0

    def stops(self, confidence: float) -> bool:
        """Whether the product, this confidence included, is below the threshold."""
        self._product *= confidence
        return self._product < self.threshold


_ACCEPTANCE_KEPT, _THRESHOLD_KEPT = 0.5, 0.9
"""Shares of the old values that stay after a round: β₁ and β₂ of Draft & Verify."""


class DraftVerifyThreshold:
    """The online threshold of Draft & Verify (Zhang et al. 2024, adaptive draft-exiting).

    The acceptance rate of rounds is smoothed (β₁ = 0.5), from 0 on as in the authors' code, so that the threshold rises
    in the first rounds. While it is below ``target_acceptance`` the threshold moves up by ``step``, otherwise down. It
    stays where the draft reached its length limit, since then the threshold decided nothing. The move itself is
    smoothed (β₂ = 0.9).
    """

    def __init__(self, threshold: float, *, target_acceptance: float = 0.9, step: float = 0.01) -> None:
        self.threshold = threshold
        self._target_acceptance, self._step = target_acceptance, step
        self._acceptance = 0.0

    def stops(self, confidence: float) -> bool:
        """Whether the confidence is below the current threshold."""
        return confidence < self.threshold

    def update(self, drafted: int, accepted: int, *, reached_limit: bool) -> None:
        """Learns from a round.

        Args:
            drafted: draft tokens of the round; a round without any changes nothing.
            accepted: how many of them were accepted.
            reached_limit: the draft ended at its length limit, not by this rule.
        """
        if not drafted:
            return
        self._acceptance = _ACCEPTANCE_KEPT * self._acceptance + (1 - _ACCEPTANCE_KEPT) * accepted / drafted
        if self._acceptance < self._target_acceptance:
            moved = self.threshold + self._step
        elif reached_limit:
            moved = self.threshold
        else:
            moved = self.threshold - self._step
        self.threshold = min(1.0, max(0.0, _THRESHOLD_KEPT * self.threshold + (1 - _THRESHOLD_KEPT) * moved))


TreeWidths = Callable[[float], int]
"""How many candidates to verify at a draft position, given the confidence there (SWIFT's dynamic verification)."""
