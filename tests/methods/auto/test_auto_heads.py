"""``auto`` with the multi-token-prediction head of a checkpoint: it drafts where it pays."""

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from helpers import auto
from helpers.kernels import needs_kernels
from helpers.mtp_checkpoints import FAMILIES, VOCABULARY, load, save_with_head
from selfspec import Engine, Generation, SamplingParams
from selfspec.errors import NoHeadWarning, OutOfMemoryError
from selfspec.methods.auto.method import Auto
from selfspec.methods.auto.preparation import Assignment, Preparation, TriedAssignment
from selfspec.model.kept import KeptSet
from selfspec.runtimes.costs.rows import RowCosts

TOKENS = 40
VERIFY = RowCosts((1, 64), (1.0, 1.001))
CHEAP, DEAR = RowCosts((1, 64), (0.001, 0.002)), RowCosts((1, 64), (5.0, 6.0))
PROMPTS = [
    torch.randint(VOCABULARY, (length,), generator=torch.Generator().manual_seed(length)).tolist()
    for length in (9, 30, 1, 17)
]


def give(
    monkeypatch: pytest.MonkeyPatch,
    head: RowCosts,
    layers: RowCosts | None = None,
    sublayers: int = 6,
    verify: RowCosts = VERIFY,
) -> None:
    """Gives ``auto`` the costs of forwards of the model, of its head, and of a draft of layers."""
    trial = None if layers is None else TriedAssignment(Assignment(KeptSet.full(sublayers)), 0.9, layers)
    auto.give(monkeypatch, Preparation(verify, trial))
    monkeypatch.setattr("selfspec.methods.auto.method.estimate_row_costs", lambda *_: head)


def greedy(model: Any, prompt: list[int]) -> tuple[int, ...]:
    with torch.no_grad():
        ids = model.generate(torch.tensor([prompt]), max_new_tokens=TOKENS, do_sample=False)
    return tuple(ids[0, len(prompt) :].tolist())


def accepted(results: list[Generation]) -> int:
    """Accepted tokens that the head drafted."""
    return sum(each.accepted for result in results for each in result.rounds if each.drafted_by == "mtp")


