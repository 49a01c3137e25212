"""``draft_bits``: every method that drafts with layers drafts from low-bit weights, and selects what suits them."""

from dataclasses import asdict
from typing import Any

import pytest
import torch

from helpers.low_bit_model import SUBLAYERS, random_model
from helpers.models import build, prompt
from selfspec import Engine, SamplingParams
from selfspec.decoding.draft import LayerDraft, NoDraft, with_precision
from selfspec.decoding.drafter import Needs
from selfspec.errors import InvalidSettingError, UnsupportedModelError
from selfspec.methods import METHODS
from selfspec.methods.knapsack import find_candidates
from selfspec.methods.settings import PrecisionSettings
from selfspec.methods.swift import matchness
from selfspec.model.kept import KeptSet
from selfspec.runtimes.precision import Precision
from selfspec.runtimes.target import Target
from selfspec_lab.testing import read_text

MODEL = random_model()
LAYER_METHODS = [name for name, method in METHODS.items() if issubclass(method.Settings, PrecisionSettings)]
LAYER_METHODS.remove("sparse")  # it needs a long text (``test_sparse.py``)
SETTINGS: dict[str, dict[str, Any]] = {
    "uniform": {"skip_ratio": 0.3, "confidence_threshold": 0.0},
    "clasp": {"skipped_layers": 1, "update_interval": 2, "draft_exit_threshold": 0.0, "draft_length": 4},
    "knapspec": {"interval": 3, "recent_tokens": 6, "confidence_threshold": 0.0},
    "swift": {"skip_ratio": 0.3, "context_window": 6, "max_matchness": 1.0, "confidence_threshold": 0.0},
    "self-spec": {"skip_ratio": 0.3, "threshold": 0.0},
    "del": {"allow_no_draft": False},
    "layerskip": {"exit_layer": 3},
    "layerskip-fs": {"exit_layer": 3},
    "layerskip-dv": {"exit_layer": 3, "threshold": 0.1},
    "low-bit": {"joint_confidence": 0.0},
}


def engine(method: str, model: Any = MODEL, runtime: str = "auto", **settings: Any) -> Engine:
    return Engine(model, method=method, settings={**SETTINGS[method], **settings}, runtime=runtime)


def test_every_method_that_drafts_with_layers_has_them() -> None:
    assert set(SETTINGS) == set(LAYER_METHODS)


@pytest.mark.in_turn(3)
@pytest.mark.filterwarnings("ignore::selfspec.errors.NoGainWarning")
@pytest.mark.parametrize("sampling", [{}, {"temperature": 0.8, "seed": 3}], ids=["greedy", "seed"])
@pytest.mark.parametrize("bits", [{"draft_bits": 8}, {"draft_bits": 4, "head_bits": 16}], ids=str)
@pytest.mark.parametrize("method", LAYER_METHODS)
def test_the_text_is_the_models_own(method: str, bits: dict[str, Any], sampling: dict[str, Any]) -> None:
    params = SamplingParams(max_new_tokens=40, ignore_eos=True, **sampling)
    prompts = [prompt(length, length) for length in (30, 9)]
    expected = [Engine(MODEL).generate(each, params).token_ids for each in prompts]
    made = engine(method, **bits)
    results = made.generate(prompts, params)
    assert [result.token_ids for result in results] == expected
    assert made.generate(prompts[0], params).token_ids == expected[0]
    assert sum(result.drafted for result in results) > 0
    assert sum(result.accepted for result in results) > 0
    drafting = {each.precision for result in results for each in result.rounds if each.kept and each.drafted}
    assert drafting == {made.method.draft_precision}


@pytest.mark.parametrize("method", [name for name in LAYER_METHODS if name != "low-bit"])  # which refuses them
def test_sixteen_bits_are_the_models_own_weights(method: str) -> None:
    made = engine(method, draft_bits=4, attention_bits=16, mlp_bits=16, head_bits=16)
    assert made.method.draft_precision is None
    result = made.generate(prompt(17), max_new_tokens=30)
    assert {each.precision for each in result.rounds} == {None}


def test_a_draft_that_names_a_precision_keeps_it() -> None:
    own, given = Precision.of(8), Precision.of(4)
    draft = LayerDraft(KeptSet.full(SUBLAYERS), 3)
    assert with_precision(draft, given) == LayerDraft(draft.kept, 3, precision=given)
    assert with_precision(LayerDraft(draft.kept, 3, precision=own), given).precision == own  # type: ignore[attr-defined]
    assert with_precision(draft, None) is draft
    assert with_precision(NoDraft(), given) == NoDraft()


