"""Rounds of several requests: when nothing is looked for, and what they say about costs."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from helpers.auto import after_plain_rounds, give
from helpers.kernels import needs_kernels
from helpers.low_bit_model import random_model
from selfspec import Engine
from selfspec.decoding.draft import LayerDraft, NoDraft, Proposal, RunRound, TokenDraft
from selfspec.decoding.drafter import Feedback, Prefill
from selfspec.methods.auto import together
from selfspec.methods.auto.drafting import AutoDrafter, LayerChoice
from selfspec.methods.auto.known import Experience
from selfspec.methods.auto.layer_drafts import LayerDrafts
from selfspec.methods.auto.planned import PlannedRound
from selfspec.methods.auto.preparation import Assignment, Preparation
from selfspec.methods.auto.together import plan_together
from selfspec.model.kept import KeptSet
from selfspec.planning import acceptance_tables
from selfspec.planning.acceptance_tables import CONFIDENCE, MATCH_LENGTH, PROBABILITY
from selfspec.planning.allowance import HostTime, SharedRound
from selfspec.planning.plans import (
    LEAST_GAIN_TOGETHER,
    MOST_DRAFTED,
    DraftPolicy,
    Known,
    Outlook,
    best_guesses,
    fill_rows,
    least_acceptance,
    least_acceptance_of_layers,
    plain,
    with_caution,
)
from selfspec.planning.sharing import SharedStep
from selfspec.runtimes.costs.live import LiveCosts
from selfspec.runtimes.costs.rows import RowCosts
from selfspec.runtimes.native import NativeForward
from selfspec.runtimes.precision import Precision
from selfspec.sampling.acceptance import EMPTY_TREE, Acceptance, TokenTree
from selfspec.types import PhaseSeconds

nothing: Any = None
LINEAR = RowCosts((1, 32), (1.0, 32.0))
CHEAP = RowCosts((1, 16, 32), (1.0, 1.1, 2.2))
FREE = RowCosts((1, 64), (1.0, 1.001))
ROWS = (1, 2, 4, 8, 16, 32)
MEASURED = st.lists(st.floats(0.1, 1.0), min_size=6, max_size=6).map(lambda taken: RowCosts(ROWS, tuple(sorted(taken))))


@given(
    MEASURED,
    MEASURED,
    st.integers(1, 16),
    st.floats(0.0, 0.999),
    st.integers(1, 32),
    st.sampled_from([1.0, LEAST_GAIN_TOGETHER]),
)
def test_what_is_not_looked_for_could_not_have_paid(
    verifying: RowCosts, drafting: RowCosts, count: int, share: float, copied: int, gain: float
) -> None:
    verify, draft = verifying.table(count), drafting.table(count)
    best = plain(verify).tokens_per_second
    rate = share * min(1.0, least_acceptance(verify))
    known = Known("lookup", [1] * copied, [rate ** (index + 1) for index in range(copied)])
    filled = fill_rows(known, verify, best, float("inf"), 0.0, 1.0)
    assert filled.plan.tokens_per_second <= best * (1 + 1e-9)
    rate = share * min(1.0, least_acceptance_of_layers(verify, draft, gain))
    _, each = best_guesses(draft, [1.0] * min(copied, 7))
    policy = DraftPolicy(Outlook(np.ones(1), np.array([rate])), each, verify, best, MOST_DRAFTED)
    assert policy.plan.tokens_per_second <= best * gain * (1 + 1e-6)


def test_the_more_requests_wait_for_a_draft_the_more_it_must_promise() -> None:
    table = LINEAR.table()
    assert with_caution(table, 1) == table
    for few, many in ((1, 2), (2, 16)):
        assert with_caution(table, many)[:2] == [0.0, table[1]]
        assert least_acceptance(with_caution(table, few)) < least_acceptance(with_caution(table, many))


def test_the_last_request_to_report_moves_the_costs() -> None:
    verify, draft = LiveCosts(LINEAR), LiveCosts(RowCosts((1, 8), (0.5, 4.0)))
    for _ in range(2):  # a slow round is believed when the next one is slow, too
        assert (verify.factor, draft.factor) == (1.0, 1.0)
        shared = SharedRound(SharedStep(3, verify), verify, HostTime())
        shared.note([1], 1, 9, 2 * 6.0 / 3)
        shared.note([3], 1, 9, 2 * 6.0 / 3, 4.0 / 3, (1, 2), draft)
        assert (verify.factor, draft.factor) == (1.0, 1.0)
        shared.note([2], 1, 9, 2 * 6.0 / 3, 4.0 / 3, (1, 3, 1), draft)
    assert verify.factor > 1.0, "six rows took twice as long"
    assert draft.factor == pytest.approx(1.0), "forwards of 2, 5 and 1 rows took what eight rows take"


def feedback_of(tokens: tuple[int, ...], seconds: float) -> Feedback:
    accepted = Acceptance(tuple(range(len(tokens))), tokens)
    shares = PhaseSeconds(verify=seconds)
    nothing: Any = None
    return Feedback(NoDraft(name="plain"), Proposal(nothing, EMPTY_TREE), accepted, nothing, {}, shares)


REPEATED = (1, 2, 3, 4, 1, 2, 3, 4, 1, 2, 3)


def drafters_of(
    costs: RowCosts,
    count: int,
    *,
    layers: bool = False,
    draft: RowCosts = LINEAR,
    prompt_ids: tuple[int, ...] = REPEATED,
) -> list[AutoDrafter]:
    features = (MATCH_LENGTH, PROBABILITY, CONFIDENCE)
    experience = Experience(*(acceptance_tables.AcceptanceRate(feature) for feature in features))
    verify = LiveCosts(costs)
    choice = LayerChoice(Assignment(KeptSet.full(8), Precision.of(4)), LiveCosts(draft, verify)) if layers else None
    prefill: Any = Prefill(prompt_ids, 4, probe=None)  # type: ignore[arg-type]
    return [AutoDrafter(prefill, experience, verify, choice, 0.02) for _ in range(count)]


def shared_round(drafters: list[AutoDrafter]) -> SharedRound:
    costs = drafters[0].verify_costs
    return SharedRound(SharedStep(len(drafters), costs), costs, HostTime())


def parts_of(drafters: list[AutoDrafter], host: HostTime | None = None) -> list[str]:
    return [draft.name for draft in plan_together(drafters, host or after_plain_rounds()) if draft.name is not None]


def test_a_full_batch_is_decoded_plainly_and_a_smaller_one_looks_up_again() -> None:
    """Where each row costs what a token costs; tokens not looked at meanwhile are read before the next plan."""
    for costs, expected in ((LINEAR, "plain"), (CHEAP, "lookup")):
        assert parts_of(drafters_of(costs, 4)) == 4 * [expected]
    steps = RowCosts((1, 4, 32), (1.0, 1.1, 31.0))
    drafters = drafters_of(steps, 16)
    for tokens in ((1,), (2, 3, 4), (1,)):
        assert parts_of(drafters) == 16 * ["plain"]
        for drafter in drafters:
            drafter.learn(feedback_of(tokens, len(tokens) * steps(16) / 16))
    assert drafters[0].verify_costs.factor == pytest.approx(1.0), "each step took what it was expected to take"
    assert all(drafter._known._unread for drafter in drafters)
    assert parts_of(drafters[:1]) == ["lookup"]
    assert drafters[0]._known.lookup.match_length == 13
    assert drafters[0]._known.lookup._text._own.tokens[-5:] == [1, 2, 3, 4, 1]


def test_what_is_forgotten_while_nothing_is_sought_is_forgotten_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    shares, fade = list[float](), LayerDrafts.fade
    monkeypatch.setattr(LayerDrafts, "fade", lambda self, share: (shares.append(share), fade(self, share)))
    drafters = drafters_of(LINEAR, 2, layers=True)
    drafters[0]._layers.note([0.9, 0.9], 1)
    before = list(drafters[0]._layers._confident._trials)
    for _ in range(3):
        assert parts_of(drafters) == 2 * ["plain"]
        for drafter in drafters:
            drafter._round = PlannedRound(2, 1, (), (), None, shared_round(drafters))
            drafter.learn(feedback_of((7, 8), 1.0))
    assert not shares
    drafters[0].plan()
    assert shares == pytest.approx([1 - 0.98**6])
    assert drafters[0]._layers._confident._trials == pytest.approx([0.98**6 * each for each in before])


@needs_kernels
def test_a_batch_in_which_no_draft_can_pay_runs_several_steps_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    model, prompts = random_model(), [[1, 2, 3], [4, 5], [6, 7, 8, 9]]
    wanted = Engine(model, method="autoregressive").generate(prompts, max_new_tokens=30, ignore_eos=True)
    runs: list[int] = []
    chain = NativeForward.chain

    def counted(self: NativeForward, requests: Any, *others: Any) -> Any:
        runs.append(len(requests))
        return chain(self, requests, *others)

    monkeypatch.setattr(NativeForward, "chain", counted)
    monkeypatch.setattr(together, "LIKELIEST", -1.0)
    give(monkeypatch, Preparation(FREE, None))
    results = Engine(model, method="auto", settings={"trial_seconds": 0.0, "memory_limit": 0.0}).generate(
        prompts, max_new_tokens=30, ignore_eos=True
    )
    assert [each.token_ids for each in results] == [each.token_ids for each in wanted]
    assert len(runs) < 29
    assert all(count > 1 for count in runs)
    for result in results:
        assert [round.drafted_by for round in result.rounds] == ["plain"] * 29
        assert all(round.forecast is not None for round in result.rounds)


def test_a_batch_in_which_no_draft_can_pay_does_not_read_its_prompts() -> None:
    drafters = drafters_of(LINEAR, 4)
    for _ in range(3):
        assert parts_of(drafters) == 4 * ["plain"]
        for drafter in drafters:
            drafter.learn(feedback_of((1,), 4.0))
    assert all(drafter._known.prompt_is_unread for drafter in drafters)


def test_reading_the_prompts_of_a_batch_counts_as_lost_once_and_not_among_what_rounds_take() -> None:
    now, host, drafters = [0.0], after_plain_rounds(), drafters_of(CHEAP, 2)
    for drafter in drafters:
        drafter._clock = lambda: now[0]
        read = drafter._known.read_prompt

        def timed(most: int, read: Any = read) -> None:
            now[0] += 0.3
            read(most)

        drafter._known.read_prompt = timed  # type: ignore[method-assign]
    left = host.allowance._left[2]
    assert parts_of(drafters, host) == 2 * ["lookup"]
    for drafter in drafters:
        seconds = PhaseSeconds(verify=CHEAP(10) / 2, select=0.3)
        assert drafter._round is not None
        tokens = (1,)
        accepted = Acceptance((0,), tokens)
        proposal = Proposal(np.array([9] * 4), TokenTree.chain(4))
        drafter.learn(Feedback(NoDraft(name="lookup"), proposal, accepted, nothing, {}, seconds))
    assert left - host.allowance._left[2] > 0.6 / CHEAP(2)
    assert host._known[2].mean == pytest.approx(0.0)


def test_layer_drafts_are_looked_for_where_their_forwards_can_pay() -> None:
    drafters = drafters_of(RowCosts((1, 32), (1.0, 1.3)), 2, layers=True)
    costs = drafters[0].layer_costs
    assert costs is not None
    verify = drafters[0].verify_costs.now(2)
    assert drafters[0].layers_may_gain(0.6)
    assert not drafters[0].layers_may_gain(least_acceptance_of_layers(verify, costs.now(2)))
    drafters[0].begin(PlannedRound(2, 1, verify, verify, None, shared_round(drafters)))
    drafters[0].offer()
    drafters[0].take(0, verify[1], verify[1])
    assert drafters[0].or_layers(2) is None, "each forward of this draft takes as long as a step"
    assert not drafters[0].layers_may_gain(0.6), "for some tokens"
    drafters[0].learn_of_run(RunRound(NoDraft(), (), (7,) * 16))
    assert drafters[0].layers_may_gain(0.6)


@pytest.mark.parametrize("count", [2, 5])
def test_layers_draft_in_a_batch_where_they_promise_a_tenth_more(count: int) -> None:
    verify, gains = RowCosts((1, 32), (1.0, 1.3)), dict[bool, list[float]]({True: [], False: []})
    for percent in range(5, 100, 2):
        draft = RowCosts((1, 32), (percent / 100, percent / 80))
        drafters = drafters_of(verify, count, layers=True, draft=draft, prompt_ids=(1, 2, 3))
        drafts = plan_together(drafters, after_plain_rounds())
        for drafter, own in zip(drafters, drafts, strict=True):
            assert drafter._round is not None
            if (policy := drafter._round.fastest) is not None:
                gain = policy.plan.tokens_per_second * drafter._round.verify[1]
                gains[isinstance(own, LayerDraft)].append(gain)
    assert min(gains[True]) >= LEAST_GAIN_TOGETHER
    assert 1.0 < max(gains[False]) < LEAST_GAIN_TOGETHER, "what would have paid alone"


def test_requests_of_a_batch_have_one_policy_whatever_they_have_seen() -> None:
    """Their forwards are shared, so that who stops early saves little; policies are found once for all."""
    draft = RowCosts((1, 32), (0.1, 0.2))
    drafters = drafters_of(RowCosts((1, 32), (1.0, 1.3)), 3, layers=True, draft=draft, prompt_ids=(1, 2, 3))
    confident, shared = drafters[0]._layers._confident, drafters[0]._layers._shared
    before = shared.outlook()
    for _ in range(300):
        confident._count(5, False)
    assert not confident.outlook().near(before, 0.25)
    drafts = plan_together(drafters, after_plain_rounds())
    assert all(isinstance(draft, LayerDraft) for draft in drafts)
    policies = [drafter._round.fastest for drafter in drafters if drafter._round is not None]
    assert policies[0] is policies[1] is policies[2] is not None


def test_rounds_of_a_run_are_planned_when_the_last_one_of_all_is_known() -> None:
    """A request whose text begins to repeat gets rows in the next forward, in whichever order requests are asked."""
    drafters = drafters_of(CHEAP, 2)
    drafters[0]._room, drafters[1]._room = 100, 300
    for drafter in drafters:
        drafter._catch_up()
        for token in range(100, 130):
            drafter._known.lookup.extend([token])
    drafts = plan_together(drafters, after_plain_rounds())
    assert [draft.name for draft in drafts] == ["plain", "plain"]
    laters = []
    for draft, tokens in zip(drafts, ((200,), (100, 101, 102, 103)), strict=True):
        assert isinstance(draft, NoDraft)
        assert draft.follow is not None
        laters.append(draft.follow(RunRound(draft, (), tokens)))
    planned = [later() for later in laters if callable(later)]
    assert isinstance(planned[0], NoDraft)
    assert isinstance(planned[1], TokenDraft)
    assert planned[1].token_ids[:3] == (104, 105, 106)
    (alone,) = [later() for later in [planned[1].follow(RunRound(planned[1], (), (104,)))] if callable(later)]
    assert isinstance(alone, TokenDraft), "the other one has ended"


@needs_kernels
def test_a_batch_verifies_known_tokens_in_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    model = random_model()
    prompts = [[1, 2, 3, 4] * 8, [5, 6, 7] * 9, [8, 9] * 12, [11, 3, 9, 20]]
    wanted = Engine(model, method="autoregressive").generate(prompts, max_new_tokens=60, ignore_eos=True)
    give(monkeypatch, Preparation(FREE, None))
    monkeypatch.setattr(LiveCosts, "doubt", 0.0)
    results = Engine(model, method="auto", settings={"memory_limit": 0.0}).generate(
        prompts, max_new_tokens=60, ignore_eos=True
    )
    assert [each.token_ids for each in results] == [each.token_ids for each in wanted]
    assert sum(result.drafted for result in results) > 0
    assert sum(result.accepted for result in results) > 0
    assert all(
        round.verification is not None and round.verification.native for each in results for round in each.rounds
    )


def test_time_that_drafts_take_beside_forwards_is_paid_by_what_they_save() -> None:
    host = after_plain_rounds()
    for _ in range(20):
        host.note(4, 0.1, sought=False, drafted=False)
        host.note(4, 0.12, drafted=True)
    assert host.of_drafts(4) == pytest.approx(0.02)
    assert parts_of(drafters_of(CHEAP, 4), host) == 4 * ["lookup"]
    for _ in range(60):
        host.note(4, 9.0, drafted=False)  # of neither kind
        host.note(4, 20.0, drafted=True)
    assert host.of_drafts(4) > 10
    drafts = plan_together(drafters_of(CHEAP, 4), host)
    assert [draft.name for draft in drafts] == 4 * ["plain"]
    assert all(isinstance(draft, NoDraft) and draft.follow is not None for draft in drafts), "steps follow each other"


def test_a_token_of_the_request_that_ends_last_saves_most() -> None:
    """A token saves its row of a step, and the rest of it only where its request is the last one."""
    drafters = drafters_of(CHEAP, 4)
    batch = together._Batch(4, drafters[0].verify_costs, HostTime())
    for drafter in drafters:
        drafter._room = 100
    assert batch.values_of(drafters) == pytest.approx([CHEAP(4) / 4] * 4)
    for drafter in drafters[1:]:
        drafter._room = 10
    last, *others = batch.values_of(drafters)
    row = CHEAP(4) - CHEAP(3)
    assert last == pytest.approx(CHEAP(4) - 3 * row, rel=0.1)
    assert all(row < other < CHEAP(4) / 4 for other in others)


def test_a_request_without_known_tokens_waits_for_one_that_has_many() -> None:
    drafters = drafters_of(CHEAP, 2)
    drafters[1]._catch_up()
    for token in range(100, 130):
        drafters[1]._known.lookup.extend([token])
    drafts = plan_together(drafters, after_plain_rounds())
    assert [draft.name for draft in drafts] == ["lookup", "plain"]
    assert isinstance(drafts[0], TokenDraft)
    assert len(drafts[0].token_ids) > 3
