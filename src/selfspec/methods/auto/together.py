"""``auto`` for several requests at once, whose rows share a forward."""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from selfspec.decoding.draft import Draft
from selfspec.methods.auto.drafter import AutoDrafter
from selfspec.methods.auto.planned import Round, plain_draft
from selfspec.planning.allowance import HostTime, SharedRound
from selfspec.planning.plans import MOST_DRAFTED, least_acceptance_of_layers, with_caution
from selfspec.planning.rows import Known, share_rows
from selfspec.runtimes.costs.live import LiveCosts
from selfspec.runtimes.costs.rows import CostTable


class _Batch:
    """What a round of several requests costs.

    Attributes:
        count: of the requests.
        costs: of the target's forward.
        host: what earlier rounds of batches took beside forwards.
        share: a request's seconds of a step of plain decoding.
        token: seconds that a known token saves. Known tokens are of few requests, which end before the others. One that
            ends earlier saves its share of later steps if another takes its place, and one row of them if none does.
            Which of the two is not known, so half of both counts. Layers draft for all requests alike, and save their
            share.
    """

    def __init__(self, count: int, costs: LiveCosts, host: HostTime) -> None:
        self.count, self.costs, self.host = count, costs, host
        self._step, self._of_drafts = costs(count), host.of_drafts
        self.share = self._step / count
        self.token = (self.share + min(self.share, max(0.0, self._step - costs(count - 1)))) / 2

    def added(self, rows: int) -> float:
        """Seconds that rows of drafts add to the round."""
        return self.costs(self.count + rows) - self._step + self._of_drafts if rows else 0.0

    def least_acceptance(self) -> float:
        """Acceptance of the first draft token below which no known token can pay."""
        return min(self.added(rows) / rows for rows in range(1, MOST_DRAFTED + 1)) / self.token


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
    batch = _Batch(len(drafters), drafters[0].verify_costs, host or HostTime())
    verify = with_caution(batch.costs.now(batch.count), batch.count)
    least = batch.least_acceptance()
    of_layers = {
        layers: math.inf if layers is None else least_acceptance_of_layers(verify, layers.now(batch.count))
        for layers in {drafter.layer_costs for drafter in drafters}
    }
    gaining = {drafter for drafter in drafters if drafter.may_gain(least, of_layers[drafter.layer_costs])}
    if not _promise(gaining, batch, of_layers):
        gaining.clear()
    shared = SharedRound(batch.count, batch.costs, batch.host, sought=bool(gaining))
    plain_step = plain_draft(verify)
    nothing = plain_step if gaining else replace(plain_step, follow=lambda _: plain_step)
    drafts = _plan_gaining([drafter for drafter in drafters if drafter in gaining], batch, verify, shared)
    return [drafts[each] if each in gaining else each.plan_nothing(nothing, shared) for each in drafters]


def _promise(drafters: Collection[AutoDrafter], batch: _Batch, of_layers: Mapping[LiveCosts | None, float]) -> bool:
    """Whether drafts may pay for the time that seeking them takes, by a bound that is found without."""
    if sum(drafter.promise for drafter in drafters) * batch.token > batch.host.of_drafts:
        return True
    return any(drafter.layers_may_gain(of_layers[drafter.layer_costs]) for drafter in drafters)


def _plan_gaining(
    drafters: Sequence[AutoDrafter], batch: _Batch, verify: CostTable, shared: SharedRound
) -> dict[AutoDrafter, Draft]:
    """Drafts of the requests for which one may pay."""
    offers = [drafter.offer() for drafter in drafters]
    lengths, each = _lengths(drafters, offers, batch)
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


def _lengths(drafters: Sequence[AutoDrafter], offers: Sequence[Known], batch: _Batch) -> tuple[list[int], float]:
    """How many known tokens of each request are verified, and the seconds that each token costs it.

    No request takes more than its allowance; what others then pay may have changed.
    """
    survivals = [offer.survival for offer in offers]
    spare = [drafter.longest(batch.share) - batch.share for drafter in drafters]
    while True:
        lengths = share_rows(survivals, batch.added, batch.token)
        total = sum(lengths)
        each = max(0.0, batch.added(total) / total) if total else 0.0
        fitting = [
            min(length, max(0, int(most / each))) if each else length
            for length, most in zip(lengths, spare, strict=True)
        ]
        if fitting == lengths:
            return lengths, each
        survivals = [own[:length] for own, length in zip(survivals, fitting, strict=True)]
