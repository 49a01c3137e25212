"""Keys and values in 8 bits: kernels against unpacked rows, texts against transformers with a cache that rounds."""

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import DynamicCache, Gemma2Config, LlamaConfig, MistralConfig, PreTrainedModel

from helpers.kernels import needs_kernels
from helpers.models import VARIANTS, build, make, prompt
from helpers.runs import DEFAULT_RUNS, METHODS_OF_ANY_MODEL, RUNS
from selfspec import Engine, Generation
from selfspec.errors import InvalidParameterError, UnsupportedModelError
from selfspec.model.mxint8 import pack, unpack
from selfspec.runtimes import kernels
from selfspec.runtimes.costs.parts import measure_latencies
from selfspec.runtimes.target import Target
from selfspec_lab.testing import verifies_exactly

SIZES: dict[str, Any] = {
    "vocab_size": 128,
    "hidden_size": 96,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 512,
}
CONFIGS = {
    "llama": LlamaConfig(**SIZES),
    "heads-of-96": LlamaConfig(**{**SIZES, "head_dim": 96}),
    "one-key-head": LlamaConfig(**{**SIZES, "head_dim": 192, "num_key_value_heads": 1}),
    "window": MistralConfig(**SIZES, sliding_window=48),
    "capped": Gemma2Config(**SIZES, sliding_window=48, attn_logit_softcapping=5.0, query_pre_attn_scalar=40),
}
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
PREFIX = 77
TOKENS = 24


@cache
@torch.inference_mode(mode=False)
def small(name: str, dtype: torch.dtype) -> PreTrainedModel:
    return make(CONFIGS[name], name).to(dtype)


@cache
@torch.inference_mode(mode=False)
def drafting(dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """Drafts of it with a part of its layers are right fairly often."""
    config = VARIANTS["llama"]()
    config.head_dim = 32
    return make(config, "llama").to(dtype)


class RoundingCache(DynamicCache):
    """transformers' own, of rounded keys and values."""

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *given: Any, **named: Any) -> Any:
        rounded = (unpack(pack(states), states.dtype) for states in (key_states, value_states))
        return super().update(*rounded, *given, **named)


def own_text(model: PreTrainedModel, asked: list[int], tokens: int = TOKENS) -> tuple[int, ...]:
    """What transformers writes with rounded keys and values."""
    with torch.inference_mode():
        output: Any = model.generate(
            torch.tensor([asked]),
            attention_mask=torch.ones(1, len(asked), dtype=torch.long),
            past_key_values=RoundingCache(config=model.config),
            max_new_tokens=tokens,
            do_sample=False,
            pad_token_id=0,
        )
    return tuple(output[0, len(asked) :].tolist())


def ask(engine: Engine, asked: list[int], tokens: int = TOKENS, **options: Any) -> Generation:
    return engine.generate(asked, max_new_tokens=tokens, ignore_eos=True, **options)


# The kernels


@needs_kernels
@DTYPES
@torch.inference_mode()
def test_threads_change_nothing(dtype: torch.dtype) -> None:
    """Several threads that attend for one key head share its unpacked keys and values; one unpacks for itself."""
    model = Target(small("one-key-head", dtype), cache_bits=8)
    found = []
    for threads in (1, 4):
        torch.set_num_threads(threads)
        try:
            sequence = model.new_sequence(PREFIX, PREFIX + 1, PREFIX + 1)
            for rows in (PREFIX, 1):
                layout = model.lay_out(sequence, rows)
                stream = model.embed(torch.arange(rows), layout)
                found.append(model.run(stream, range(model.sublayer_count), layout).hidden_states)
                sequence.cache.length += rows
        finally:
            torch.set_num_threads(1)
    assert torch.equal(found[0], found[2])
    assert torch.equal(found[1], found[3])


