"""``auto`` itself: what it measures of a model, what it drafts, what it learns and keeps."""

import copy
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from helpers import auto
from helpers.low_bit_model import SUBLAYERS, random_model
from helpers.models import prompt
from selfspec import Engine, SamplingParams
from selfspec.cli import terminal
from selfspec.decoding import round as one_round
from selfspec.decoding.draft import LayerDraft, Proposal
from selfspec.errors import InvalidSettingError, NoLowBitWeightsWarning, StateError
from selfspec.methods.auto import preparation
from selfspec.methods.auto.drafting import AutoDrafter
from selfspec.methods.auto.method import Auto
from selfspec.methods.auto.preparation import (
    Assignment,
    AutoSettings,
    Preparation,
    TriedAssignment,
    best_trial,
    candidates,
    try_assignments,
    write_text,
)
from selfspec.methods.state import LearnedState
from selfspec.model.kept import KeptSet
from selfspec.planning.acceptance_tables import CONFIDENCE, LOW_BIT_CONFIDENCE, Feature
from selfspec.planning.allowance import RoundOverhead
from selfspec.runtimes.costs.rows import RowCosts
from selfspec.runtimes.costs.store import kept_file
from selfspec.runtimes.precision import Precision
from selfspec.runtimes.target import Target
from selfspec.sampling.acceptance import TokenTree
from selfspec.types import Phase, PhaseClock

MODEL = random_model()
FULL = KeptSet.full(SUBLAYERS)
FREE_ROWS = RowCosts((1, 64), (1.0, 1.001))
DEAR_ROWS = RowCosts((1, 64), (1.0, 64.0))
CHEAP = RowCosts((1, 64), (0.001, 0.002))


def give(monkeypatch: pytest.MonkeyPatch, verify: RowCosts, agreement: float = 0.9, draft: RowCosts = CHEAP) -> None:
    """Gives ``auto`` costs and a draft of 8 bits, instead of what it would find out."""
    trial = TriedAssignment(Assignment(FULL, Precision.of(8)), agreement, draft, ())
    auto.give(monkeypatch, Preparation(verify, trial))


@pytest.fixture
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache folder of its own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path


@pytest.mark.parametrize("sampling", [{}, {"temperature": 0.9, "seed": 5}], ids=["greedy", "seed"])
def test_the_text_is_the_models_own_alone_and_in_a_batch(
    monkeypatch: pytest.MonkeyPatch, sampling: dict[str, Any]
) -> None:
    give(monkeypatch, FREE_ROWS)
    params = SamplingParams(max_new_tokens=48, ignore_eos=True, **sampling)
    prompts = [prompt(length, length) for length in (1, 30, 9, 17)]
    expected = [Engine(MODEL, method="autoregressive").generate(each, params).token_ids for each in prompts]
    engine = Engine(MODEL, method="auto", max_batch=3)
    results = engine.generate(prompts, params)
    assert [result.token_ids for result in results] == expected
    assert [engine.generate(each, params).token_ids for each in prompts] == expected
    rounds = [record for result in results for record in result.rounds]
    assert sum(record.accepted for record in rounds if record.kept) > 0
    assert sum(result.drafted for result in results) > 0


def drafts_of(engine: Engine, prompt_ids: list[int], **params: Any) -> list[str]:
    """What each round of an output was drafted by."""
    rounds = engine.generate(prompt_ids, max_new_tokens=60, ignore_eos=True, **params).rounds
    return [str(record.drafted_by) for record in rounds]


def test_it_looks_up_where_the_text_repeats_and_lets_layers_draft_where_not(monkeypatch: pytest.MonkeyPatch) -> None:
    give(monkeypatch, FREE_ROWS, agreement=0.5, draft=RowCosts((1, 64), (0.4, 0.8)))
    kinds = drafts_of(Engine(MODEL, method="auto"), prompt(20) * 2)
    assert {"lookup", "8 bits"} <= set(kinds)


