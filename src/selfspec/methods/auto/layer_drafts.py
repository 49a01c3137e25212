"""The layer drafts of one request: which one pays most in a round, and when their low-bit weights are made."""

import math
from collections.abc import Callable

from selfspec.decoding.draft import LayerDraft, MtpDraft
from selfspec.methods.auto.layer_plans import LayerPlans
from selfspec.methods.auto.planned import Round, forecast_of
from selfspec.methods.auto.sources import HeadOfRequest, LayerChoice, LayerRound
from selfspec.planning.acceptance import Copies, CopiesToAppend, CopiesToConfirm
from selfspec.planning.allowance import stake
from selfspec.planning.plans import LEAST_GAIN_TOGETHER, MOST_DRAFTED, Plan, most_that_fits
from selfspec.planning.stopping import DraftPolicy


class LayerDrafts:
    """Plans the layer drafts of a request; none without ``layers``.

    Args:
        layers: what drafts.
        plans: when its drafts end.
        copies: of the text, which are guesses in a draft, and follow it.
        clock: times the making of weights.
    """

    def __init__(
        self,
        layers: LayerChoice | HeadOfRequest | None,
        plans: LayerPlans,
        copies: Copies,
        clock: Callable[[], float],
    ) -> None:
        self._layers, self._plans, self._copies, self._clock = layers, plans, copies, clock

    def fastest(self, planned: Round, longest: float) -> DraftPolicy | None:
        """The layer drafts that bring most tokens a second in rounds of at most ``longest``; ``None`` if none fit.

        For a single token more may be staked, as it is the least that saves time for longer ones.
        """
        layers = self._layers
        if layers is None or not layers.copies.ready:
            return None
        verify, costs = planned.of_layers, layers.costs.now(planned.drafting)
        planned.costs = costs
        fits = most_that_fits(costs[1], verify, stake(longest, verify[1]))
        fits = fits or min(1, most_that_fits(costs[1], verify, longest))
        return self._policy(planned, fits) if fits else None

    def awaited(self, planned: Round) -> DraftPolicy | None:
        """Layer drafts that would be faster than plain decoding, where even the shortest takes more than may be lost.

        They are what time is worth then. Known tokens that are worth less would spend what comes back bit by bit, and
        layers, which need more of it at once, would never draft.
        """
        if planned.fastest is not None or not planned.costs:
            return None
        policy = self._policy(planned, MOST_DRAFTED)
        return policy if policy.rate > 1 / planned.of_layers[1] else None

    def draft(self, planned: Round, longest: float, worth: float, room: int) -> LayerDraft | MtpDraft | None:
        """A layer draft that is worth more than ``worth``, if there is one and its weights are made.

        Args:
            planned: the round, with its ``fastest``.
            longest: most seconds of the round.
            worth: of the best round without layers.
            room: tokens that the answer is expected to have still.
        """
        layers, policy, verify, costs = self._layers, planned.fastest, planned.of_layers, planned.costs
        if layers is None or policy is None:
            if layers is not None and not layers.copies.ready and not layers.copies.failed:
                self._make_weights(planned, layers, worth, room)
            return None
        plan = _plan_of(policy)
        planned.layers_are_worth = plan.worth(planned.rate)
        if planned.layers_are_worth <= worth or not _promises_enough(planned, plan):
            return None
        left = longest - plan.length * costs[1] - verify[1 + plan.length]
        planned.guess = CopiesToConfirm(self._copies, costs, left)
        acceptance = self._plans.acceptance
        append = CopiesToAppend(self._copies, planned.guess, acceptance, verify, planned.rate, longest, planned.filled)
        planned.name, planned.expected = layers.name, plan.tokens
        stop, forecast = policy.begin(acceptance), forecast_of(plan, verify)
        follow = planned.follow if planned.layers_follow else None
        return layers.draft(LayerRound(plan.length, stop, planned.guess, append, forecast, follow))

    def _make_weights(self, planned: Round, layers: LayerChoice | HeadOfRequest, worth: float, room: int) -> None:
        """Makes the weights of layer drafts, for the rounds after this one, if drafts save more than that takes.

        That is decided by drafts as long as is best: early ones are shorter, as little time was saved yet.
        """
        planned.costs = layers.costs.now(planned.drafting)
        fastest = self._policy(planned, MOST_DRAFTED)
        plan = _plan_of(fastest)
        if plan.worth(planned.rate) <= worth or not _promises_enough(planned, plan):
            return
        began = self._clock()
        if layers.copies.make_if_it_pays(planned.of_layers[1] - 1 / fastest.rate, room):
            planned.layers_are_worth = math.inf  # ends a run: the next round is planned with them
        planned.preparing += self._clock() - began

    def _policy(self, planned: Round, most: int) -> DraftPolicy:
        together = planned.shared is not None
        return self._plans.fastest(most, planned.of_layers, planned.costs, planned.drafting, together=together)


def _plan_of(policy: DraftPolicy) -> Plan:
    return Plan(policy.limit, policy.expected_tokens, policy.expected_seconds)


def _promises_enough(planned: Round, plan: Plan) -> bool:
    """Whether a layer draft may make the other requests of a batch wait, if there are any."""
    return planned.shared is None or plan.tokens_per_second * planned.of_layers[1] >= LEAST_GAIN_TOGETHER
