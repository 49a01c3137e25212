"""Transformers' own generate as a baseline."""

from typing import Any

import pytest

from helpers.models import build, prompt
from selfspec import Engine
from selfspec_lab.bench.baseline import VARIANTS, generate_timed


@pytest.mark.parametrize("variant", ["dynamic", "static"])
def test_transformers_writes_the_same_text_at_full_length(variant: str) -> None:
    model = build("llama")
    written = generate_timed(model, prompt(9), 12, VARIANTS[variant]())
    assert (
        written.token_ids
        == Engine(model, method="autoregressive").generate(prompt(9), max_new_tokens=12, ignore_eos=True).token_ids
    )
    assert written.seconds > 0


def test_transformers_writes_past_the_end_of_the_text() -> None:
    model: Any = build("llama")
    first = generate_timed(model, prompt(9), 12, {}).token_ids[0]
    before = model.generation_config.eos_token_id
    model.generation_config.eos_token_id = first
    try:
        assert len(generate_timed(model, prompt(9), 12, {}).token_ids) == 12
    finally:
        model.generation_config.eos_token_id = before
