"""``auto`` for several requests at once, whose rows share a forward."""

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property, partial
from itertools import repeat

from selfspec.decoding.draft import Draft, Follow, Later, NoDraft, RunRound, TokenDraft
from selfspec.methods.auto.drafting import AutoDrafter
from selfspec.methods.auto.known import LIKELIEST
from selfspec.methods.auto.planned import PlannedRound, plain_draft
from selfspec.planning.allowance import UNKNOWN, HostTime, SharedRound
from selfspec.planning.plans import LEAST_GAIN_TOGETHER, least_acceptance_of_layers, with_caution
from selfspec.planning.sharing import SharedStep
from selfspec.runtimes.costs.live import LiveCosts
from selfspec.runtimes.costs.rows import CostTable

_FIRST_ROUNDS = 4
"""Rounds that time plain decoding in the first batch of each number of requests."""


class _Batch(SharedStep):
    """What a round of several requests costs.

    Attributes:
        costs: of the target's forward.
        host: what earlier rounds of batches took beside forwards.
    """

    def __init__(self, count: int, costs: LiveCosts, host: HostTime) -> None:
        super().__init__(count, costs, host.of_drafts(count))
        self.costs, self.host = costs, host

    @cached_property
    def verify(self) -> CostTable:
        """What rounds cost a request by its rows, where layers draft."""
        verify = with_caution(self.costs.now(self.count), self.count)
        more = self.host.of_layers(self.count) / self.count
        return [*verify[:2], *(seconds + more for seconds in verify[2:])]

    def values_of(self, drafters: Sequence[AutoDrafter]) -> list[float]:
        """Seconds that a known token of each request promises to save."""
        return self.values([drafter.rounds_left for drafter in drafters])

    def promising(self, drafters: Sequence[AutoDrafter]) -> dict[AutoDrafter, float]:
        """The requests whose known tokens may pay, with what each token saves.

        There are none where all of them together cannot pay for the host's time.
        """
        found, most, trust = {}, 0.0, self.host.trust.value
        for drafter, promised in zip(drafters, self.values_of(drafters), strict=True):
            likelihood, value = drafter.likelihood, trust * promised
            if likelihood * value >= self.least_row:
                found[drafter] = value
                most += value * likelihood / (1 - likelihood)  # if all are as likely as the first
        return found if most > self.host.of_drafts(self.count) else {}


def plan_together(drafters: Sequence[AutoDrafter], host: HostTime | None = None) -> list[Draft]:
    """What drafts the next round of several requests, whose rows share a forward.

    The likeliest known tokens of all are verified, as many as pay together; such rounds follow each other in runs. Then
    each request sees whether layers would be worth more to it.

    Args:
        drafters: of the requests.
        host: what earlier rounds of batches took beside forwards.
    """
    if len(drafters) == 1:
        return [drafters[0].plan()]
    for drafter in drafters:
        drafter.follow_length()
    batch = _Batch(len(drafters), drafters[0].verify_costs, host or HostTime())
    values, layered = list[float](), list[AutoDrafter]()
    sought = batch.costs.doubt <= UNKNOWN and batch.host.allowance.allows(batch.count)
    if sought:
        values, layered = batch.values_of(drafters), _may_draft_layers(drafters, batch)
        sought = bool(layered) or batch.least_row <= LIKELIEST * batch.host.trust.value * max(values)
    shared = SharedRound(batch, batch.costs, batch.host, sought=sought)
    if not sought:
        rounds = None if batch.host.allowance.knows(batch.count) else _FIRST_ROUNDS
        return _plan_nothing(drafters, [0.0, batch.share], shared, rounds)
    verify, run = batch.verify, _Run(batch)
    for drafter, value in zip(drafters, values, strict=True):
        drafter.begin(
            PlannedRound(batch.count, 1, verify, verify, run.follow(drafter), shared, step=batch.share, value=value)
        )
    drafts: dict[AutoDrafter, Draft] = {**run.plan(drafters)}
    while layered:
        found = {drafter: draft for drafter in layered if (draft := drafter.or_layers(len(layered))) is not None}
        if len(found) == len(layered):
            drafts |= found
            break
        layered = list(found)  # fewer share the draft's forwards than was assumed: some may choose differently
    return [drafts[drafter] for drafter in drafters]


def _plan_nothing(
    drafters: Sequence[AutoDrafter], verify: CostTable, shared: SharedRound, rounds: int | None
) -> list[Draft]:
    """Steps of plain decoding of all, followed by the same: ``rounds`` in all, or without end for ``None``."""
    step, planned = plain_draft(verify), PlannedRound(len(drafters), 1, (), (), None, shared)
    for drafter in drafters:
        drafter.plan_nothing(planned)
    if rounds is None:
        return [replace(step, follow=lambda _: step)] * len(drafters)
    return [replace(step, follow=_repeated(step, rounds - 1)) for _ in drafters]


def _repeated(step: NoDraft, times: int) -> Follow:
    """Follows a step by ``times`` of the same."""
    steps = repeat(step, times)
    return lambda _: next(steps, None)


def _may_draft_layers(drafters: Sequence[AutoDrafter], batch: _Batch) -> list[AutoDrafter]:
    """The requests for which layers may promise what is asked of them in a batch."""
    least: dict[LiveCosts | None, float] = {
        layers: least_acceptance_of_layers(batch.verify, layers.now(batch.count), LEAST_GAIN_TOGETHER)
        for layers in {drafter.layer_costs for drafter in drafters}
        if layers is not None
    }
    return [drafter for drafter in drafters if drafter.layers_may_gain(least.get(drafter.layer_costs, math.inf))]


class _Run:
    """Plans rounds of known tokens, each for all requests of a batch that go on, once the last one of all is known."""

    def __init__(self, batch: _Batch) -> None:
        self._batch = batch
        self._waiting: list[AutoDrafter] = []
        self._drafts: dict[AutoDrafter, NoDraft | TokenDraft] = {}

    def follow(self, drafter: AutoDrafter) -> Follow:
        """Follows the rounds of one request."""

        def played(own: RunRound) -> Later:
            drafter.learn_of_run(own)
            self._waiting.append(drafter)
            return partial(self._next, drafter)

        return played

    def _next(self, drafter: AutoDrafter) -> NoDraft | TokenDraft:
        if self._waiting:
            waiting, self._waiting = self._waiting, []
            self._drafts = self.plan(waiting)
        return self._drafts[drafter]

    def plan(self, drafters: Sequence[AutoDrafter]) -> dict[AutoDrafter, NoDraft | TokenDraft]:
        """The known tokens that are verified next."""
        batch = self._batch
        if batch.count != len(drafters):
            batch = self._batch = _Batch(len(drafters), batch.costs, batch.host)
        promising = batch.promising(drafters)
        survivals = [drafter.offer().survival for drafter in promising]
        spare = [drafter.longest(batch.share) - batch.share for drafter in promising]
        lengths, each = batch.lengths(survivals, spare, list(promising.values()))
        taken = dict(zip(promising, lengths, strict=True))
        return {
            drafter: drafter.take(length := taken.get(drafter, 0), batch.share + length * each, batch.share)
            for drafter in drafters
        }
