"""Bytes that decoding reads, and the ideal speedup that follows from them."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from helpers.low_bit_model import random_model
from helpers.models import SUBLAYERS, build
from round_makers import output, record
from selfspec import Engine
from selfspec.model.kept import KeptSet
from selfspec.runtimes.target import Target
from selfspec_lab.bench.cost import decoding_bytes
from selfspec_lab.formulas import ideal_speedup
from selfspec_lab.measuring import StepBytes


def test_ideal_speedup_by_hand() -> None:
    costs = StepBytes(Target(build("llama")))
    kept = KeptSet((0, 1, 2, 5), SUBLAYERS)
    read = decoding_bytes(costs, [output(record(3, 2, kept), record(2, 0), record(0, 0))])
    full, part = costs.target_step, lambda context: costs.step((0, 1, 2, 5), context)
    # 9 tokens of prompt and the first new one: the first step sees 10 slots. The rounds commit 3, 1 and 1 tokens.
    assert read.tokens == 5
    assert read.plain == full(10) + full(11) + full(12) + full(13) + full(14)
    assert read.draft == part(10) + part(11) + part(12)
    assert read.draft_steps == 3
    assert read.verify == full(13) + full(15) + full(14)
    assert read.ideal_speedup == read.plain / (read.draft + read.verify)
    assert read.cost_coefficient == (read.draft / 3) / (read.plain / 5)


def test_ideal_speedup_is_equation_6_where_the_context_costs_nothing() -> None:
    costs = StepBytes(Target(build("llama")))
    free_context: Any = SimpleNamespace(
        step=lambda kept, context, precision: costs.step(kept, 0, precision),
        target_step=lambda context: costs.target_step(0),
    )
    kept = KeptSet.early_exit(2, SUBLAYERS)
    read = decoding_bytes(free_context, [output(record(4, 4, kept), record(4, 1, kept), record(4, 0, kept))])
    cost = costs.step(range(4), 0) / costs.target_step(0)
    assert read.cost_coefficient == pytest.approx(cost)
    assert read.ideal_speedup == pytest.approx(float(ideal_speedup(8 / 3, 5 / 12, cost)))


def test_guessed_tokens_took_no_forward() -> None:
    costs, kept = StepBytes(Target(build("llama"))), KeptSet.early_exit(2, SUBLAYERS)
    read = decoding_bytes(costs, [output(replace(record(4, 4, kept), guessed=3))])
    assert read.draft_steps == 1
    assert read.draft == costs.step(range(4), 10)


def test_rounds_without_a_draft_have_an_ideal_of_one() -> None:
    read = decoding_bytes(StepBytes(Target(build("llama"))), [output(record(0, 0), record(0, 0))])
    assert read.ideal_speedup == 1
    assert read.cost_coefficient is None


def test_drafts_from_low_bit_weights_read_fewer_bytes() -> None:
    coefficients = {}
    for bits in (8, 4):
        settings = {"draft_bits": bits, "joint_confidence": 0.0, "draft_length": 3}
        engine = Engine(random_model(), method="low-bit", settings=settings)
        generation = engine.generate([1, 2, 3], max_new_tokens=20)
        assert generation.accepted > 0
        coefficients[bits] = decoding_bytes(StepBytes(engine.target), [generation]).cost_coefficient
    # float32 weights of 32 bits: low-bit weights are 8 or 4 bits and a scale of 16 bits for every 32 weights
    assert 0.25 < coefficients[8] < 0.33
    assert 0.13 < coefficients[4] < 0.21
