"""Drafting from low-bit weights: the text is the model's own, which keep most of its choices."""

from typing import Any

import pytest
import torch

from helpers.low_bit_model import SUBLAYERS, random_model
from helpers.models import build, prompt
from selfspec import Engine, SamplingParams, load_model
from selfspec.errors import InvalidSettingError, OutOfMemoryError, UnsupportedModelError
from selfspec.model.kept import KeptSet
from selfspec.runtimes.precision import Precision
from selfspec.runtimes.target import Target
from selfspec_lab.testing import verifies_exactly

MODEL = random_model()


def engine(model: Any = MODEL, **settings: Any) -> Engine:
    return Engine(model, method="low-bit", settings={"joint_confidence": 0.0, **settings}, max_batch=3)


@pytest.mark.parametrize(
    "settings",
    [
        {"draft_bits": 8},
        {"draft_bits": 6},
        {"draft_bits": 4},
        {"draft_bits": 4, "head_bits": 8},
        {"draft_bits": 8, "attention_bits": 16, "mlp_bits": 4, "head_bits": 16},
        {"draft_bits": 8, "draft_length": 3, "joint_confidence": 0.5},
    ],
    ids=str,
)
@pytest.mark.parametrize("sampling", [{}, {"temperature": 0.8, "seed": 3}], ids=["greedy", "seed"])
def test_the_text_is_the_models_own(settings: dict[str, Any], sampling: dict[str, Any]) -> None:
    params = SamplingParams(max_new_tokens=40, ignore_eos=True, **sampling)
    prompts = [prompt(length, length) for length in (1, 30, 9, 17)]
    plain = Engine(MODEL, method="autoregressive")
    expected = [plain.generate(each, params).token_ids for each in prompts]
    results = engine(**settings).generate(prompts, params)
    assert [result.token_ids for result in results] == expected
    assert [engine(**settings).generate(each, params).token_ids for each in prompts] == expected
    assert sum(result.drafted for result in results) > 0
    assert sum(result.accepted for result in results) > 0


def test_more_bits_keep_more_choices() -> None:
    rates = {}
    for bits in (8, 6, 4):
        results = engine(draft_bits=bits, draft_length=5).generate(
            [prompt(20, seed) for seed in range(8)], max_new_tokens=60
        )
        rates[bits] = sum(result.accepted for result in results) / sum(result.drafted for result in results)
    assert rates[8] > 0.8
    assert rates[8] >= rates[6] > rates[4] > 0


def test_a_prompt_alone_drafts_what_it_drafts_in_a_batch() -> None:
    drafting = engine(attention_bits=16, mlp_bits=16, head_bits=4)  # only the head errs
    prompts = [prompt(length, length) for length in (20, 9)]
    together = drafting.generate(prompts, max_new_tokens=40, ignore_eos=True)
    for ids, batched in zip(prompts, together, strict=True):
        alone = drafting.generate(ids, max_new_tokens=40, ignore_eos=True)
        assert [(each.drafted, each.accepted) for each in alone.rounds] == [
            (each.drafted, each.accepted) for each in batched.rounds
        ]
        assert 0 < alone.accepted < alone.drafted


def test_rounds_say_that_all_sublayers_drafted() -> None:
    result = engine(draft_bits=8, draft_length=4).generate(prompt(12), max_new_tokens=30)
    assert {record.kept for record in result.rounds} == {KeptSet.full(SUBLAYERS)}
    assert max(record.drafted for record in result.rounds) == 4


def test_low_bit_weights_are_made_ahead_and_counted() -> None:
    told: list[str] = []
    made = engine(draft_bits=4)
    made.method.prepare(told.append)
    assert told == ["low-bit weights of 0 MiB"]
    target = made.target
    assert 0 < target.low_bit_bytes(Precision.of(4)) < target.low_bit_bytes(Precision.of(8))
    assert target.low_bit_bytes(None) == 0


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"draft_bits": 5}, "cannot have 5 bits"),
        ({"draft_bits": 3}, "draft_bits must be at least 4"),
        ({"head_bits": 12}, "the head cannot have 12 bits"),
        ({"group": 48}, "no groups of 48"),
        ({"attention_bits": 16, "mlp_bits": 16, "head_bits": 16}, "all weights are at 16 bits"),
    ],
)
def test_bad_settings_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidSettingError, match=message):
        engine(**settings)


def test_a_model_without_kernels_is_refused_before_anything_runs() -> None:
    for model, options in ((build("gemma2"), {}), (MODEL, {"runtime": "eager"})):
        with pytest.raises(UnsupportedModelError):
            Engine(model, method="low-bit", **options)


def test_low_bit_weights_that_do_not_fit_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("selfspec.memory.available_bytes", lambda *_: 1000)
    with pytest.raises(OutOfMemoryError, match="available"):
        engine(random_model(), draft_bits=8).warmup()


@pytest.mark.trained
@pytest.mark.parametrize("bits", [8, 6, 4])
def test_bfloat16_on_a_trained_model(bits: int) -> None:
    if not verifies_exactly(torch.bfloat16):
        pytest.skip("there are no kernels for this many rows on this machine")
    model, tokenizer = load_model("tiny", dtype="bfloat16", device="cpu")
    texts = ["def add(a, b):\n", "Once upon a time"]
    plain = [
        Engine(model, tokenizer, method="autoregressive").generate(text, max_new_tokens=48, ignore_eos=True)
        for text in texts
    ]
    drafted = Engine(model, tokenizer, "low-bit", settings={"draft_bits": bits}).generate(
        texts, max_new_tokens=48, ignore_eos=True
    )
    assert [result.token_ids for result in drafted] == [result.token_ids for result in plain]
    accepted, tried = (sum(getattr(result, name) for result in drafted) for name in ("accepted", "drafted"))
    assert accepted / tried > {8: 0.9, 6: 0.85, 4: 0.7}[bits]


def test_the_target_at_a_precision_is_another_model() -> None:
    target = Target(MODEL)
    assert target.at(None) is target.at(Precision())
    assert target.at(Precision.of(8)) is target.at(Precision.of(8))
