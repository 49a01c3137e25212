"""Attention to latents (DeepSeek's MLA) in a native forward against transformers' modules; rows together and alone."""

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, DeepseekV2Config, DeepseekV3Config

import selfspec
from helpers.kernels import needs_kernels
from helpers.models import SMALLEST_GAP, make, prompt
from selfspec import Engine, errors
from selfspec.runtimes.costs.measuring import estimate_row_costs
from selfspec.runtimes.latent import CompiledLatentAttention
from selfspec.runtimes.target import Target

pytestmark = needs_kernels

SIZES: dict[str, Any] = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": 512,
    "q_lora_rank": 64,
    "kv_lora_rank": 64,
    "qk_nope_head_dim": 24,
    "qk_rope_head_dim": 32,
    "v_head_dim": 40,
    "n_routed_experts": 6,
    "num_experts_per_tok": 2,
    "n_group": 3,
    "topk_group": 2,
    "n_shared_experts": 1,
    "moe_intermediate_size": 32,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 1.5,
    "num_nextn_predict_layers": 0,
    **dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id")),
}
YARN = {
    **{"rope_type": "yarn", "rope_theta": 1000.0, "factor": 4.0, "mscale": 1.0, "mscale_all_dim": 0.7},
    **{"beta_fast": 32.0, "beta_slow": 1.0, "original_max_position_embeddings": 128},
}
SIZES_2 = {name: size for name, size in SIZES.items() if name != "num_nextn_predict_layers"}
CONFIGS = {
    "v2": functools.partial(DeepseekV2Config, **SIZES_2, topk_method="group_limited_greedy"),
    "v2-whole-queries-yarn": functools.partial(
        DeepseekV2Config, **{**SIZES_2, "q_lora_rank": None}, rope_parameters=YARN
    ),
    "v3": functools.partial(DeepseekV3Config, **SIZES),
    "v3-whole-queries": functools.partial(DeepseekV3Config, **{**SIZES, "q_lora_rank": None}),
    "v3-yarn": functools.partial(DeepseekV3Config, **SIZES, rope_parameters=YARN),
}
NAMES = pytest.mark.parametrize("name", CONFIGS)
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
TOKENS = 24
RUNS: list[tuple[str, dict[str, Any]]] = [
    ("autoregressive", {}),
    ("uniform", {"skip_ratio": 0.4}),
    ("layerskip", {"exit_layer": 4, "draft_length": 3}),
    ("token-recycling", {}),
    ("low-bit", {}),
    ("auto", {}),
]


@functools.cache
@torch.inference_mode(mode=False)
def model(name: str) -> Any:
    return make(CONFIGS[name](), f"{name}-latent")


@functools.cache
@torch.inference_mode(mode=False)
def in_dtype(name: str, dtype: torch.dtype) -> Any:
    made = AutoModelForCausalLM.from_config(model(name).config, dtype=dtype).eval()
    made.load_state_dict(model(name).state_dict())
    return made


def text(given_model: Any, ids: list[int]) -> tuple[int, ...]:
    output = given_model.generate(
        torch.tensor([ids]),
        attention_mask=torch.ones(1, len(ids), dtype=torch.long),
        do_sample=False,
        max_new_tokens=TOKENS,
        pad_token_id=0,
        output_logits=True,
        return_dict_in_generate=True,
    )
    best = torch.cat(output.logits).topk(2).values
    assert float((best[:, 0] - best[:, 1]).min()) > SMALLEST_GAP, "take another prompt"
    return tuple(output.sequences[0, len(ids) :].tolist())


@torch.inference_mode()
def states(target: Target, ids: torch.Tensor, *chunks: int) -> torch.Tensor:
    """The residual stream at the end of all rows, which run in forwards of some rows each."""
    state, found = target.new_sequence(len(ids), len(ids), len(ids)), []
    for part in ids.split(list(chunks)):
        forward = target.lay_out(state, len(part))
        found.append(target.run(target.embed(part), range(target.sublayer_count), forward).hidden_states)
        state.cache.commit(range(len(part)))
    return torch.cat(found)


