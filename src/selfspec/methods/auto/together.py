"""``auto`` for several requests at once, whose rows share a forward."""

import math
from collections.abc import Sequence
from dataclasses import replace

from selfspec.decoding.draft import Draft
from selfspec.methods.auto.drafter import AutoDrafter
from selfspec.methods.auto.planned import plain_draft
from selfspec.planning.allowance import SharedRound
from selfspec.planning.plans import least_acceptance, least_acceptance_of_layers, with_caution


def plan_together(drafters: Sequence[AutoDrafter]) -> list[Draft]:
    """What drafts the next round of several requests, whose rows share a forward."""
    count = sharing = len(drafters)
    if count == 1:
        return [drafters[0].plan()]
    costs = drafters[0].verify_costs
    shared, verify = SharedRound(count, costs), with_caution(costs.now(count), count)
    least = least_acceptance(verify)
    of_layers = {
        layers: math.inf if layers is None else least_acceptance_of_layers(verify, layers.now(count))
        for layers in {drafter.layer_costs for drafter in drafters}
    }
    may_gain = [drafter.may_gain(least, of_layers[drafter.layer_costs]) for drafter in drafters]
    plain_step = plain_draft(verify)
    nothing = plain_step if any(may_gain) else replace(plain_step, follow=lambda _: plain_step)
    drafts = {
        drafter: drafter.plan_among(count, shared=shared) if gains else drafter.plan_nothing(nothing, shared)
        for drafter, gains in zip(drafters, may_gain, strict=True)
    }
    while (drafting := [drafter for drafter in drafters if drafter.drafts_layers]) and len(drafting) < sharing:
        # Fewer share the draft's forwards than was assumed: some may choose differently.
        sharing = len(drafting)
        drafts |= {drafter: drafter.plan_among(count, sharing, shared) for drafter in drafting}
    return list(drafts.values())
