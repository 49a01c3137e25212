"""Models of every family as GGUF files can hold them, and what is read back, run by transformers."""

import functools
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from helpers.gguf_families import dequantise, save_family
from helpers.models import RELATIVES, VARIANTS, make, prompt
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
    "olmoe": {},
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
}
"""Variants by name, with the settings that a GGUF file cannot hold set to what it means."""


@functools.cache
def built(case: str) -> PreTrainedModel:
    """The model of a case, shared by all tests."""
    config = {**VARIANTS, **RELATIVES}[case](**CASES[case])
    config.bos_token_id, config.eos_token_id = None, None
    return make(config, case)


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