@needs_kernels
@DTYPES
@pytest.mark.parametrize("rows", [1, 2, 5, 13, 40])
@pytest.mark.parametrize("name", CONFIGS)
@torch.inference_mode()
def test_kernels_attend_to_the_rounded_rows_bit_for_bit(name: str, rows: int, dtype: torch.dtype) -> None:
    """Rows that see the slots before them alone, so that a cache in the model's dtype can have the rounded ones."""
    if rows > kernels.row_limit(dtype, attends=True):
        pytest.skip("torch is faster with this many rows on this processor")
    draw = torch.Generator().manual_seed(rows)
    targets = [Target(small(name, dtype), "compiled", cache_bits=bits) for bits in (8, None)]
    packed, plain = (each.new_sequence(PREFIX, PREFIX + rows, PREFIX + rows) for each in targets)
    for layer in range(2):
        shape = 2, *packed.cache.keys[0].shape[:2], PREFIX, packed.cache.head_dim
        packed.cache.write(layer, 0, *torch.randn(shape, generator=draw).to(dtype))
        plain.cache.write(layer, 0, *packed.cache.seen(layer, 0, PREFIX))
    stream = torch.randn(rows, SIZES["hidden_size"], generator=draw).to(dtype)
    outputs = []
    for target, state in zip(targets, (packed, plain), strict=True):
        state.cache.length = PREFIX
        forward = target.lay_out(state, rows, depths=range(rows), visible=torch.zeros(rows, rows, dtype=torch.bool))
        native = target.at(None).native
        assert native is not None
        outputs.append(stream.clone())
        native.run(outputs[-1], (2,), forward)
    assert torch.equal(*outputs)
    assert not torch.equal(outputs[0], stream)
    for ours, other in zip(
        (packed.cache.keys, packed.cache.values), (plain.cache.keys, plain.cache.values), strict=True
    ):
        assert torch.equal(ours[1], pack(other[1])), "the kernels round as torch does"


@torch.inference_mode()
def logits(target: Target, chunk: int, tokens: torch.Tensor) -> torch.Tensor:
    """Those of a prompt that is read in chunks."""
    state, found = target.new_sequence(len(tokens), len(tokens), len(tokens)), []
    for part in tokens.split(chunk):
        forward = target.lay_out(state, len(part))
        found.append(target.logits(target.run(target.embed(part), range(4), forward).hidden_states))
        state.cache.commit(range(len(part)))
    return torch.cat(found)


@needs_kernels
@DTYPES
@pytest.mark.parametrize("name", CONFIGS)
def test_a_row_does_not_depend_on_the_others(name: str, dtype: torch.dtype) -> None:
    tokens = torch.tensor(prompt(90))
    target = Target(small(name, dtype), "compiled", cache_bits=8)
    alone = logits(target, 1, tokens)
    for chunk in (2, 7, 16, 90):
        if chunk <= min(kernels.row_limit(dtype, attends=True), kernels.row_limit(dtype)):
            assert torch.equal(logits(target, chunk, tokens), alone)
    exact = logits(Target(small(name, dtype), "compiled"), 1, tokens).float()
    assert 0 < (alone - exact).norm() < 0.05 * exact.norm()


# Texts


@pytest.mark.parametrize("runtime", ["eager", "fused", "auto"])
@pytest.mark.parametrize("method", ["autoregressive", "uniform", "suffix", "clasp", "auto"])
def test_text_is_that_of_transformers_with_a_cache_that_rounds(method: str, runtime: str) -> None:
    settings = RUNS.get(method, DEFAULT_RUNS)[-1].settings
    engine = Engine(drafting(), method=method, runtime=runtime, cache_bits=8, settings=settings)
    asked = prompt(64)
    result = ask(engine, asked, 48)
    assert result.token_ids == own_text(drafting(), asked, 48)
    assert (result.accepted > 0) == (method != "autoregressive")
    assert result.token_ids[0] == own_text(drafting(), asked, 1)[0]


