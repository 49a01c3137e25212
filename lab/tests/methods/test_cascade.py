"""Cascades: exact, alone and in batches; which stage drafts; settings, state and bad input."""

import functools
from dataclasses import replace
from typing import Any

import pytest
import torch

from helpers import auto
from helpers.drafts import begin, ngram_model, play
from helpers.kernels import needs_kernels
from helpers.low_bit_model import random_model
from helpers.models import VOCABULARY, build, plain_text, prompt
from helpers.scripted import Scripted
from selfspec import Engine, SamplingParams
from selfspec.decoding.draft import NoDraft, TokenDraft
from selfspec.decoding.drafter import Feedback, FixedDrafter, Needs
from selfspec.errors import InvalidSettingError, MethodLoadError, StateError, UnknownMethodError
from selfspec.methods import find_method, make_method
from selfspec.planning.acceptance_tables import Lookup
from selfspec.runtimes.native import NativeForward
from selfspec.runtimes.target import Target
from selfspec.sampling.acceptance import TokenTree
from selfspec_lab.methods.cascade import Cascade, CascadeDrafter

MODEL = random_model()
LOW_BIT = {"low-bit.draft_bits": 8, "low-bit.joint_confidence": 0.0, "low-bit.draft_length": 5}
SHORT = {"suffix.min_match_length": 1}
CASES: dict[str, dict[str, Any]] = {
    "cascade(suffix, low-bit)": {**LOW_BIT, "suffix.min_match_length": 2},
    "cascade(prompt-lookup, suffix, low-bit)": {**LOW_BIT, "prompt-lookup.min_matching_ngram_size": 2},
    "cascade(token-recycling, low-bit)": {**LOW_BIT, "token-recycling.tree_size": 20},
}
LAYER_CASES: dict[str, dict[str, Any]] = {
    "cascade(suffix, uniform)": {**SHORT, "uniform.skip_ratio": 0.3, "uniform.confidence_threshold": 0.0},
    "cascade(suffix, clasp)": {**SHORT, "clasp.skipped_layers": 2, "clasp.update_interval": 2},
    "cascade(prompt-lookup, swift)": {"swift.context_window": 6, "swift.confidence_threshold": 0.1},
    "cascade(suffix, knapspec)": {**SHORT, "knapspec.interval": 4, "knapspec.recent_tokens": 2},
    "cascade(suffix, del)": SHORT,
    "cascade(token-recycling, layerskip)": {"token-recycling.tree_size": 20, "layerskip.exit_layer": 4},
}
PROMPTS = [prompt(length, length) for length in (1, 30, 9, 17)]


@functools.cache
def plain_ids(params: SamplingParams) -> list[tuple[int, ...]]:
    engine = Engine(MODEL, method="autoregressive")
    return [engine.generate(each, params).token_ids for each in PROMPTS]


@pytest.mark.parametrize("sampling", [{}, {"temperature": 0.8, "seed": 3}], ids=["greedy", "seed"])
@pytest.mark.parametrize("name", CASES)
def test_the_text_is_the_models_own(name: str, sampling: dict[str, Any]) -> None:
    params = SamplingParams(max_new_tokens=60, ignore_eos=True, **sampling)
    expected = plain_ids(params)
    engine = Engine(MODEL, method=name, settings=CASES[name], max_batch=3)
    results = engine.generate(PROMPTS, params)
    assert [result.token_ids for result in results] == expected
    assert [engine.generate(each, params).token_ids for each in PROMPTS] == expected
    assert sum(result.accepted for result in results) > 0


@pytest.mark.parametrize("name", LAYER_CASES)
def test_with_every_kind_of_layer_draft(name: str) -> None:
    composed: Any = find_method(name)
    stages = {stage.name: stage for stage in composed.stages}
    engine = Engine(build("llama"), method=name, settings=LAYER_CASES[name], max_batch=3)
    results = engine.generate(PROMPTS, max_new_tokens=48, ignore_eos=True)
    for each, result in zip(PROMPTS, results, strict=True):
        assert result.token_ids == plain_text("llama", each, 48)
    for each, result in zip(PROMPTS[:2], results, strict=False):
        assert result.token_ids == engine.generate(each, max_new_tokens=48, ignore_eos=True).token_ids
    drafting = {record.drafted_by for result in results for record in result.rounds if record.drafted}
    assert drafting <= set(stages)
    assert drafting
    assert sum(result.accepted for result in results) > 0


def repeating() -> list[int]:
    """A prompt whose end has occurred before."""
    return [*prompt(12), *prompt(12)]