@needs_kernels
def test_rounds_with_the_head_follow_each_other_natively(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And rounds without it beside them, however short a step is; the costs of both are learned from runs."""
    model = load(save_with_head("glm4_moe", tmp_path))
    for seconds in (0.005, 0.1):  # the host's time counts, too, and is more on a busy machine
        costs = RowCosts((1, 64), (1e-6, 2e-6)), RowCosts((1, 64), (seconds, 1.001 * seconds))
        give(monkeypatch, costs[0], verify=costs[1])
        engine = Engine(model)
        result = engine.generate(PROMPTS[1], max_new_tokens=TOKENS)
        assert result.token_ids == greedy(model, PROMPTS[1])
        drafts = [each for each in result.rounds if each.drafted_by == "mtp"]
        assert sum(each.accepted for each in drafts) > 0
        assert {str(each.drafting) for each in drafts} == {"native"}
        assert {str(each.verification) for each in result.rounds} == {"native"}


@pytest.mark.parametrize(
    "family", [pytest.param(each, marks=[pytest.mark.slow] * (each == "qwen3_next")) for each in FAMILIES]
)
def test_the_head_drafts_and_the_text_is_the_models_own(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    give(monkeypatch, CHEAP)
    model = load(save_with_head(family, tmp_path))
    engine, expected = Engine(model), [greedy(model, prompt) for prompt in PROMPTS]
    alone = [engine.generate(prompt, max_new_tokens=TOKENS) for prompt in PROMPTS[:2]]
    together = Engine(model, max_batch=3).generate(PROMPTS, max_new_tokens=TOKENS)
    for results in (alone, together):
        assert [result.token_ids for result in results] == expected[: len(results)]
        assert accepted(results) > 10
    assert not any(each.kept for result in alone for each in result.rounds)


def test_a_seed_gives_one_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    give(monkeypatch, CHEAP)
    model, params = load(save_with_head("qwen2", tmp_path)), SamplingParams(TOKENS, temperature=0.5, seed=3)
    plain = Engine(model, method="autoregressive").generate(PROMPTS, params)
    found = Engine(model).generate(PROMPTS, params)
    assert [each.token_ids for each in found] == [each.token_ids for each in plain]
    assert accepted(found) > 5


def test_lookup_drafts_where_the_text_repeats(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    give(monkeypatch, RowCosts((1, 64), (0.1, 0.2)))
    model = load(save_with_head("llama", tmp_path))
    engine, prompt = Engine(model), PROMPTS[0]
    text = [*prompt, *greedy(model, prompt)]
    by = []
    for each in (prompt, [*text, *text[: len(prompt)]]):
        found = engine.generate(each, max_new_tokens=TOKENS)
        assert found.token_ids == greedy(model, each)
        by.append({own.drafted_by for own in found.rounds if own.accepted})
    assert "mtp" in by[0]
    assert "lookup" in by[1]


def test_a_head_that_costs_more_than_a_step_does_not_draft(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    give(monkeypatch, DEAR)
    model = load(save_with_head("llama", tmp_path))
    found = Engine(model).generate(PROMPTS[0], max_new_tokens=TOKENS)
    assert found.token_ids == greedy(model, PROMPTS[0])
    assert not any(each.drafted_by == "mtp" for each in found.rounds)


@pytest.mark.parametrize(("head", "drafts"), [(CHEAP, "mtp"), (DEAR, "layers")])
def test_layers_draft_where_they_are_cheaper(
    head: RowCosts, drafts: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    give(monkeypatch, head, layers=RowCosts((1, 64), (0.01, 0.02)))
    model = load(save_with_head("llama", tmp_path))
    found = Engine(model).generate(PROMPTS[1], max_new_tokens=TOKENS)
    assert found.token_ids == greedy(model, PROMPTS[1])
    accepted_by = {"layers" if each.kept else each.drafted_by for each in found.rounds if each.accepted}
    assert drafts in accepted_by
    assert len({"layers", "mtp"} & accepted_by) == 1


def test_after_a_prefix_cache_hit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    give(monkeypatch, CHEAP)
    model = load(save_with_head("llama", tmp_path))
    engine, prompt = Engine(model, prefix_cache=2**22), PROMPTS[1] * 3
    first, again = (engine.generate(prompt, max_new_tokens=TOKENS) for _ in range(2))
    assert again.cached_prompt_tokens > 0
    assert first.token_ids == again.token_ids == greedy(model, prompt)
    assert accepted([again]) > 0


def test_what_it_learned_of_the_head_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    give(monkeypatch, CHEAP)
    model = load(save_with_head("llama", tmp_path / "model"))
    engine = Engine(model)
    engine.generate(PROMPTS[0], max_new_tokens=TOKENS)
    engine.save_state(tmp_path / "state")
    other = Engine(model)
    other.load_state(tmp_path / "state")
    assert other.method.state().values == engine.method.state().values
    assert engine.method.state().values["layer_draft"] == "mtp"


def test_a_head_that_cannot_run_is_said_and_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    give(monkeypatch, CHEAP)

    def lose(tensors: dict[str, torch.Tensor]) -> None:
        del tensors["mtp.fc.weight"]

    model = load(save_with_head("llama", tmp_path, lose))
    with pytest.warns(NoHeadWarning, match=r"auto drafts without the head of the checkpoint: the tensor mtp.fc.weight"):
        engine = Engine(model)
    assert engine.generate(PROMPTS[0], max_new_tokens=TOKENS).token_ids == greedy(model, PROMPTS[0])


def test_its_costs_are_measured_in_a_warm_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    auto.give(monkeypatch, Preparation(VERIFY, None))
    model = load(save_with_head("llama", tmp_path))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        engine = Engine(model)
        engine.method.prepare()
    found = engine.generate(
        PROMPTS[0], max_new_tokens=TOKENS
    )  # a step is given as a second, the head takes a millisecond
    assert found.token_ids == greedy(model, PROMPTS[0])
    assert accepted([found]) > 0


@needs_kernels
@pytest.mark.parametrize("limit", [None, 0.0])
def test_it_drafts_with_weights_of_eight_bits_where_they_may_be_made(
    limit: float | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    give(monkeypatch, CHEAP)
    model = load(save_with_head("llama", tmp_path))
    engine = Engine(model, settings={"memory_limit": limit})
    found = engine.generate(PROMPTS[1], max_new_tokens=TOKENS)
    assert found.token_ids == greedy(model, PROMPTS[1])
    assert accepted([found]) > 0
    assert isinstance(engine.method, Auto)
    head = engine.method._head
    assert head is not None
    assert (head.precision is None) is (limit == 0.0)
    assert bool(head.own._low_bit._made) is (limit is None)


@needs_kernels
def test_a_warm_up_without_memory_for_its_weights_drafts_with_the_checkpoints(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    auto.give(monkeypatch, Preparation(VERIFY, None))
    engine = Engine(load(save_with_head("llama", tmp_path)))
    assert isinstance(engine.method, Auto)
    head = engine.method._head
    assert head is not None

    def full(precision: object) -> None:
        raise OutOfMemoryError("no memory")

    monkeypatch.setattr(head.own._low_bit, "at", full)
    engine.method.prepare()
    found = engine.generate(PROMPTS[0], max_new_tokens=TOKENS)
    assert found.token_ids == greedy(engine.target.model, PROMPTS[0])
    assert head.precision is None
    assert accepted([found]) > 0