@NAMES
@DTYPES
def test_kernels_compute_what_modules_compute(name: str, dtype: torch.dtype) -> None:
    target, ids = Target(in_dtype(name, dtype)), torch.tensor(prompt(40))
    assert all(isinstance(each, CompiledLatentAttention) for each in target.sublayers[::2])
    assert target.at(None).path().native
    found, wanted = (states(each, ids, *[8] * 5) for each in (target, Target(in_dtype(name, dtype), "eager")))
    if dtype == torch.float32:
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)
    else:
        assert (found - wanted).float().norm() < 0.1 * wanted.float().norm()


@NAMES
@DTYPES
def test_rows_are_independent_of_each_other(name: str, dtype: torch.dtype) -> None:
    target, ids = Target(in_dtype(name, dtype)), torch.tensor(prompt(24))
    assert target.independent_rows > 0
    alone = states(target, ids, *[1] * 24)
    for chunks in ([8] * 3, [1, 2, 3, 4, 5, 9], [16, 8]):
        assert torch.equal(states(target, ids, *chunks), alone)


@pytest.mark.parametrize("name", ["v2", "v3", "v3-whole-queries"])
def test_low_bit_weights_write_what_their_modules_write(name: str) -> None:
    """What expands latents keeps its bits."""
    made, ids = selfspec.quantise(model(name), "int8"), prompt(40, seed=4)
    assert type(made.model.layers[0].self_attn.kv_b_proj) is torch.nn.Linear
    assert Target(made).at(None).path().native
    assert Engine(made).generate(ids, max_new_tokens=TOKENS).token_ids == text(made, ids)


@NAMES
def test_every_method_writes_transformers_text(name: str) -> None:
    """A prompt of more rows than kernels take in float32 runs through the modules, on the same cache."""
    made, prompts = model(name), [prompt(40, seed=4), prompt(7, seed=1)]
    wanted = [text(made, ids) for ids in prompts]
    for method, options in RUNS:
        found = Engine(made, method=method, settings=options).generate([*prompts, prompts[0]], max_new_tokens=TOKENS)
        assert [each.token_ids for each in found] == [*wanted, wanted[0]], method
        if method not in ("autoregressive", "auto"):
            assert sum(each.drafted for each in found) > 0, method
            assert sum(each.accepted for each in found) > 0, method


def test_the_cache_has_a_latent_for_all_heads() -> None:
    target = Target(model("v3"))
    cache = target.new_sequence(8, 32, 32).cache
    assert cache.size_in_bytes == 6 * 32 * (64 + 32) * 4
    assert target.slot_bytes == 6 * (64 + 32) * 4
    with pytest.raises(errors.UnsupportedModelError, match="cannot have 8 bits: it holds latents"):
        Target(model("v3"), cache_bits=8)


def test_latents_are_kept_for_later_requests_and_processes(tmp_path: Path) -> None:
    made, ids = model("v3"), prompt(200, seed=4)
    wanted = text(made, ids)
    engine = Engine(made, cache_dir=tmp_path)
    first, second = (engine.generate(ids, max_new_tokens=TOKENS) for _ in range(2))
    engine.flush()
    third = Engine(made, cache_dir=tmp_path).generate(ids, max_new_tokens=TOKENS)
    assert first.token_ids == second.token_ids == third.token_ids == wanted
    assert first.cached_prompt_tokens == 0
    assert second.cached_prompt_tokens > 100
    assert third.cached_prompt_tokens > 100


def test_costs_of_rows_are_those_of_the_experts_that_they_choose() -> None:
    costs = estimate_row_costs(Target(model("v3")))
    first, many = costs(2) - costs(1), costs(24) - costs(23)
    assert first > many > 0
