"""Mixtures of experts in a native forward against transformers' modules; rows together and alone; low-bit weights."""

import functools
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import (
    AutoModelForCausalLM,
    Ernie4_5_MoeConfig,
    Glm4MoeConfig,
    GptOssConfig,
    GraniteMoeConfig,
    MixtralConfig,
    OlmoeConfig,
    Qwen2MoeConfig,
    Qwen3MoeConfig,
)

import selfspec
from helpers.kernels import needs_kernels
from helpers.models import make, prompt
from selfspec import Engine, errors
from selfspec.runtimes.costs.measuring import estimate_row_costs
from selfspec.runtimes.packed import LowBitExperts
from selfspec.runtimes.precision import Precision
from selfspec.runtimes.target import Target

pytestmark = needs_kernels

SIZES: dict[str, Any] = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 6,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 512,
    **dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id")),
}
QWEN = {**SIZES, "num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
BIASED = {"moe_intermediate_size": 32, "n_shared_experts": 1, "first_k_dense_replace": 0, "routed_scaling_factor": 1.5}
CONFIGS = {
    "mixtral": functools.partial(MixtralConfig, **SIZES, num_local_experts=4, num_experts_per_tok=2),
    "qwen3": functools.partial(Qwen3MoeConfig, **QWEN, head_dim=32, norm_topk_prob=True),
    "qwen2": functools.partial(Qwen2MoeConfig, **QWEN, shared_expert_intermediate_size=96),
    "olmoe": functools.partial(OlmoeConfig, **SIZES, num_experts=8, num_experts_per_tok=3),
    "granite": functools.partial(
        GraniteMoeConfig, **SIZES, num_local_experts=5, num_experts_per_tok=1, residual_multiplier=0.7
    ),
    "glm4": functools.partial(
        Glm4MoeConfig,
        **SIZES,
        **BIASED,
        n_routed_experts=6,
        num_experts_per_tok=2,
        n_group=3,
        topk_group=2,
        head_dim=32,
    ),
    "gpt-oss": functools.partial(
        GptOssConfig,
        **SIZES,
        head_dim=32,
        num_local_experts=6,
        num_experts_per_tok=3,
        sliding_window=16,
        rope_parameters={
            **{"rope_type": "yarn", "rope_theta": 1000.0, "factor": 4.0, "truncate": False},
            **{"beta_fast": 32.0, "beta_slow": 1.0, "original_max_position_embeddings": 128},
        },
        swiglu_limit=0.9,
    ),
    "ernie": functools.partial(
        Ernie4_5_MoeConfig, **SIZES, moe_num_experts=6, moe_k=3, moe_num_shared_experts=1, moe_intermediate_size=32
    ),
}
NAMES = pytest.mark.parametrize("name", CONFIGS)
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
TOKENS = 24


@functools.cache
@torch.inference_mode(mode=False)
def model(name: str) -> Any:
    return make(CONFIGS[name](), f"{name}-mixture")


def text(given_model: Any, ids: list[int]) -> tuple[int, ...]:
    """What transformers' own greedy ``generate`` writes."""
    mask = torch.ones(1, len(ids), dtype=torch.long)
    options = {"attention_mask": mask, "max_new_tokens": TOKENS, "do_sample": False, "pad_token_id": 0}
    return tuple(given_model.generate(torch.tensor([ids]), **options)[0, len(ids) :].tolist())


@torch.inference_mode()
def states(target: Target, ids: torch.Tensor, *chunks: int) -> torch.Tensor:
    """The residual stream at the end of all rows, which run in forwards of some rows each."""
    state, found = target.new_sequence(len(ids), len(ids), len(ids)), []
    for part in ids.split(list(chunks)):
        forward = target.lay_out(state, len(part))
        found.append(target.run(target.embed(part), range(target.sublayer_count), forward).hidden_states)
        state.cache.commit(range(len(part)))
    return torch.cat(found)


@settings(max_examples=25)
@given(
    count=st.integers(1, 9),
    top=st.integers(1, 9),
    inner=st.sampled_from([8, 24, 40]),
    shared=st.sampled_from([0, 24]),
    normalizes=st.booleans(),
    rows=st.integers(1, 300),
)
@torch.inference_mode(mode=False)
def test_a_mixture_is_transformers_module(
    count: int, top: int, inner: int, shared: int, normalizes: bool, rows: int
) -> None:
    sizes = {**SIZES, "hidden_size": 32, "num_attention_heads": 1, "num_hidden_layers": 1, "vocab_size": 8}
    experts = {"num_experts": count, "num_experts_per_tok": min(top, count), "moe_intermediate_size": inner}
    more = {"shared_expert_intermediate_size": shared} if shared else {"head_dim": 32}
    kind = Qwen2MoeConfig if shared else Qwen3MoeConfig
    made = make(kind(**{**sizes, **experts, **more}, norm_topk_prob=normalizes), f"{count} {top} {inner} {rows}")
    for dtype, close in ((torch.float32, 1e-5), (torch.bfloat16, 0.05)):
        own = Target(made.to(dtype))
        stream = torch.randn(rows, 32, generator=torch.Generator().manual_seed(rows)).to(dtype)
        with torch.inference_mode():
            state = own.new_sequence(rows, rows, rows)
            forward = own.lay_out(state, rows)
            native = own._prepared.native
            assert native is not None
            found = stream.clone()
            native.run(found, (1,), forward)
            wanted = Target(made, "eager").run(stream, (1,), forward).hidden_states
            if dtype == torch.bfloat16:  # another expert may be chosen by rounding
                assert (found - wanted).abs().float().median() <= close
            else:
                torch.testing.assert_close(found, wanted, rtol=close, atol=close)
            for row in (0, rows - 1):
                alone = stream[row : row + 1].clone()
                native.run(alone, (1,), own.lay_out(state, 1))
                assert torch.equal(alone[0], found[row])


@settings(max_examples=25)
@given(
    groups=st.integers(1, 4),
    size=st.integers(2, 4),
    kept=st.integers(1, 4),
    top=st.integers(1, 8),
    normalizes=st.booleans(),
    rows=st.integers(1, 40),
)
@torch.inference_mode(mode=False)
def test_a_router_with_bias_and_groups_is_transformers_module(
    groups: int, size: int, kept: int, top: int, normalizes: bool, rows: int
) -> None:
    """In bfloat16 too: its logits are float32, whatever the dtype."""
    kept = min(kept, groups)
    sizes = {**SIZES, "hidden_size": 32, "num_attention_heads": 1, "num_hidden_layers": 1, "vocab_size": 8}
    experts = {"n_routed_experts": groups * size, "num_experts_per_tok": min(top, kept * size)}
    config = Glm4MoeConfig(
        **{**sizes, **experts, **BIASED},
        n_group=groups,
        topk_group=kept,
        norm_topk_prob=normalizes,
    )
    made = make(config, f"{groups} {size} {kept} {top} {rows}")
    for dtype, close in ((torch.float32, 1e-5), (torch.bfloat16, 0.05)):
        own = Target(made.to(dtype))
        stream = torch.randn(rows, 32, generator=torch.Generator().manual_seed(rows)).to(dtype)
        with torch.inference_mode():
            forward = own.lay_out(own.new_sequence(rows, rows, rows), rows)
            native = own._prepared.native
            assert native is not None
            found = stream.clone()
            native.run(found, (1,), forward)
            wanted = Target(made, "eager").run(stream, (1,), forward).hidden_states
            torch.testing.assert_close(found, wanted, rtol=close, atol=close)
            assert (wanted - stream).abs().max() > 0


@NAMES
@DTYPES
def test_rows_are_independent_of_each_other(name: str, dtype: torch.dtype) -> None:
    made = AutoModelForCausalLM.from_config(model(name).config, dtype=dtype).eval()
    made.load_state_dict(model(name).state_dict())
    target, ids = Target(made), torch.tensor(prompt(24))
    assert target.independent_rows > 0
    alone = states(target, ids, *[1] * 24)
    for chunks in ([8] * 3, [1, 2, 3, 4, 5, 9], [16, 8]):
        assert torch.equal(states(target, ids, *chunks), alone)


@NAMES
@pytest.mark.parametrize("weights", [None, "int8", "int4"])
def test_every_method_writes_transformers_text(name: str, weights: str | None) -> None:
    """In float32; drafts skip layers, or are of the same layers at 4 bits."""
    made = model(name) if weights is None else selfspec.quantise(model(name), weights)
    assert any(isinstance(module, LowBitExperts) for module in made.modules()) == (weights is not None)
    ids = prompt(20, seed=4)
    wanted = text(made, ids)
    methods: dict[str, dict[str, Any]] = {"autoregressive": {}, "auto": {}, "uniform": {"skip_ratio": 0.4}}
    if weights is None:
        methods["low-bit"] = {}
    for method, options in methods.items():
        engine = Engine(made, method=method, settings=options)
        found = engine.generate([ids, ids[:7], ids], max_new_tokens=TOKENS)
        assert found[0].token_ids == found[2].token_ids == wanted, method
        if method in ("uniform", "low-bit"):
            assert found[0].drafted > 0, method
            assert found[0].accepted > 0, method


def test_costs_of_rows_are_those_of_the_experts_that_they_choose() -> None:
    sparse, dense = Target(model("qwen3")), Target(make(CONFIGS["qwen3"](num_experts_per_tok=6), "all"))
    few, all_of_them = estimate_row_costs(sparse), estimate_row_costs(dense)
    block = sparse.sublayers[1]
    assert few(1) < all_of_them(1)
    read = [few(rows) - (rows - 1) * (few(32) - few(24)) / 8 for rows in (1, 2, 8)]
    assert read[0] < read[1] < read[2]
    assert block.expert_weights == 6 * 3 * 32 * 64  # type: ignore[attr-defined]


def test_experts_of_other_sizes_have_no_low_bit_weights() -> None:
    small = make(CONFIGS["mixtral"](hidden_size=72, num_attention_heads=1, head_dim=32), "small")
    with pytest.raises(errors.UnsupportedModelError, match=r"do not divide into groups|no multiple of 16"):
        Target(small).check_low_bit(Precision.of(8))


@pytest.mark.parametrize(
    "sizes",
    [
        {"num_experts_per_tok": 9},
        {"n_group": 7},
        {"n_group": 4, "topk_group": 1},
        {"n_group": 3, "topk_group": 4},
    ],
    ids=str,
)
def test_a_router_that_chooses_more_than_there_is_never_runs_in_the_kernels(sizes: dict[str, int]) -> None:
    """They would read and write outside their memory, or divide by zero; transformers' module says what is wrong."""
    engine = Engine(make(CONFIGS["glm4"](**sizes), str(sizes)), method="autoregressive", runtime="compiled")
    with pytest.raises(RuntimeError, match=r"is invalid for input|out of range"):
        engine.generate(prompt(11), max_new_tokens=4)
