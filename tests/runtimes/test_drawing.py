"""Tokens drawn in a native forward are those of the noise: the argmax of logits ÷ temperature plus Gumbel noise."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import LlamaConfig, LlamaForCausalLM

from helpers.kernels import needs_kernels
from helpers.low_bit_model import SIZES
from helpers.models import prompt
from selfspec import Engine, SamplingParams
from selfspec.decoding.request import choosing_path
from selfspec.model.forward import ALL, Drawing, Forward, Likely
from selfspec.runtimes.chain import Path
from selfspec.runtimes.target import Target
from selfspec.sampling.processors import KeepLikely, ScoreProcessor, build_processors
from selfspec.sampling.rules import Coupled, Greedy, gumbel_noise, seed_key

pytestmark = needs_kernels

VOCABULARY = 20_000  # more than one task, the last of them not whole


def model(dtype: torch.dtype = torch.float32) -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**{**SIZES, "vocab_size": VOCABULARY})).eval().to(dtype)


TARGETS = {dtype: Target(model(dtype)) for dtype in (torch.float32, torch.bfloat16)}


def drawn(target: Target, forward: Forward) -> tuple[torch.Tensor, torch.Tensor]:
    with torch.inference_mode():
        tokens = torch.arange(forward.rows) * 7 % VOCABULARY
        logits = target.run(target.embed(tokens), range(target.sublayer_count), forward, logits=True).logits
    assert logits is not None
    assert logits.drawn
    return logits.best, logits.values


def expected(
    values: torch.Tensor, seed: int, positions: list[int], temperature: float, likely: Likely = ALL
) -> torch.Tensor:
    noise = gumbel_noise(seed, torch.tensor(positions), values.shape[-1])
    return (KeepLikely(likely)(positions, values.float() / temperature) + noise).argmax(-1)


@given(
    dtype=st.sampled_from(sorted(TARGETS, key=str)),
    seed=st.integers(-(2**70), 2**70),
    start=st.integers(0, 100),
    rows=st.integers(1, 9),
    temperature=st.floats(0.01, 50),
    likely=st.sampled_from([ALL, Likely(40), Likely(0, 0.9), Likely(0, 1, 0.2), Likely(30_000, 0.4, 0.001)]),
)
def test_a_row_draws_what_the_noise_says(
    dtype: torch.dtype, seed: int, start: int, rows: int, temperature: float, likely: Likely
) -> None:
    """From the sharpest distribution to one that is nearly uniform, from all tokens and from the most likely ones."""
    target = TARGETS[dtype]
    sequence = target.new_sequence(start + rows, start + rows, start + rows)
    drawing = Drawing(seed_key(seed), temperature, likely)
    forward = target.at(None).lay_out(sequence, rows, start=start, drawing=drawing)
    tokens, values = drawn(target, forward)
    assert torch.equal(tokens, expected(values, seed, list(range(start + 1, start + rows + 1)), temperature, likely))


def test_rows_of_a_tree_draw_by_their_depth() -> None:
    target = TARGETS[torch.float32]
    visible = torch.ones(4, 4, dtype=torch.bool).tril()
    sequence = target.new_sequence(30, 40, 40)
    forward = target.at(None).lay_out(
        sequence, 4, start=20, depths=(0, 1, 1, 2), visible=visible, drawing=Drawing(seed_key(5), 0.9)
    )
    tokens, values = drawn(target, forward)
    assert torch.equal(tokens, expected(values, 5, [21, 22, 22, 23], 0.9))


def test_sequences_draw_by_their_own_seeds_and_one_not_at_all() -> None:
    target = TARGETS[torch.bfloat16]
    likely = Likely(50, 0.9)
    drawings = [Drawing(seed_key(1), 0.7), None, Drawing(seed_key(2), 1.5), Drawing(seed_key(3), 1.5, likely)]
    forward = Forward.join(
        [target.at(None).lay_out(target.new_sequence(30, 40, 40), 3, start=10, drawing=each) for each in drawings]
    )
    tokens, values = drawn(target, forward)
    positions = [11, 12, 13]
    assert torch.equal(tokens[:3], expected(values[:3], 1, positions, 0.7))
    assert torch.equal(tokens[3:6], values[3:6].argmax(-1))
    assert torch.equal(tokens[6:9], expected(values[6:9], 2, positions, 1.5))
    assert torch.equal(tokens[9:], expected(values[9:], 3, positions, 1.5, likely))


@pytest.mark.parametrize("dtype", TARGETS, ids=str)
@pytest.mark.parametrize("method", ["autoregressive", "low-bit", "uniform"])
@pytest.mark.parametrize("filters", [{}, {"top_k": 50, "top_p": 0.9}, {"top_p": 0.5, "min_p": 1e-3}], ids=str)
def test_outputs_are_those_of_noise_in_python(
    method: str, dtype: torch.dtype, filters: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = Engine(model(dtype), method=method)
    options: dict[str, Any] = {"max_new_tokens": 24, "ignore_eos": True, "temperature": 0.8, **filters}
    texts = [prompt(12, seed) for seed in range(4)]
    native = [engine.generate(text, seed=seed, **options) for seed, text in enumerate(texts)]
    monkeypatch.setattr("selfspec.decoding.request.choosing_path", lambda *_, **__: Path("drawn in Python"))
    for seed, (text, generation) in enumerate(zip(texts, native, strict=True)):
        assert engine.generate(text, seed=seed, **options).token_ids == generation.token_ids
    assert len({generation.token_ids for generation in native}) == len(texts)
    assert method == "autoregressive" or sum(generation.drafted for generation in native) > 0


@pytest.mark.parametrize("dtype", TARGETS, ids=str)
@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("method", ["auto", "autoregressive", "low-bit", "prompt-lookup", "token-recycling"])
def test_penalties_and_biases_are_those_of_processors(
    method: str, temperature: float, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In runs, drafts and verifications of chains and trees, for sequences beside each other."""
    engine = Engine(model(dtype), method=method)
    texts = [3 * prompt(9, seed) for seed in range(3)]
    given: list[dict[str, Any]] = [
        {"repetition_penalty": 1.3},
        {"presence_penalty": 0.5, "frequency_penalty": -0.2, "min_tokens": 9},
        {"logit_bias": {7: 2.0, 11: -100.0, 12: 1.5}, "repetition_penalty": 0.8, "top_k": 30},
    ]
    params = [
        SamplingParams(28, temperature=temperature, seed=seed, **{"ignore_eos": "min_tokens" not in own, **own})
        for seed, own in enumerate(given)
    ]
    with monkeypatch.context() as patch:
        if method != "token-recycling":  # which keeps what else was likely
            patch.setattr(ScoreProcessor, "__call__", _only_of_first_tokens(ScoreProcessor.__call__))
        native = engine.generate_each([*zip(texts, params, strict=True)])
    assert method == "autoregressive" or sum(generation.drafted for generation in native) > 0
    monkeypatch.setattr("selfspec.decoding.request.choosing_path", lambda *_, **__: Path("chosen in Python"))
    slowly = Engine(engine.target.model, method="autoregressive")
    assert [slowly.generate(*each).token_ids for each in zip(texts, params, strict=True)] == [
        generation.token_ids for generation in native
    ]