def test_every_layer_draft_teaches_what_its_forwards_cost(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of one token, too, in whose only forward there is no room for guesses."""
    give(monkeypatch, FREE_ROWS, agreement=0.5, draft=RowCosts((1, 64), (0.4, 0.8)))
    engine = Engine(MODEL, method="auto")
    costs, noted = engine.method._ready.layers["greedy"].costs, list[Sequence[int]]()
    monkeypatch.setattr(costs, "note", lambda forwards, _: noted.append(forwards))
    rounds = engine.generate(prompt(20) * 2, max_new_tokens=57, ignore_eos=True).rounds
    drafted = [record.drafted for record in rounds if record.kept is not None]
    if drafted[-1] == 0:  # the answer had room for one token
        drafted.pop()
    assert min(drafted) == 1
    assert len(noted) == len(drafted)


class SlowHost(PhaseClock):
    """A clock on which the host takes long for each draft, beside its forwards."""

    SECONDS = 5.0

    def switch(self, phase: Phase) -> None:
        if self._phase == "draft" != phase:
            self._seconds["draft"] += self.SECONDS
        super().switch(phase)


def test_what_the_host_takes_for_a_draft_makes_no_forward_dear(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(one_round, "PhaseClock", SlowHost)
    give(monkeypatch, FREE_ROWS, agreement=0.5, draft=RowCosts((1, 64), (0.4, 0.8)))
    engine = Engine(MODEL, method="auto")
    costs, forwards, outside = engine.method._ready.layers["greedy"].costs, list[float](), list[float]()
    monkeypatch.setattr(costs, "note", lambda _, seconds: forwards.append(seconds))
    monkeypatch.setattr(RoundOverhead, "note", lambda _, rows, seconds: outside.append(seconds))
    engine.generate(prompt(20) * 2, max_new_tokens=60, ignore_eos=True)
    assert forwards
    assert max(forwards) < 0.2 * SlowHost.SECONDS
    assert sum(seconds >= SlowHost.SECONDS for seconds in outside) >= len(forwards)


@pytest.mark.parametrize(
    ("precision", "kept", "feature"),
    [
        (Precision.of(4), FULL, LOW_BIT_CONFIDENCE),
        (None, KeptSet.early_exit(2, SUBLAYERS), CONFIDENCE),
        (Precision.of(4), KeptSet.early_exit(2, SUBLAYERS), CONFIDENCE),
    ],
)
def test_drafts_of_all_layers_at_few_bits_are_trusted_more(
    monkeypatch: pytest.MonkeyPatch, precision: Precision | None, kept: KeptSet, feature: Feature
) -> None:
    costs = RowCosts((1, 64), (1.0, 2.0))
    trial = TriedAssignment(Assignment(kept, precision), 0.9, costs)
    auto.give(monkeypatch, lambda *_: Preparation(costs, trial))
    method = Engine(MODEL, method="auto").method
    assert {each.confident.feature for each in method._ready.experience.values()} == {feature}
    assert LOW_BIT_CONFIDENCE.mean > CONFIDENCE.mean


def test_low_bit_weights_that_were_prepared_are_used_at_once_however_long_they_took(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("selfspec.methods.auto.layer_drafts._WEIGHTS_A_SECOND", 1e-6)
    give(monkeypatch, FREE_ROWS, agreement=0.9, draft=RowCosts((1, 64), (0.2, 0.4)))
    engine = Engine(MODEL, method="auto")
    assert "8 bits" not in drafts_of(engine, prompt(20))
    engine.method.prepare()
    assert "8 bits" in drafts_of(engine, prompt(20))


@pytest.mark.parametrize(("row", "made"), [(0.0, True), (0.5, False)], ids=["pay later", "never pay"])
def test_weights_are_made_for_what_long_drafts_promise(monkeypatch: pytest.MonkeyPatch, row: float, made: bool) -> None:
    """The first draft of a request can be one token, which loses here; longer ones pay, or do not."""
    monkeypatch.setattr("selfspec.methods.auto.layer_drafts._NO_TIME", 0.0)
    verify = RowCosts((1, 2, 64), (1.0, 1.5, 1.5 + 62 * row))
    give(monkeypatch, verify, draft=RowCosts((1, 64), (0.45, 0.5)))
    engine = Engine(MODEL, method="auto")
    kinds = drafts_of(engine, prompt(20))
    layers = engine.method._ready.layers["greedy"]
    assert layers.weights.ready == made
    assert kinds[0] == "plain"


@pytest.mark.parametrize("seconds", [0.0, 1e9], ids=["long to make", "made at once"])
def test_weights_that_are_quickly_made_are_made_at_load_if_they_promise_to_pay(
    monkeypatch: pytest.MonkeyPatch, seconds: float
) -> None:
    monkeypatch.setattr("selfspec.methods.auto.layer_drafts._NO_TIME", seconds)
    for draft, promises in ((RowCosts((1, 64), (0.45, 0.5)), True), (RowCosts((1, 64), (1.2, 1.3)), False)):
        give(monkeypatch, FREE_ROWS, draft=draft)
        weights = Engine(MODEL, method="auto").method._ready.layers["greedy"].weights
        assert weights.ready == (promises and seconds > 0)


def test_weights_are_made_for_as_many_tokens_as_answers_have(monkeypatch: pytest.MonkeyPatch) -> None:
    """Answers were short: what one of them may save does not pay for weights, however long the next one may be."""
    monkeypatch.setattr("selfspec.methods.auto.layer_drafts._NO_TIME", 0.0)
    give(monkeypatch, FREE_ROWS, draft=RowCosts((1, 64), (0.2, 0.3)))
    engine, asked = Engine(MODEL, method="auto"), list[int]()
    weights = engine.method._ready.layers["greedy"].weights
    monkeypatch.setattr(weights, "make_if_it_pays", lambda saving, tokens: asked.append(tokens) or False)
    for _ in range(30):
        engine.generate(prompt(20), max_new_tokens=9, ignore_eos=True)
    assert max(asked) == 8
    asked.clear()
    engine.generate(prompt(20), max_new_tokens=200, ignore_eos=True)
    assert 8 <= max(asked) < 30


DIPS = RowCosts((1, 2, 3, 4, 64), (1.0, 0.7, 2.2, 1.9, 64.0))


@pytest.mark.parametrize("sampling", [{}, {"temperature": 0.9, "seed": 5}], ids=["greedy", "seed"])
@pytest.mark.parametrize("draft", [CHEAP, DEAR_ROWS], ids=["layers", "plain"])
def test_rows_that_fill_a_forward_up_change_no_text(
    monkeypatch: pytest.MonkeyPatch, sampling: dict[str, Any], draft: RowCosts
) -> None:
    give(monkeypatch, DIPS, draft=draft)
    params = SamplingParams(max_new_tokens=40, ignore_eos=True, **sampling)
    expected = Engine(MODEL, method="autoregressive").generate(prompt(20), params)
    result = Engine(MODEL, method="auto").generate(prompt(20), params)
    assert result.token_ids == expected.token_ids
    rows = [1 + record.drafted + record.probes for record in result.rounds]
    assert set(rows[:-2]) <= {2, 4, *range(5, 65)}, "one row takes longer than two, and three longer than four"
    assert 2 in rows or draft is CHEAP


def test_it_decodes_plainly_where_drafts_cost_more_than_they_bring(monkeypatch: pytest.MonkeyPatch) -> None:
    give(monkeypatch, DEAR_ROWS, draft=DEAR_ROWS)
    assert set(drafts_of(Engine(MODEL, method="auto"), prompt(20))) == {"plain"}


def test_what_is_never_accepted_is_hardly_drafted(monkeypatch: pytest.MonkeyPatch) -> None:
    give(monkeypatch, RowCosts((1, 2, 64), (1.0, 1.1, 8.0)), agreement=0.9, draft=RowCosts((1, 64), (0.3, 2.0)))
    wrong = Proposal(torch.tensor([0]), TokenTree.chain(1), confidences=(0.9,))
    monkeypatch.setattr(one_round._Drafting, "proposal", lambda *_: wrong)
    engine = Engine(MODEL, method="auto")
    result = engine.generate(prompt(20), max_new_tokens=200, ignore_eos=True, temperature=5.0, seed=1)
    assert (
        result.token_ids
        == Engine(MODEL, method="autoregressive")
        .generate(prompt(20), max_new_tokens=200, ignore_eos=True, temperature=5.0, seed=1)
        .token_ids
    )
    assert 0 < sum(record.kept is not None for record in result.rounds) < 0.3 * result.round_count


def test_it_drafts_less_where_many_sequences_make_rows_dear(monkeypatch: pytest.MonkeyPatch) -> None:
    verify = RowCosts((1, 2, 4, 8, 16, 32, 64), (1.0, 1.05, 1.1, 1.3, 2.5, 5.0, 10.0))
    give(monkeypatch, verify, agreement=0.8, draft=RowCosts((1, 8, 64), (0.3, 0.5, 3.5)))
    alone = Engine(MODEL, method="auto").generate(prompt(20), max_new_tokens=40, ignore_eos=True)
    engine = Engine(MODEL, method="auto", max_batch=16)
    many = engine.generate([prompt(20, seed) for seed in range(16)], max_new_tokens=40, ignore_eos=True)
    assert alone.drafted / alone.round_count > 1.5 * many[0].drafted / many[0].round_count


def test_candidates_are_low_bits_and_parts_of_the_model() -> None:
    found = list(candidates(Target(MODEL), group=64))
    assert len(found) == len(set(found))
    assert any(each.precision is not None and each.kept == FULL for each in found)
    assert any(each.precision is None and each.kept.skipped for each in found)
    assert all(each.kept.skipped or each.precision is not None for each in found), "the target itself is no draft"
    assert all(each.precision is None or each.precision.group == 64 for each in found)
    assert len({each.name for each in found}) == len(found)


def test_the_own_text_is_always_the_same_and_its_choices_are_the_targets() -> None:
    target = Target(MODEL)
    text, again = write_text(target, 24), write_text(target, 24)
    assert text.token_ids.tolist() == again.token_ids.tolist()
    written = text.token_ids.tolist()
    engine = Engine(MODEL, method="autoregressive")
    for length in (1, 7, 24):
        assert engine.generate(written[:length], max_new_tokens=1).token_ids[0] == text.choices[length - 1]


def test_trials_prefer_what_promises_most() -> None:
    target = Target(MODEL)
    tried = [Assignment(FULL, Precision.of(bits)) for bits in (4, 8)]
    trials = try_assignments(target, tried, write_text(target, 64), FREE_ROWS, most_seconds=60.0)
    assert [trial.tokens_per_second for trial in trials] == sorted((t.tokens_per_second for t in trials), reverse=True)
    agreement = {
        trial.assignment.precision.attention: trial.agreement for trial in trials if trial.assignment.precision
    }
    assert agreement[8] > 0.85
    assert agreement[8] >= agreement[4]
    for trial in trials:
        assert trial.agreement == pytest.approx(sum(agrees for _, agrees in trial.confidences) / len(trial.confidences))


def test_of_equal_promises_the_draft_that_agrees_more_is_taken() -> None:
    def trial(promise: float, agreement: float) -> TriedAssignment:
        return TriedAssignment(Assignment(FULL, Precision.of(4)), agreement, CHEAP, tokens_per_second=promise)

    faster, surer, slower = trial(100.0, 0.7), trial(98.0, 0.9), trial(90.0, 1.0)
    assert best_trial([faster, surer, slower]) is surer
    assert best_trial([faster, slower]) is faster
    assert best_trial([]) is None


def test_close_trials_are_timed_again_in_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    target, measured = Target(MODEL), []

    def together(_: Target, which: list[Any], **options: Any) -> list[RowCosts]:
        measured.append([precision.attention for _, precision in which])
        return [RowCosts((1,), (0.25 + 0.05 * place,)) for place in range(len(which))]

    monkeypatch.setattr(preparation, "measure_together", together)
    monkeypatch.setattr(preparation, "measure_row_costs", lambda *_, **__: CHEAP)
    tried, text = [Assignment(FULL, Precision.of(bits)) for bits in (8, 6)], write_text(target, 64)
    monkeypatch.setattr(preparation, "_agreement", lambda *_: ((0.9, True),) * 9 + ((0.9, False),))
    first, second = try_assignments(target, tried, text, FREE_ROWS, most_seconds=60.0)
    assert measured == [[8, 6]]
    assert (first.costs.seconds, second.costs.seconds) == ((0.25,), (0.3,))
    assert first.tokens_per_second > second.tokens_per_second


def test_no_trial_begins_after_its_time() -> None:
    target, clock = Target(MODEL), iter(range(0, 1000, 10))
    trials = try_assignments(
        target,
        [Assignment(FULL, Precision.of(bits)) for bits in (4, 6, 8)],
        write_text(target, 24),
        FREE_ROWS,
        most_seconds=15.0,
        clock=lambda: next(clock),
    )
    assert len(trials) == 2


def test_layers_of_the_own_weights_are_tried_though_low_bit_weights_take_long_to_make(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    target, now, tried = Target(MODEL), [0.0], list[Assignment]()

    def took(_: Target, assignment: Assignment, *__: object) -> TriedAssignment:
        now[0] += 0.5 if assignment.precision is None else 6.0
        tried.append(assignment)
        return TriedAssignment(assignment, 0.9, CHEAP)

    monkeypatch.setattr(preparation, "_try", took)
    monkeypatch.setattr(preparation, "_timed_again", lambda _, close, __: list(close))
    text = write_text(target, 4)
    try_assignments(target, candidates(target, group=32), text, FREE_ROWS, most_seconds=10.0, clock=lambda: now[0])
    assert {each.precision is None for each in tried} == {True, False}


def test_what_was_found_out_is_kept_and_read_again(kept: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real_preparation(monkeypatch, kept)
    set_verify_costs(monkeypatch, FREE_ROWS)
    first = preparation.prepare(Target(MODEL), AutoSettings())
    assert [*kept.rglob("auto/*.json")]
    monkeypatch.setattr(preparation, "_find_out", None)
    assert preparation.prepare(Target(MODEL), AutoSettings()) == first


@pytest.mark.parametrize("costs", [FREE_ROWS, RowCosts((1, 2, 4), (0.204, 0.041, 0.05))])
def test_costs_that_were_disturbed_are_not_kept(kept: Path, monkeypatch: pytest.MonkeyPatch, costs: RowCosts) -> None:
    real_preparation(monkeypatch, kept)
    set_verify_costs(monkeypatch, costs)
    assert preparation.prepare(Target(MODEL), AutoSettings()).verify == costs
    assert bool([*kept.rglob("auto/*.json")]) is (costs is FREE_ROWS)


def test_what_was_kept_of_a_busy_machine_gives_way_to_estimates(kept: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real_preparation(monkeypatch, kept)
    busy = RowCosts((1, 2, 4), (9.0, 80.0, 90.0))  # seconds of a forward that takes milliseconds
    set_verify_costs(monkeypatch, busy)
    monkeypatch.setattr(preparation, "best_trial", lambda _: None)
    assert preparation.prepare(Target(MODEL), AutoSettings()).layers is None
    engine = Engine(MODEL, method="auto")
    assert isinstance(engine.method, Auto)
    outputs = [engine.generate(prompt(20), max_new_tokens=48, ignore_eos=True) for _ in range(3)]
    assert engine.method._ready.preparation == preparation._estimate(engine.target, AutoSettings())
    assert engine.method._ready.preparation.layers is not None
    assert not [*kept.rglob("auto/*.json")], "the next process measures again"
    plain = Engine(MODEL, method="autoregressive").generate(prompt(20), max_new_tokens=48, ignore_eos=True)
    assert [output.token_ids for output in outputs] == 3 * [plain.token_ids]


def test_low_bit_weights_that_are_made_stay_where_costs_are_estimated_again(
    kept: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real_preparation(monkeypatch, kept)
    monkeypatch.setattr("selfspec.methods.auto.layer_drafts._NO_TIME", 0.0)  # else those of the estimate are made
    busy = RowCosts((1, 2, 4), (9.0, 80.0, 90.0))
    trial = TriedAssignment(Assignment(FULL, Precision.of(8)), 0.9, RowCosts((1, 2), (2.0, 3.0)), ())
    monkeypatch.setattr(preparation, "_find_out", lambda *_: Preparation(busy, trial))
    engine = Engine(MODEL, method="auto")
    assert isinstance(engine.method, Auto)
    engine.warmup()
    outputs = [engine.generate(prompt(20), max_new_tokens=48, ignore_eos=True) for _ in range(3)]
    ready = engine.method._ready
    assert not ready.preparation.measured, "steps took much less time than was measured"
    assert ready.trial is not None
    assert ready.trial.assignment == trial.assignment
    assert 0 < ready.trial.costs(1) < ready.preparation.verify(1) < 1.0
    assert ready.made == ready.trial
    assert {form.bits for _, form in engine.target._low_bit._made} == {8}
    plain = Engine(MODEL, method="autoregressive").generate(prompt(20), max_new_tokens=48, ignore_eos=True)
    assert [output.token_ids for output in outputs] == 3 * [plain.token_ids]


def test_what_was_kept_stays_where_steps_take_as_long(kept: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real_preparation(monkeypatch, kept)
    quick = RowCosts((1, 2, 4), (1e-6, 1e-6, 1e-6))
    set_verify_costs(monkeypatch, quick)
    engine = Engine(MODEL, method="auto")
    engine.warmup()
    for _ in range(3):
        engine.generate(prompt(20), max_new_tokens=48, ignore_eos=True)
    assert isinstance(engine.method, Auto)
    assert engine.method._ready.preparation.verify == quick
    assert [*kept.rglob("auto/*.json")]


@pytest.mark.parametrize("damage", [{}, {"terms": {}}, {"verify": None}, {"verify": {"rows": [2], "seconds": [1]}}])
def test_a_damaged_file_is_found_out_again(kept: Path, monkeypatch: pytest.MonkeyPatch, damage: dict[str, Any]) -> None:
    real_preparation(monkeypatch, kept)
    set_verify_costs(monkeypatch, FREE_ROWS)
    target = Target(MODEL)
    preparation.prepare(target, AutoSettings())
    file = kept_file(target, "auto")
    content = file.read()
    assert content is not None
    file.write({**content, **damage} if damage else {})
    found = []
    monkeypatch.setattr(preparation, "_find_out", lambda *arguments: found.append(1) or Preparation(FREE_ROWS, None))
    assert preparation.prepare(target, AutoSettings()).verify == FREE_ROWS
    assert found


def set_verify_costs(monkeypatch: pytest.MonkeyPatch, costs: RowCosts) -> None:
    """Verifications are measured to take this; trials measure their drafts."""
    measure = preparation.measure_row_costs

    def measured(*arguments: Any, **options: Any) -> RowCosts:
        return measure(*arguments, **options) if "row_counts" in options else costs

    monkeypatch.setattr(preparation, "measure_row_costs", measured)


def real_preparation(monkeypatch: pytest.MonkeyPatch, kept: Path) -> None:
    """Undoes what the suite gives instead, and keeps what is found out in a folder of its own."""
    monkeypatch.undo()
    monkeypatch.setenv("XDG_CACHE_HOME", str(kept))


def test_without_memory_for_low_bit_weights_it_goes_on_without_them_and_says_so_once(
    kept: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real_preparation(monkeypatch, kept)
    engine = Engine(MODEL, method="auto", settings={"memory_limit": 1e-6})
    with pytest.warns(
        NoLowBitWeightsWarning, match=r"without low-bit weights: .* more than memory_limit allows"
    ) as caught:
        results = [engine.generate(prompt(20), max_new_tokens=12) for _ in range(2)]
    assert len(caught) == 1
    plain = Engine(MODEL, method="autoregressive").generate(prompt(20), max_new_tokens=12)
    assert [result.token_ids for result in results] == 2 * [plain.token_ids]
    assert not engine.target._low_bit._made
    with pytest.warns(NoLowBitWeightsWarning):  # another process reads what was kept, and says it too
        Engine(MODEL, method="auto", settings={"memory_limit": 1e-6}).method.prepare()


def test_the_terminal_says_it_too(
    kept: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    real_preparation(monkeypatch, kept)
    terminal.prepare_method(Engine(MODEL, method="auto", settings={"memory_limit": 1e-6}))
    assert capsys.readouterr().err.count("warning: auto drafts without low-bit weights") == 1


def test_who_wants_no_low_bit_weights_is_not_warned(kept: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real_preparation(monkeypatch, kept)
    engine = Engine(MODEL, method="auto", settings={"memory_limit": 0.0})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        engine.method.prepare()
    assert not engine.target._low_bit._made


def test_low_bit_weights_for_which_there_is_no_memory_any_more_are_left_out(
    kept: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real_preparation(monkeypatch, kept)
    target = Target(MODEL)
    found = Preparation(FREE_ROWS, TriedAssignment(Assignment(FULL, Precision.of(8)), 0.9, CHEAP, ()))
    monkeypatch.setattr(preparation, "_find_out", lambda *_: found)
    assert preparation.prepare(target, AutoSettings()).layers is not None
    target.release_low_bit()
    monkeypatch.setattr("selfspec.memory.available_bytes", lambda: 10)
    with pytest.warns(NoLowBitWeightsWarning, match="memory that is available"):
        prepared = preparation.prepare(target, AutoSettings())
    assert prepared.layers is None
    assert prepared.lacking_bytes == target.low_bit_bytes(Precision.of(8))


def test_only_the_low_bit_weights_that_draft_stay_in_memory() -> None:
    target = Target(MODEL)
    target.at(Precision.of(8))
    target.at(Precision.of(4))
    target.release_low_bit(Precision.of(4))
    assert {form.bits for _, form in target._low_bit._made} == {4}
    target.release_low_bit()
    assert not target._low_bit._made


def test_what_it_learned_is_saved_and_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    give(monkeypatch, FREE_ROWS)
    engine = Engine(MODEL, method="auto")
    fresh = engine.method.state().values
    engine.generate(prompt(20), max_new_tokens=60, ignore_eos=True)
    assert engine.method.state().values != fresh
    engine.save_state(tmp_path / "state")
    other = Engine(MODEL, method="auto")
    other.load_state(tmp_path / "state")
    assert other.method.state().values == engine.method.state().values


def test_a_machine_with_another_layer_draft_takes_the_acceptance_of_lookup_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    give(monkeypatch, FREE_ROWS)
    engine = Engine(MODEL, method="auto")
    engine.generate(prompt(20), max_new_tokens=60, ignore_eos=True)
    engine.save_state(tmp_path / "state")
    learned = engine.method.state().values
    trial = TriedAssignment(Assignment(FULL, Precision.of(4)), 0.5, CHEAP, ())
    auto.give(monkeypatch, Preparation(FREE_ROWS, trial))
    other = Engine(MODEL, method="auto")
    fresh = other.method.state().values
    other.load_state(tmp_path / "state")
    loaded = other.method.state().values
    assert loaded["greedy"]["lookup"] == learned["greedy"]["lookup"] != fresh["greedy"]["lookup"]
    assert learned["greedy"]["confident"] != loaded["greedy"]["confident"] == fresh["greedy"]["confident"]


def test_states_of_other_models_dtypes_and_methods_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    give(monkeypatch, FREE_ROWS)
    path = tmp_path / "state"
    Engine(MODEL, method="auto").save_state(path)
    with pytest.raises(StateError, match=r"another model \(dtype float32, here bfloat16\)"):
        Engine(copy.deepcopy(MODEL).to(torch.bfloat16), method="auto").load_state(path)
    other = copy.deepcopy(MODEL)
    with torch.no_grad():
        other.lm_head.weight.mul_(2.0)
    with pytest.raises(StateError, match=r"another model \(weights"):
        Engine(other, method="auto").load_state(path)
    with pytest.raises(StateError, match="learned by the method auto, not by token-recycling"):
        Engine(MODEL, method="token-recycling").load_state(path)


def test_another_processor_or_version_finds_out_again(kept: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target, terms, found = Target(MODEL), AutoSettings(memory_limit=0), []
    result = Preparation(FREE_ROWS, None)
    monkeypatch.setattr(preparation, "_find_out", lambda *_: found.append(1) or result)
    for _ in range(2):
        assert preparation.prepare(target, terms) == result
    assert len(found) == 1
    for place, value in {
        "selfspec.runtimes.costs.store.processor_name": lambda: "another processor",
        "selfspec.runtimes.costs.store.version": lambda _: "99.0",
        "selfspec.methods.auto.preparation._FORMAT": 99,
    }.items():
        with monkeypatch.context() as elsewhere:
            elsewhere.setattr(place, value)
            before = len(found)
            preparation.prepare(target, terms)
            assert len(found) == before + 1, place


@pytest.mark.parametrize("values", [{}, {"greedy": {}, "sampled": {}}, {"greedy": 1, "sampled": {}}, {"other": {}}])
def test_damaged_states_are_refused_and_change_nothing(monkeypatch: pytest.MonkeyPatch, values: dict[str, Any]) -> None:
    give(monkeypatch, FREE_ROWS)
    method = Engine(MODEL, method="auto").method
    before = method.state().values
    with pytest.raises(StateError):
        method.restore(LearnedState(values))
    assert method.state().values == before


def test_groups_that_there_are_not_are_refused() -> None:
    with pytest.raises(InvalidSettingError, match="groups of 48"):
        Engine(MODEL, method="auto", settings={"group": 48})


def test_nothing_is_drafted_that_no_time_was_saved_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """A draft that costs more than the credit waits until cheaper ones have saved its time."""
    give(monkeypatch, FREE_ROWS, agreement=0.99, draft=RowCosts((1, 64), (1.7, 2.0)))
    planned: list[Any] = []
    plan = AutoDrafter.plan
    monkeypatch.setattr(AutoDrafter, "plan", lambda *args: planned.append(plan(*args)) or planned[-1])
    Engine(MODEL, method="auto", settings={"delta": 0.0}).generate([5], max_new_tokens=2, ignore_eos=True)
    assert planned
    assert not any(isinstance(draft, LayerDraft) for draft in planned)
