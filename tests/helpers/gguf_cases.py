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
from selfspec.loading.gguf_tensors import find_parameters, stored_values
from selfspec.loading.without_weights import build_on_meta

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
_CONVOLUTIONS = {"layer_types": ["conv", "full_attention", "conv"] * 2}
_FALCON = {"head_dim": 16, "mamba_d_ssm": 128, "mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 16}
_NEMOTRON = {
    **{"head_dim": 16, "mamba_num_heads": 8, "mamba_head_dim": 16, "ssm_state_size": 16, "n_groups": 2},
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},  # which its layers do not read
}
HYBRIDS: dict[str, dict[str, Any]] = {
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
