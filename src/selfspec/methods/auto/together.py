"""``auto`` for several requests at once, whose rows share a forward."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property, partial

from selfspec.decoding.draft import Draft, Follow, Later, NoDraft, RunRound, TokenDraft
from selfspec.methods.auto.drafter import LIKELIEST, AutoDrafter
from selfspec.methods.auto.planned import Round, plain_draft
from selfspec.planning.allowance import UNKNOWN, HostTime, SharedRound
from selfspec.planning.plans import MOST_DRAFTED, least_acceptance_of_layers, with_caution
from selfspec.planning.rows import share_rows
from selfspec.runtimes.costs.live import LiveCosts
from selfspec.runtimes.costs.rows import CostTable

_SPREAD = 0.25
"""Share of the rounds that are left for which it is not known which request ends last."""


class _Batch:
    """What a round of several requests costs.

    Attributes:
        count: of the requests.
        costs: of the target's forward.
        host: what earlier rounds of batches took beside forwards.
        share: a request's seconds of a step of plain decoding.
    """

    def __init__(self, count: int, costs: LiveCosts, host: HostTime) -> None:
        self.count, self.costs, self.host = count, costs, host
        self._step, self._of_drafts = costs(count), host.of_drafts
        self.share = self._step / count
        self._row = min(self.share, max(0.0, self._step - costs(count - 1)))
        self._added = {0: 0.0}

    def values(self, drafters: Sequence[AutoDrafter]) -> list[float]:
        """Seconds that a known token of each request saves.

        Each saves its row of a later step. All the rest of a step is saved by a token of the request that ends last,
        and only by that. Who is expected to have most rounds left is likeliest to be it; where all have as many, each
        token saves its share of a step.
        """
        left = [drafter.rounds_left for drafter in drafters]
        most = max(left)
        chances = [math.exp((own - most) / (_SPREAD * most)) for own in left]
        rest = (self._step - self.count * self._row) / sum(chances)
        return [self._row + rest * chance for chance in chances]

    def added(self, rows: int) -> float:
        """Seconds that rows of drafts add to the round."""
        seconds = self._added.get(rows)
        if seconds is None:
            seconds = self._added[rows] = self.costs(self.count + rows) - self._step + self._of_drafts
        return seconds

    @cached_property
    def verify(self) -> CostTable:
        """What rounds cost a request by its rows, where layers draft."""
        verify = with_caution(self.costs.now(self.count), self.count)
        more = self.host.of_layers / self.count
        return [*verify[:2], *(seconds + more for seconds in verify[2:])]

    @cached_property
    def least_row(self) -> float:
        """Least seconds of a row of drafts; tokens that save less cannot pay."""
        return min(self.added(rows) / rows for rows in range(1, MOST_DRAFTED + 1))

    def promising(self, drafters: Sequence[AutoDrafter]) -> dict[AutoDrafter, float]:
        """The requests whose known tokens may pay, with what each token saves.

        There are none where all of them together cannot pay for the host's time.
        """
        found, most = {}, 0.0
        for drafter, value in zip(drafters, self.values(drafters), strict=True):
            likelihood = min(drafter.likelihood, LIKELIEST)
            if likelihood * value >= self.least_row:
                found[drafter] = value
                most += value * likelihood / (1 - likelihood)  # if all are as likely as the first
        return found if most > self._of_drafts else {}


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
    batch = _Batch(len(drafters), drafters[0].verify_costs, host or HostTime())
    layered = _may_draft_layers(drafters, batch)
    known_costs = batch.costs.doubt <= UNKNOWN
    sought = known_costs and (bool(layered) or batch.least_row <= LIKELIEST * max(batch.values(drafters)))
    shared = SharedRound(batch.count, batch.costs, batch.host, sought=sought)
    verify = batch.verify
    if not sought:
        plain_step = plain_draft(verify)
        plain_step = replace(plain_step, follow=lambda _: plain_step)
        return [drafter.plan_nothing(plain_step, shared) for drafter in drafters]
    run = _Run(batch)
    for drafter in drafters:
        drafter.begin(Round(batch.count, 1, verify, verify, run.follow(drafter), shared, batch.share))
    drafts: dict[AutoDrafter, Draft] = {**run.plan(drafters)}
    while layered:
        found = {drafter: draft for drafter in layered if (draft := drafter.or_layers(len(layered))) is not None}
        if len(found) == len(layered):
            drafts |= found
            break
        layered = list(found)  # fewer share the draft's forwards than was assumed: some may choose differently
    return [drafts[drafter] for drafter in drafters]


def _may_draft_layers(drafters: Sequence[AutoDrafter], batch: _Batch) -> list[AutoDrafter]:
    """The requests for which layers may pay."""
    least = {
        layers: math.inf if layers is None else least_acceptance_of_layers(batch.verify, layers.now(batch.count))
        for layers in {drafter.layer_costs for drafter in drafters}
    }
    return [drafter for drafter in drafters if drafter.layers_may_gain(least[drafter.layer_costs])]


class _Run:
    """Plans rounds of known tokens, each for all requests of a batch that go on, once the last one of all is known."""

    def __init__(self, batch: _Batch) -> None:
        self._batch = batch
        self._waiting: list[AutoDrafter] = []
        self._drafts: dict[AutoDrafter, NoDraft | TokenDraft] = {}

    def follow(self, drafter: AutoDrafter) -> Follow:
        """Follows the rounds of one request."""

        def played(own: RunRound) -> Later:
            drafter.learn_of_run(own.token_ids)
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
        lengths, each = _lengths(promising, batch)
        taken = dict(zip(promising, lengths, strict=True))
        return {
            drafter: drafter.take(length := taken.get(drafter, 0), batch.share + length * each, batch.share)
            for drafter in drafters
        }


def _lengths(values: Mapping[AutoDrafter, float], batch: _Batch) -> tuple[list[int], float]:
    """How many known tokens of each request are verified, and the seconds that each token costs it.

    No request takes more than its allowance; what others then pay may have changed. ``values`` are the seconds that a
    token of each request saves.
    """
    survivals = [drafter.offer().survival for drafter in values]
    spare = [drafter.longest(batch.share) - batch.share for drafter in values]
    while True:
        lengths = share_rows(survivals, batch.added, list(values.values()))
        total = sum(lengths)
        each = max(0.0, batch.added(total) / total) if total else 0.0
        fitting = [
            min(length, max(0, int(most / each))) if each else length
            for length, most in zip(lengths, spare, strict=True)
        ]
        if fitting == lengths:
            return lengths, each
        survivals = [own[:length] for own, length in zip(survivals, fitting, strict=True)]
