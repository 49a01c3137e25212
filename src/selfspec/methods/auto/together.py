"""``auto`` for several requests at once, whose rows share a forward."""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from selfspec.decoding.draft import Draft
from selfspec.methods.auto.drafter import AutoDrafter
from selfspec.methods.auto.planned import Round, plain_draft
from selfspec.planning.allowance import HostTime, SharedRound
from selfspec.planning.plans import least_acceptance_of_layers, with_caution
from selfspec.planning.sharing import SharedStep
from selfspec.runtimes.costs.live import LiveCosts
from selfspec.runtimes.costs.rows import CostTable


def plan_together(drafters: Sequence[AutoDrafter], host: HostTime | None = None) -> list[Draft]:
    """What drafts the next round of several requests, whose rows share a forward.

    The likeliest known tokens of all are verified, as many as pay together. Then each request sees whether layers would
    be worth more to it.

    Args:
        drafters: of the requests.
        host: what earlier rounds of batches took beside forwards.
    """
    if len(drafters) == 1:
        return [drafters[0].plan()]
    costs, host = drafters[0].verify_costs, host or HostTime()
    batch = SharedStep(len(drafters), costs, host.of_drafts)
    verify = with_caution(costs.now(batch.count), batch.count)
    least = batch.least_acceptance()
    of_layers = {
        layers: math.inf if layers is None else least_acceptance_of_layers(verify, layers.now(batch.count))
        for layers in {drafter.layer_costs for drafter in drafters}
    }
    gaining = {drafter for drafter in drafters if drafter.may_gain(least, of_layers[drafter.layer_costs])}
    if not _promise(gaining, batch.token, host.of_drafts, of_layers):
        gaining.clear()
    shared = SharedRound(batch.count, costs, host, sought=bool(gaining))
    plain_step = plain_draft(verify)
    nothing = plain_step if gaining else replace(plain_step, follow=lambda _: plain_step)
    drafts = _plan_gaining([drafter for drafter in drafters if drafter in gaining], batch, verify, shared)
    return [drafts[each] if each in gaining else each.plan_nothing(nothing, shared) for each in drafters]


def _promise(
    drafters: Collection[AutoDrafter], token: float, of_drafts: float, of_layers: Mapping[LiveCosts | None, float]
) -> bool:
    """Whether drafts may pay for the seconds that seeking them takes, by a bound that is found without."""
    if sum(drafter.promise for drafter in drafters) * token > of_drafts:
        return True
    return any(drafter.layers_may_gain(of_layers[drafter.layer_costs]) for drafter in drafters)


def _plan_gaining(
    drafters: Sequence[AutoDrafter], batch: SharedStep, verify: CostTable, shared: SharedRound
) -> dict[AutoDrafter, Draft]:
    """Drafts of the requests for which one may pay."""
    offers = [drafter.offer() for drafter in drafters]
    spare = [drafter.longest(batch.share) - batch.share for drafter in drafters]
    lengths, each = batch.lengths([offer.survival for offer in offers], spare)
    drafts: dict[AutoDrafter, Draft] = {}
    for drafter, length in zip(drafters, lengths, strict=True):
        planned = Round(batch.count, len(drafters), verify, verify, None, shared, batch.share)
        drafts[drafter] = drafter.take(planned, length, batch.share + length * each)
    drafting = drafters
    while (still := [drafter for drafter in drafting if drafter.drafts_layers]) and len(still) < len(drafting):
        # Fewer share the draft's forwards than was assumed: some may choose differently.
        drafting = still
        drafts |= {drafter: drafter.take_again(len(drafting)) for drafter in drafting}
    return drafts