def _only_of_first_tokens(process: Any) -> Any:
    """Fails where the scores of a later token are made in Python."""

    def processed(self: ScoreProcessor, logits: torch.Tensor, context: Any) -> torch.Tensor:
        assert self.keeps_scores or context(0).shape[1] == len(3 * prompt(9, 0))
        return process(self, logits, context)

    return processed


def test_only_a_cpu_filters_and_penalises() -> None:
    given: list[dict[str, Any]] = [{"top_p": 0.9}, {"repetition_penalty": 1.1}, {"logit_bias": {3: 1.0}}]
    filtered = [build_processors(SamplingParams(temperature=0.7, **each)) for each in given]
    for on_host in (True, False):
        for each in filtered:
            assert choosing_path(Coupled(1), each, on_host=on_host).native == on_host
        assert choosing_path(Coupled(1), build_processors(SamplingParams(temperature=0.7)), on_host=on_host).native
        penalised = build_processors(SamplingParams(repetition_penalty=1.1))
        assert choosing_path(Greedy(), penalised, on_host=on_host).native == on_host


@pytest.mark.parametrize("likely", [ALL, Likely(9), Likely(0, 0.9), Likely(0, 1, 0.1)])
def test_logits_that_are_not_numbers_draw_a_token_all_the_same(likely: Likely) -> None:
    """Their row is refused later; until then the token has to be one of the vocabulary."""
    broken = model()
    broken.model.norm.weight.data.fill_(float("nan"))
    target = Target(broken)
    drawing = Drawing(seed_key(1), 0.7, likely)
    forward = target.at(None).lay_out(target.new_sequence(9, 9, 9), 2, start=3, drawing=drawing)
    tokens, values = drawn(target, forward)
    assert values.isnan().all()
    assert ((tokens >= 0) & (tokens < VOCABULARY)).all()