@pytest.mark.parametrize(
    "sampling", [{}, {"temperature": 0.9, "seed": 5}, {"temperature": 0.9, "seed": 5, "acceptance": "speculative"}]
)
def test_nested_drafts_are_the_same_in_fewer_forwards(sampling: dict[str, Any]) -> None:
    """All of a round but its time."""
    params = SamplingParams(max_new_tokens=80, ignore_eos=True, **sampling)
    rounds = []
    for nested in (True, False):
        settings = {**LOW_BIT, "suffix.min_match_length": 6, "nested": nested, "guess_match": 1}
        result = Engine(MODEL, method="cascade(suffix, low-bit)", settings=settings).generate(repeating(), params)
        rounds.append(result.rounds)
    with_guesses, without = rounds
    timeless = [[replace(each, guessed=0, seconds=without[0].seconds) for each in one] for one in rounds]
    assert timeless[0] == timeless[1]
    assert sum(record.guessed for record in without) == 0
    if not sampling:
        assert sum(record.guessed for record in with_guesses) > 0


@needs_kernels
@pytest.mark.parametrize("first", ["suffix", "token-recycling"])
def test_other_parts_are_asked_after_each_step_of_plain_decoding(first: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Alone it runs several steps in one call; here each may give another stage something to draft."""
    calls: list[int] = []
    chain = NativeForward.chain

    def counted(self: NativeForward, *arguments: Any) -> Any:
        calls.append(len(arguments[0]))
        return chain(self, *arguments)

    monkeypatch.setattr(NativeForward, "chain", counted)
    limits = {"max_new_tokens": 30, "ignore_eos": True}
    plain = Engine(MODEL, method="autoregressive").generate(repeating(), **limits)
    assert calls, "plain decoding alone runs several steps in one call"
    calls.clear()
    result = Engine(MODEL, method=f"cascade({first}, autoregressive)").generate(repeating(), **limits)
    assert not calls
    assert result.token_ids == plain.token_ids
    assert any(each.drafted_by == "autoregressive" for each in result.rounds)


def test_a_match_that_is_long_enough_drafts() -> None:
    settings = {**LOW_BIT, **SHORT}
    engine = Engine(MODEL, method="cascade(suffix, low-bit)", settings=settings)
    result = engine.generate(repeating(), max_new_tokens=60)
    by = {record.drafted_by for record in result.rounds}
    assert by == {"suffix", "low-bit"}
    for record in result.rounds:
        assert (record.kept is None) == (record.drafted_by == "suffix")


class Beside(Scripted):
    """A stage that always drafts."""

    name = "beside"

    def __init__(self, target: Target, settings: Any) -> None:
        super().__init__(
            target,
            lambda _: TokenDraft((1,), TokenTree.chain(1)),
            Needs(sibling_rows=3, prompt_rows=2, prompt_states=frozenset({4})),
        )


class Idle(Scripted):
    """A stage that never drafts."""

    name = "idle"

    def __init__(self, target: Target, settings: Any) -> None:
        super().__init__(target, lambda _: NoDraft(), Needs(probe_rows=5, prompt_rows=3, prompt_states=frozenset({2})))


def test_parts_get_what_they_need_of_a_request() -> None:
    engine = Engine(build("llama"), method=Cascade.of([Idle, Beside]))
    method: Any = engine.method
    assert method.needs == Needs(sibling_rows=3, probe_rows=5, prompt_rows=3, prompt_states=frozenset({2, 4}))
    result = engine.generate(prompt(9), max_new_tokens=12)
    assert result.token_ids == plain_text("llama", prompt(9), 12)
    assert {record.drafted_by for record in result.rounds} == {"beside"}
    shapes = [
        {index: len(states) for index, states in stage.prefills[0].hidden_states.items()} for stage in method.methods
    ]
    assert shapes == [{2: 3}, {4: 2}]
    assert [len(stage.feedbacks) for stage in method.methods] == [0, result.round_count]
    assert all(isinstance(feedback.draft, TokenDraft) for feedback in method.methods[1].feedbacks)


@pytest.mark.parametrize("name", ["suffix", "prompt-lookup", "token-recycling"])
def test_what_others_drafted_is_learned(name: str) -> None:
    """After rounds of another drafter they draft what they would draft after their own."""
    method = make_method(name, Target(build("llama")), {})
    again = make_method(name, Target(build("llama")), {})
    model, text = ngram_model(2, 6), [1, 2, 3]
    playing, watching = begin(method, text), begin(again, text)

    class Both:
        def plan(self) -> Any:
            return playing.plan()

        def learn(self, feedback: Feedback) -> None:
            playing.learn(feedback)
            watching.observe(feedback)

    for _ in range(20):
        play(Both(), model, text, VOCABULARY)  # type: ignore[arg-type]
    assert watching.plan() == playing.plan() != NoDraft()


# Settings


def test_settings_of_parts_are_given_in_either_form() -> None:
    name = "cascade(suffix, low-bit)"
    settings_class = find_method(name).Settings
    dotted = settings_class.parse(name, {"suffix.max_draft_length": "16", "low-bit.draft_bits": 6, "nested": "false"})
    nested = settings_class.parse(
        name, {"suffix": {"max_draft_length": 16}, "low-bit": {"draft_bits": "6"}, "nested": False}
    )
    assert dotted == nested
    values = dotted.to_values()
    assert (values["suffix.max_draft_length"], values["low-bit.draft_bits"], values["nested"]) == (16, 6, False)
    assert settings_class.parse(name, values) == dotted


def test_defaults_differ_before_another_part() -> None:
    first = find_method("cascade(suffix, low-bit)").Settings().to_values()
    last = find_method("cascade(low-bit, suffix)").Settings().to_values()
    assert first["suffix.min_match_length"] > last["suffix.min_match_length"] == 1


def test_a_result_names_the_cascade_and_all_settings() -> None:
    result = Engine(MODEL, method="cascade( suffix,low-bit )", settings=LOW_BIT).generate([1, 2], max_new_tokens=4)
    assert result.method == "cascade(suffix, low-bit)"
    assert result.settings["low-bit.draft_bits"] == 8
    Engine(MODEL, method=result.method, settings=result.settings)


def test_one_class_for_one_cascade() -> None:
    assert find_method("cascade(suffix, low-bit)") is find_method("cascade(suffix,low-bit)")
    assert find_method("cascade(suffix, low-bit)") is not find_method("cascade(low-bit, suffix)")
    outside = find_method("cascade(selfspec.methods.ngram:Suffix, low-bit)")
    assert outside is find_method("cascade(suffix, low-bit)")


# State


def test_state_of_the_parts_that_learn(tmp_path: Any) -> None:
    name = "cascade(suffix, token-recycling)"
    engine = Engine(build("llama"), method=name)
    assert engine.method.learns
    engine.generate(prompt(20), max_new_tokens=30)
    engine.save_state(tmp_path / "state")
    other = Engine(build("llama"), method=name)
    other.load_state(tmp_path / "state")
    learned = [each.method.methods[1].candidates.copy() for each in (engine, other)]  # type: ignore[attr-defined]
    assert torch.equal(*learned)
    assert (learned[0] >= 0).any()
    with pytest.raises(StateError, match=r"learned by the method cascade\(suffix, token-recycling\)"):
        Engine(build("llama"), method="token-recycling").load_state(tmp_path / "state")


def test_a_state_that_does_not_fit_changes_nothing() -> None:
    method: Any = make_method("cascade(token-recycling, swift)", Target(build("llama")), {})
    saved = method.state()
    damaged = replace(saved, values={**saved.values, "swift": {"start_ratio": "a"}})
    changed = {**damaged.tensors, "token-recycling.candidates": damaged.tensors["token-recycling.candidates"].fill_(-1)}
    changed["token-recycling.candidates"][:, 0] = 5
    with pytest.raises(StateError):
        method.restore(replace(damaged, tensors=changed))
    assert (method.methods[0].candidates.copy() == -1).all()


def test_parts_that_learn_nothing_have_no_state() -> None:
    with pytest.raises(StateError, match="learns nothing"):
        make_method("cascade(suffix, low-bit)", Target(MODEL), {}).state()


# Bad input


@pytest.mark.parametrize(
    ("name", "error", "message"),
    [
        ("cascade(sufix, low-bit)", UnknownMethodError, "no method 'sufix'; did you mean 'suffix'"),
        ("cascade(suffix, cascade(low-bit, uniform))", UnknownMethodError, "has stages of its own"),
        ("cascade(cascade, low-bit)", UnknownMethodError, "parentheses"),
        ("cascade", UnknownMethodError, r"parentheses, as in paper\(swift\)"),
        ("cascade(suffix, low-bit", UnknownMethodError, "parentheses"),
        ("cascade suffix, low-bit)", UnknownMethodError, "parentheses"),
        ("cascade()", UnknownMethodError, "empty stage"),
        ("cascade(suffix,)", UnknownMethodError, "empty stage"),
        ("cascade(suffix)", UnknownMethodError, "2 or 3 stages, not 1"),
        ("cascade(suffix, prompt-lookup, low-bit, uniform)", UnknownMethodError, "2 or 3 stages, not 4"),
        ("cascade(suffix, low-bit, suffix)", UnknownMethodError, "'suffix' twice"),
        ("casacde(suffix, low-bit)", UnknownMethodError, "did you mean 'cascade'"),
        ("suffix(low-bit)", UnknownMethodError, "'suffix' takes no stages"),
        ("cascade(suffix, no_such:Method)", MethodLoadError, "no module 'no_such'"),
    ],
)
def test_names_that_make_no_cascade(name: str, error: type[Exception], message: str) -> None:
    """Before the model is loaded: there is none of this name."""
    with pytest.raises(error, match=message):
        Engine.from_pretrained("no such model", name)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"suffix.bits": 8}, "suffix has no setting 'bits'"),
        ({"low-bit.draft_bits": 5.5}, "draft_bits must be int"),
        ({"low-bit": 8}, r"'low-bit' is a stage of cascade\(suffix, low-bit\); set one of its settings"),
        ({"bits": 8}, r"no setting 'bits' .*nested.*suffix\.NAME, low-bit\.NAME"),
        ({"uniform.skip_ratio": 0.5}, r"no setting 'uniform\.skip_ratio'"),
        ({"low-bit": {"draft_bits": 8}, "low-bit.draft_bits": 6}, r"low-bit\.draft_bits is given twice"),
        ({"guess_length": 0}, "guess_length must be at least 1"),
    ],
)
def test_settings_that_a_part_does_not_have(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidSettingError, match=message):
        Engine.from_pretrained("no such model", "cascade(suffix, low-bit)", settings=settings)


def test_classes_that_make_no_cascade() -> None:
    one = find_method("cascade(suffix, low-bit)")
    with pytest.raises(UnknownMethodError, match="cannot be a cascade"):
        Cascade.of([one, find_method("uniform")])


class Masked(FixedDrafter):
    """A stage whose probes have an embedding."""

    mask_embedding = torch.ones(3)


def test_probes_have_the_embedding_of_the_stage_that_drafts() -> None:
    composed: Any = find_method("cascade(suffix, token-recycling)")
    method = make_method(composed.name, Target(build("llama")), {})
    assert isinstance(method, Cascade)
    probing = TokenDraft((), TokenTree.chain(0), (0,))
    drafter = CascadeDrafter(method, [FixedDrafter(NoDraft()), Masked(probing)])
    assert drafter.mask_embedding is None
    drafter.take(1, probing)
    assert drafter.mask_embedding is Masked.mask_embedding


def test_auto_learns_from_the_rounds_of_others(monkeypatch: pytest.MonkeyPatch) -> None:
    auto.give(monkeypatch, auto.eager_preparation)
    seen: list[int] = []
    extend = Lookup.extend
    monkeypatch.setattr(Lookup, "extend", lambda self, tokens: seen.extend(tokens) or extend(self, tokens))
    engine = Engine(MODEL, method="cascade(suffix, auto)", settings={"suffix.min_match_length": 1})
    result = engine.generate(prompt(8) * 3, max_new_tokens=60, ignore_eos=True)
    plain = Engine(MODEL, method="autoregressive").generate(prompt(8) * 3, max_new_tokens=60, ignore_eos=True)
    assert result.token_ids == plain.token_ids
    assert len({record.drafted_by for record in result.rounds}) > 1
    assert seen[: len(result.token_ids) - 1] == list(result.token_ids[1:])


@needs_kernels
def test_a_stage_that_sees_a_part_of_the_text_is_told_how_attention_divides() -> None:
    model, text = random_model(max_position_embeddings=1024), prompt(170)
    settings = {"sparse.latest": 40, "sparse.strongest": 64, "sparse.joint_confidence": 0.0}
    found = Engine(model, method="cascade(suffix, sparse)", settings=settings).generate(text, max_new_tokens=60)
    assert found.token_ids == Engine(model, method="autoregressive").generate(text, max_new_tokens=60).token_ids
    assert any(each.accepted for each in found.rounds if each.drafted_by == "sparse")


@needs_kernels
def test_a_head_follows_the_rounds_of_other_drafts() -> None:
    """It has to keep up with the trees and chains of n-gram drafts."""
    engine, text = Engine.from_pretrained("tiny-mtp", "cascade(suffix, mtp)"), prompt(20) * 2
    found = engine.generate(text, max_new_tokens=60, ignore_eos=True)
    plain = Engine(engine.target.model, method="autoregressive").generate(text, max_new_tokens=60, ignore_eos=True)
    assert found.token_ids == plain.token_ids
    assert {each.drafted_by for each in found.rounds} == {"suffix", "mtp"}
    assert any(each.accepted for each in found.rounds if each.drafted_by == "mtp")