def test_a_round_has_its_precision() -> None:
    precision = Precision(4, 8, 16, 32)
    made = engine("low-bit")
    made.method.arrange = lambda _, drafts: [with_precision(each, precision) for each in drafts]  # type: ignore[method-assign]
    played = made.generate(prompt(9), max_new_tokens=12).rounds[0]
    assert played.precision == precision
    assert played.to_dict()["precision"] == asdict(precision)


@torch.inference_mode()
def test_swift_scores_candidates_at_their_precision() -> None:
    target, precision, window = Target(MODEL), Precision(4, 4, 4), 8
    token_ids, kept = prompt(40), KeptSet((0, 1, 3, 4, 6, 7), SUBLAYERS)
    context, prefill = read_text(target, token_ids, Needs(probe_rows=window))
    copy, forward = target.at(precision), target.lay_out(context.state, window, start=40, prefix=40 - window)
    states = copy.run(target.embed(context.token_ids[40 - window : 40]), kept.sublayers, forward).hidden_states
    tokens = copy.logits(states).argmax(-1)
    wanted = int((tokens == context.token_ids[41 - window :]).sum()) / window
    assert matchness(prefill.probe, kept, window, precision=precision) == wanted
    scores = prefill.probe.score(kept, window, precision=precision)
    assert not torch.allclose(scores, prefill.probe.score(kept, window), rtol=1e-2, atol=1e-2)


@torch.inference_mode()
def test_knapspec_measures_the_low_bit_weights() -> None:
    """Every candidate's acceptance is that of its low-bit weights, run by sublayers from the target's ``h[2]``."""
    target, precision, rows = Target(MODEL), Precision(4, 4, 8), 12
    states = frozenset(range(2, SUBLAYERS + 1))
    context, prefill = read_text(target, prompt(40), Needs(0, 200, rows, states))
    references = torch.stack([prefill.hidden_states[index] for index in sorted(states)])
    branches = prefill.probe.branches(rows, 200, precision)
    options: dict[str, Any] = {"weights": (1, 2), "similarity_threshold": -1.0, "precision": precision}
    found = find_candidates(target, references, branches.run, **options)
    own, copy = target.logits(references[-1]).argmax(-1), target.at(precision)
    assert len(found.kept) > 3
    for kept, acceptance in zip(found.kept, found.acceptance.tolist(), strict=True):
        forward = target.lay_out(context.state, rows, start=40, prefix=40 - rows)
        ran = copy.run(references[0], kept.sublayers[2:], forward).hidden_states
        assert acceptance == float((copy.logits(ran).argmax(-1) == own).float().mean())
    assert found.kept[0] == KeptSet.full(SUBLAYERS)
    assert found.acceptance[0] < 1


def test_the_whole_model_at_few_bits_is_a_draft_of_knapspec() -> None:
    made = engine("knapspec", draft_bits=8, similarity_threshold=1.0)
    result = made.generate(prompt(17), max_new_tokens=40)
    assert result.accepted > 0
    assert {each.kept for each in result.rounds if each.drafted} == {KeptSet.full(SUBLAYERS)}


@pytest.mark.parametrize("method", LAYER_METHODS)
@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"draft_bits": 5}, "cannot have 5 bits"),
        ({"draft_bits": 8, "head_bits": 12}, "the head cannot have 12 bits"),
        ({"draft_bits": 8, "group": 48}, "no groups of 48"),
    ],
    ids=str,
)
def test_bad_settings_are_refused(method: str, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidSettingError, match=message):
        engine(method, **settings)


@pytest.mark.parametrize("method", LAYER_METHODS)
def test_what_a_model_cannot_have_is_refused_before_anything_runs(method: str) -> None:
    for refused in (
        {"model": build("gemma2")},
        {"runtime": "eager"},
        {"group": 64},
    ):
        with pytest.raises(UnsupportedModelError, match=r"low-bit|groups of 64"):
            engine(method, **{"draft_bits": 4, **refused})


def test_low_bit_weights_are_made_ahead() -> None:
    told: list[str] = []
    made = engine("knapspec", draft_bits=8)
    made.method.prepare(told.append)
    assert told == ["low-bit weights of 0 MiB", "latencies of attention and MLP"]
