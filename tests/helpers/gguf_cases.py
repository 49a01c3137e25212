"""Models of every family as GGUF files can hold them, and what is read back, run by transformers."""

import functools
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from helpers.gguf_families import dequantise, save_family
from helpers.models import LAYERS, RELATIVES, VARIANTS, VOCABULARY, make, prompt
from selfspec.loading.gguf_families import read_config
from selfspec.loading.gguf_file import GgufFile
from selfspec.loading.gguf_tensors import find_parameters
from selfspec.loading.without_weights import build_on_meta, stored_values

LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 1000.0,
    "short_factor": [1.0 + 0.05 * index for index in range(8)],
    "long_factor": [2.0 + 0.5 * index for index in range(8)],
    "original_max_position_embeddings": 256,  # the least that llama.cpp tells from more
}
CASES: dict[str, dict[str, Any]] = {
    "llama": {},
    "llama-tied-biases": {},
    "llama-ungrouped": {},
    "llama-multi-query": {},
    "llama-linear-rope": {},
    "llama-llama3-rope": {},
    "llama-yarn-rope": {},
    "mistral": {},
    "mixtral": {},
    "qwen2": {},
    "qwen3": {},
    "qwen3-window": {"use_sliding_window": False, "layer_types": None},
    "qwen3-moe": {"mlp_only_layers": []},
    "qwen2-moe": {"use_sliding_window": False, "layer_types": None},
    "olmoe": {"num_key_value_heads": 4},
    "granite-moe": {},
    "smollm3": {"no_rope_layer_interval": 4},
    "phi3": {},
    "phi3-window": {},
    "phi3-longrope": {"original_max_position_embeddings": 256, "rope_parameters": LONGROPE},
    "olmo2": {},
    "granite": {},
    "gemma2": {"query_pre_attn_scalar": 16},
    "gemma3": {"query_pre_attn_scalar": 24, "sliding_window_pattern": 6},
    "starcoder2": {},
    "starcoder2-window": {"sliding_window": None, "use_bias": True},
    "glm4": {},
    "glm4-whole-rope": {},
    "stablelm": {},
    "stablelm-head-norms": {},
    "exaone4": {"sliding_window": None, "layer_types": ["full_attention"] * 6},
    "seed_oss": {},
    "ernie4_5": {"use_bias": False},
    "arcee": {"mlp_bias": False},
    "gemma": {},
    "gpt-oss": {},
    "glm4-moe": {},
    "deepseek_v2": {},
    "deepseek_v2-yarn": {},
    "deepseek_v3": {},
    "qwen3_next": {},
    "qwen3_5_text": {},
    "qwen3_5_moe_text": {},
    "olmo3": {},
    "ernie4_5_moe": {"use_bias": False},
    "hunyuan": {},
    "minimax_m2": {
        "rope_parameters": {"rope_type": "default", "rope_theta": 1000.0, "partial_rotary_factor": 0.5},
    },
    "dots1": {"sliding_window": None, "num_key_value_heads": 4},
    "nemotron": {},
    "cohere2": {},
    "falcon_h1": {},
    "falcon_h1-norm": {},
    "nemotron_h": {},
    "nemotron_h-moe": {},
    "lfm2": {},
    "lfm2_moe": {},
    "mellum": {
        "rope_parameters": {
            kind: {"rope_type": "default", "rope_theta": 1000.0} for kind in ("full_attention", "sliding_attention")
        },
    },
    "solar_open": {
        "rope_parameters": {"rope_type": "default", "rope_theta": 1000.0, "partial_rotary_factor": 1.0},
    },
    **{
        case: {}
        for case in (
            *("exaone_moe", "hy_v3", "jais2", "glm", "iquestcoder", "internlm3"),
            *("gpt2", "gpt_bigcode", "gpt_neox", "gpt_neox-serial", "bloom", "mpt", "mpt-clipped", "falcon"),
            *("falcon-two-norms", "falcon-one-norm", "phi", "phimoe", "cohere", "cohere-head-norms", "olmo"),
            *("olmo-clipped", "exaone", "llama4_text", "ministral3", "hunyuan_v1_moe", "granitemoeshared"),
            *("granitemoehybrid", "granitemoehybrid-dense", "mamba", "falcon_mamba", "mamba2", "jamba"),
            *("jamba-dense", "minicpm3", "glm4_moe_lite", "afmoe", "apertus", "youtu"),
            *("granite_swa", "granitemoe_swa", "granitemoe_swa-alone"),
            *("cohere2_moe", "cohere2_moe-softmax", "mimo_v2_flash", "sarvam_moe", "sarvam_moe-groups", "laguna"),
            "laguna-whole",
            *("gemma4_text", "gemma4_text-alike", "gemma4_text-experts", "gemma4_unified_text"),
        )
    },
}
"""Variants by name, with the settings that a GGUF file cannot hold set to what it means."""


_SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
    "tie_word_embeddings": False,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1000.0},
}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
_DELTA_NETS = {
    "head_dim": 32,
    "layer_types": ["linear_attention", "linear_attention", "full_attention"] * 2,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1000.0, "partial_rotary_factor": 0.5},
}
_PARTIAL = {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}}
_CONVOLUTIONS = {"layer_types": ["conv", "full_attention", "conv"] * 2}
_FALCON = {"head_dim": 16, "mamba_d_ssm": 128, "mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 16}
_NEMOTRON = {
    **{"head_dim": 32, "mamba_num_heads": 8, "mamba_head_dim": 16, "ssm_state_size": 16, "n_groups": 2},
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},  # which its layers do not read
}
_GRANITE = {
    "embedding_multiplier": 3.0,
    "residual_multiplier": 0.7,
    "attention_multiplier": 0.2,
    "logits_scaling": 0.5,
    "shared_intermediate_size": 48,
}
_GRANITE_SWA = {
    **{name: value for name, value in _GRANITE.items() if name != "shared_intermediate_size"},
    "layer_types": ["full_attention", "sliding_attention", "sliding_attention"] * 2,
    "sliding_window": 16,
}
_GRANITE_HYBRID = {
    **_GRANITE,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"] * 2,
    **{"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 16, "mamba_n_groups": 2},
    "max_position_embeddings": 2**20,
}
_MAMBA = {"state_size": 16, "time_step_rank": 4, "intermediate_size": 128}
_JAMBA = {
    **{"attn_layer_period": 3, "attn_layer_offset": 1, "expert_layer_period": 2, "expert_layer_offset": 1},
    **{"mamba_d_state": 16, "mamba_dt_rank": 4},
}
_LATENT = {
    **{"q_lora_rank": 32, "kv_lora_rank": 64, "qk_nope_head_dim": 16, "qk_rope_head_dim": 32, "v_head_dim": 16},
}
_FALCON_40B = {
    **{"new_decoder_architecture": True, "multi_query": False, "num_kv_heads": 2, "max_position_embeddings": 2048},
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
}
_CLIPPED = 0.8
_GEMMA4 = {
    "head_dim": 16,
    "global_head_dim": 32,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2,
    "sliding_window": 16,
    "final_logit_softcapping": 30.0,
    "tie_word_embeddings": True,
    "hidden_size_per_layer_input": 0,
    "rope_parameters": {
        "full_attention": {"rope_type": "proportional", "rope_theta": 1000.0, "partial_rotary_factor": 0.25},
        "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
    },
}
_COHERE2_MOE = {
    **{"num_experts": 4, "num_experts_per_tok": 2, "head_dim": 16, "intermediate_size": 32, "sliding_window": 16},
    "layer_types": ["full_attention", "sliding_attention", "sliding_attention"] * 2,
    "tie_word_embeddings": True,
}
_SARVAM = {
    **{"head_dim": 16, "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
    **{"n_shared_experts": 1, "first_k_dense_replace": 1, "routed_scaling_factor": 2.5},
    "rope_parameters": {"rope_type": "default", "rope_theta": 1000.0, "partial_rotary_factor": 1.0},
}
_LAGUNA = {
    **{"num_experts": 4, "num_experts_per_tok": 2, "head_dim": 32, "moe_intermediate_size": 32},
    **{"shared_expert_intermediate_size": 48, "moe_routed_scaling_factor": 2.5, "sliding_window": 16},
    "rope_parameters": {
        "full_attention": {
            **{"rope_type": "yarn", "rope_theta": 1000.0, "factor": 4.0, "original_max_position_embeddings": 256},
            "partial_rotary_factor": 0.5,
        },
        "sliding_attention": {"rope_type": "default", "rope_theta": 100.0, "partial_rotary_factor": 1.0},
    },
}
HYBRIDS: dict[str, dict[str, Any]] = {
    "gpt2": {"n_inner": 256, "tie_word_embeddings": True},
    "gpt_bigcode": {"n_inner": 256, "tie_word_embeddings": True, "num_key_value_heads": 1},
    "gpt_neox": _PARTIAL,
    "phi": {**_PARTIAL, "intermediate_size": 256, "num_key_value_heads": 4},
    "gpt_neox-serial": {**_PARTIAL, "use_parallel_residual": False},
    "bloom": {"tie_word_embeddings": True},
    "mpt": {"max_seq_len": 1024},
    "mpt-clipped": {"max_seq_len": 1024, "attn_config": {"clip_qkv": _CLIPPED}},
    "falcon": {**_FALCON_40B, "new_decoder_architecture": False, "multi_query": True, "num_kv_heads": 1},
    "falcon-two-norms": {**_FALCON_40B, "num_ln_in_parallel_attn": 2},
    "falcon-one-norm": {**_FALCON_40B, "num_ln_in_parallel_attn": 1},
    "phimoe": {"num_local_experts": 4, "num_experts_per_tok": 2, "attention_bias": True, "lm_head_bias": True},
    "cohere": {"tie_word_embeddings": True, "rope_parameters": {"rope_type": "default", "rope_theta": 1000.0}},
    "cohere-head-norms": {"tie_word_embeddings": True, "use_qk_norm": True},
    "olmo": {},
    "olmo-clipped": {"clip_qkv": _CLIPPED},
    "exaone": {},
    "llama4_text": {
        "intermediate_size_mlp": 80,
        "num_local_experts": 4,
        "num_experts_per_tok": 1,
        "interleave_moe_layer_step": 2,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1000.0},
    },
    "ministral3": {
        "head_dim": 16,
        "rope_parameters": {
            **{"rope_type": "yarn", "rope_theta": 1000.0, "factor": 16.0, "original_max_position_embeddings": 32},
            **{"beta_fast": 32.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1},
        },
    },
    "hunyuan_v1_moe": {"head_dim": 16, "num_experts": 4, "moe_topk": 2},
    "granite_swa": {**_GRANITE_SWA, "layer_rope_theta": [0.0, 1000.0, 1000.0] * 2},
    "granitemoe_swa": {
        **_GRANITE_SWA,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "shared_intermediate_size": 48,
    },
    "granitemoe_swa-alone": {**_GRANITE_SWA, "num_local_experts": 4, "num_experts_per_tok": 2},
    "granitemoeshared": {**_GRANITE, "num_local_experts": 4, "num_experts_per_tok": 2},
    "granitemoehybrid": {**_GRANITE_HYBRID, "num_local_experts": 4, "num_experts_per_tok": 2},
    "granitemoehybrid-dense": {
        **_GRANITE_HYBRID,
        "num_local_experts": 0,
        "num_experts_per_tok": 0,
        "shared_intermediate_size": 96,
    },
    "jamba": {**_JAMBA, "num_experts": 4, "num_experts_per_tok": 2},
    "jamba-dense": {**_JAMBA, "num_experts": 1, "num_experts_per_tok": 1},
    "minicpm3": {**_LATENT, "num_key_value_heads": 4, "scale_emb": 12.0},
    "glm4_moe_lite": {
        **_LATENT,
        **{"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "num_key_value_heads": 4},
        **{"n_group": 1, "topk_group": 1, "n_shared_experts": 1},
    },
    "afmoe": {
        **{"head_dim": 16, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
        **{"num_shared_experts": 1, "num_dense_layers": 1, "route_scale": 1.5, "mup_enabled": True},
        "sliding_window": 16,
    },
    "cohere2_moe": {
        **_COHERE2_MOE,
        **{"expert_selection_fn": "sigmoid", "num_shared_experts": 2, "rms_norm_eps": None},
        "mlp_layer_types": ["dense"] * 2 + ["sparse"] * 4,
        "prefix_dense_intermediate_size": 80,
    },
    "cohere2_moe-softmax": {
        **_COHERE2_MOE,
        **{"expert_selection_fn": "softmax", "rms_norm_eps": 1e-6, "prefix_dense_intermediate_size": None},
    },
    "sarvam_moe": _SARVAM,
    "sarvam_moe-groups": {
        **_SARVAM,
        **{"n_routed_experts": 8, "n_group": 4, "topk_group": 2},
        "rope_parameters": {"rope_type": "default", "rope_theta": 1000.0, "partial_rotary_factor": 0.5},
    },
    "laguna": {
        **_LAGUNA,
        "num_attention_heads_per_layer": [4, 8, 8, 8, 4, 8],
        "layer_types": ["full_attention", *["sliding_attention"] * 3, "full_attention", "sliding_attention"],
    },
    "laguna-whole": {**_LAGUNA, "gating": "per-element", "sliding_window": 0},
    "mimo_v2_flash": {
        **{"head_dim": 32, "v_head_dim": 16, "sliding_window": 16, "attention_value_scale": 0.707},
        **{"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
        "layer_types": ["full_attention", "sliding_attention", "sliding_attention"] * 2,
        "rope_parameters": {
            "full_attention": {"rope_type": "default", "rope_theta": 1000.0, "partial_rotary_factor": 0.5},
            "sliding_attention": {"rope_type": "default", "rope_theta": 100.0, "partial_rotary_factor": 0.5},
        },
    },
    "apertus": {},
    "youtu": {**_LATENT, "num_key_value_heads": 4},
    "gemma4_text": {
        **_GEMMA4,
        **{"hidden_size_per_layer_input": 32, "vocab_size_per_layer_input": VOCABULARY},
        **{"num_kv_shared_layers": 3, "use_double_wide_mlp": True},
    },
    "gemma4_unified_text": {**_GEMMA4, "use_bidirectional_attention": None},
    "gemma4_text-alike": {**_GEMMA4, "attention_k_eq_v": True, "num_global_key_value_heads": 1},
    "gemma4_text-experts": {
        **_GEMMA4,
        **{"enable_moe_block": True, "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 32},
    },
    "mamba": _MAMBA,
    "falcon_mamba": _MAMBA,
    "mamba2": {"num_heads": 8, "head_dim": 16, "state_size": 16, "n_groups": 2},
    "qwen3_next": {**_DELTA_NETS, **_EXPERTS, "shared_expert_intermediate_size": 48},
    "qwen3_5_text": _DELTA_NETS,
    "qwen3_5_moe_text": {**_DELTA_NETS, **_EXPERTS, "shared_expert_intermediate_size": 48},
    "cohere2": {
        "tie_word_embeddings": True,
        "layer_types": ["sliding_attention"] * 3 + ["full_attention"] + ["sliding_attention"] * 2,
        "sliding_window": 16,
    },
    "falcon_h1": {**_FALCON, "mamba_n_groups": 1, "mamba_norm_before_gate": False},
    "falcon_h1-norm": {**_FALCON, "mamba_rms_norm": True, "mamba_n_groups": 2, "mamba_norm_before_gate": False},
    "nemotron_h": {**_NEMOTRON, "layers_block_type": ["linear_attention", "mlp", "full_attention"] * 2},
    "nemotron_h-moe": {
        **_NEMOTRON,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "intermediate_size": 32,
        "layers_block_type": ["linear_attention", "moe", "full_attention"] * 2,
        "n_routed_experts": 4,
        "moe_shared_expert_intermediate_size": 48,
        "routed_scaling_factor": 1.5,
    },
    "lfm2": {**_CONVOLUTIONS, "block_auto_adjust_ff_dim": False},
    "lfm2_moe": {"tie_word_embeddings": True, **_CONVOLUTIONS, **_EXPERTS, "num_dense_layers": 2},
}
"""Families without a row of the table, by ``model_type``."""


def _logarithms_of_numbers(values: torch.Tensor) -> torch.Tensor:
    """Numbers near these that are what comes back when their exponentials, in float32, are written to a file."""
    found = values.double().numpy()
    for _ in range(16):
        found = np.log(np.exp(found).astype(np.float32).astype(np.float64)).astype(np.float32).astype(np.float64)
    return torch.from_numpy(found).float()


@functools.cache
def built(case: str) -> PreTrainedModel:
    """The model of a case, shared by all tests."""
    if case in HYBRIDS:
        config: Any = AutoConfig.for_model(case.partition("-")[0], **{**_SIZES, **HYBRIDS[case], **CASES[case]})
        config.pad_token_id = None
    else:
        config = {**VARIANTS, **RELATIVES}[case](**CASES[case])
    config.bos_token_id, config.eos_token_id = None, None
    model = make(config, case)
    for name, parameter in model.named_parameters():
        if name.endswith("A_log"):
            parameter.data = _logarithms_of_numbers(parameter.detach())
    for name, buffer in model.named_buffers():
        if name.endswith("layer_scalar"):
            buffer.fill_(0.9)
    return model


def open_case(case: str, folder: Path, **options: Any) -> GgufFile:
    """The file of a case, written anew; takes the options of ``save_family``."""
    return GgufFile.open(save_family(built(case), folder / "model.gguf", **options))


def read_model(file: GgufFile) -> PreTrainedModel:
    """The model in a file, by transformers."""
    config = read_config(file.metadata, file.tensors)
    sources = find_parameters(file.tensors, build_on_meta(config))
    model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    parameters = stored_values(model)
    assert sources.keys() == parameters.keys()
    with torch.no_grad():
        for name, parameter in parameters.items():
            values = sources[name].read(lambda tensor: dequantise(file.tensors[tensor]))
            parameter.copy_(torch.from_numpy(values).reshape(parameter.shape))
    done: PreTrainedModel = model.eval()
    return done


def logits(model: Any, ids: list[int]) -> torch.Tensor:
    """The scores of all positions, ``[positions, vocabulary]``."""
    with torch.inference_mode():
        model.set_attn_implementation("eager")
        scores: torch.Tensor = model(torch.tensor([ids])).logits[0]
        return scores


def assert_same_model(file: GgufFile, case: str) -> None:
    """Checks that the model in a file computes the very numbers of the one that was written."""
    ids = prompt(40)
    assert torch.equal(logits(read_model(file), ids), logits(built(case), ids))