@needs_kernels
@pytest.mark.parametrize("method", [name for name in METHODS_OF_ANY_MODEL if name != "autoregressive"] + ["low-bit"])
def test_every_method_writes_what_plain_decoding_writes_in_bfloat16(method: str) -> None:
    if not verifies_exactly(torch.bfloat16):
        pytest.skip("there are no kernels for this many rows on this machine")
    model, asked = drafting(torch.bfloat16), prompt(64)
    settings = RUNS.get(method, DEFAULT_RUNS)[-1].settings
    plain = Engine(model, method="autoregressive", cache_bits=8)
    engine = Engine(model, method=method, cache_bits=8, settings=settings)
    result = ask(engine, asked, 48)
    assert result.token_ids == ask(plain, asked, 48).token_ids
    assert result.drafted > 0
    sampled = {"temperature": 0.9, "seed": 5}
    assert ask(engine, asked, **sampled).token_ids == ask(plain, asked, **sampled).token_ids
    others = [prompt(length) for length in (5, 40, 64)]
    together = engine.generate(others, max_new_tokens=TOKENS, ignore_eos=True)
    assert [each.token_ids for each in together] == [ask(plain, each).token_ids for each in others]


def test_rounding_changes_the_states_and_memory_is_about_half() -> None:
    model = drafting(torch.bfloat16)
    targets = [Target(model, cache_bits=bits) for bits in (8, None)]
    assert targets[0].slot_bytes * 64 == targets[1].slot_bytes * 33
    caches = [each.new_sequence(10, 100, 100).cache for each in targets]
    assert [each.size_in_bytes for each in caches] == [100 * each.slot_bytes for each in targets]


# What is kept


def test_prefixes_are_kept_in_8_bits(tmp_path: Path) -> None:
    model, asked = drafting(torch.bfloat16), prompt(50)
    plain = ask(Engine(model, method="autoregressive", cache_bits=8), asked).token_ids
    results = []
    for bits in (8, None, 8):
        engine = Engine(model, method="suffix", cache_bits=bits, cache_dir=tmp_path, prefill_chunk=16)
        results.append(ask(engine, asked))
        engine.flush()
        assert engine.prefix_cache is not None
        results.append(ask(engine, [*asked, *results[-1].token_ids, 3]))
    assert len(list(tmp_path.iterdir())) == 2
    assert results[0].token_ids == results[4].token_ids == plain
    assert results[1].token_ids == results[5].token_ids
    assert [each.cached_prompt_tokens > 0 for each in results] == [False, True, False, True, True, True]


def test_what_is_not_finite_is_not_kept() -> None:
    engine = Engine(drafting(), method="suffix", cache_bits=8, prefix_cache=2**20)
    assert engine.prefix_cache is not None
    state = engine.target.new_sequence(4, 4, 4)
    state.cache.write(0, 0, *torch.full((2, 1, 2, 4, 32), torch.nan))
    state.cache.length = 4
    engine.prefix_cache.store(state.cache, [1, 2, 3, 4], version=engine.target.version)
    assert engine.prefix_cache.known([1, 2, 3, 4]) == 0


def test_latencies_are_measured_on_packed_slots() -> None:
    latencies = measure_latencies(Target(drafting(), cache_bits=8), (8, 16), 1)
    assert latencies.attention_base > 0


# Refusals


def test_models_and_runtimes_that_cannot_have_it() -> None:
    with pytest.raises(UnsupportedModelError, match="its heads have 24 numbers, which is no multiple of 32"):
        Engine(build("llama"), cache_bits=8)
    with pytest.raises(InvalidParameterError, match="runtime 'graphs' keeps keys and values in the model's dtype"):
        Engine(drafting(), cache_bits=8, runtime="graphs")
    other = Engine(drafting(), method="suffix")
    with pytest.raises(InvalidParameterError, match="a target with a cache of its own"):
        Engine(drafting(), method=other.method, cache_bits=8)
