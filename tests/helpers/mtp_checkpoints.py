"""Checkpoints of tiny random models with a multi-token-prediction head that is often right.

The model hardly changes what its first layer makes of the tokens. The head has that layer, and its projection reads the
token's embedding, whose rows have a norm of which RMS norms change nothing, and a little of the hidden state.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    DeepseekV3Config,
    Glm4MoeConfig,
    LlamaConfig,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3NextConfig,
)

VOCABULARY, HIDDEN, LAYERS = 96, 64, 3
_SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": HIDDEN,
    "intermediate_size": 96,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
_EXPERTS = {
    "moe_intermediate_size": 32,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 0,
}
_LATENT = {
    "q_lora_rank": 32,
    "kv_lora_rank": 24,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "num_key_value_heads": 2,
}
_LINEAR = {
    "layer_types": ["full_attention", "linear_attention", "full_attention"],
    "head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    "num_experts": 4,
    "num_experts_per_tok": 2,
}
_QWEN = {
    "fc": "fc",
    "token": "pre_fc_norm_embedding",
    "state": "pre_fc_norm_hidden",
    "norm": "norm",
    "layer": "layers.0.",
}
_DEEPSEEK = {"fc": "eh_proj", "token": "enorm", "state": "hnorm", "norm": "shared_head.norm", "layer": ""}
_MIMO = {
    "fc": "input_proj",
    "token": "token_layernorm",
    "state": "hidden_layernorm",
    "norm": "final_layernorm",
    "layer": "",
}

FAMILIES: dict[str, tuple[Callable[..., PreTrainedConfig], dict[str, Any], str, dict[str, str]]] = {
    "llama": (LlamaConfig, {}, "mtp.", _QWEN),
    "qwen2": (Qwen2Config, {}, "model.mtp_layers.0.", _MIMO),
    "glm4_moe": (Glm4MoeConfig, {**_EXPERTS, "head_dim": 32}, f"model.layers.{LAYERS}.", _DEEPSEEK),
    "deepseek_v3": (DeepseekV3Config, {**_EXPERTS, **_LATENT}, f"model.layers.{LAYERS}.", _DEEPSEEK),
    "qwen3_next": (Qwen3NextConfig, _LINEAR, "mtp.", _QWEN),
}
"""Config, its options, the prefix of the head's tensors, and their names."""


def save_with_head(
    family: str, folder: Path, change: Callable[[dict[str, torch.Tensor]], None] = lambda _: None
) -> Path:
    """Writes a checkpoint; ``change`` may change its tensors."""
    config_class, options, prefix, names = FAMILIES[family]
    torch.manual_seed(3)
    model: Any = AutoModelForCausalLM.from_config(config_class(**{**_SIZES, **options}))
    model.save_pretrained(folder)
    tensors = load_file(folder / "model.safetensors")
    first = {name: tensor for name, tensor in tensors.items() if name.startswith("model.layers.0.")}
    for name in list(tensors):
        if name.startswith("model.layers.") and name not in first:
            tensors[name] *= 0.7 if tensors[name].dim() > 1 else 1.0
    for tensor in first.values():
        if tensor.dim() > 1:
            tensor *= 4.0
    embedding = torch.randn(VOCABULARY, HIDDEN)
    embedding *= HIDDEN**0.5 / embedding.norm(dim=-1, keepdim=True)
    tensors["model.embed_tokens.weight"] = embedding
    tensors["lm_head.weight"] = torch.randn(VOCABULARY, HIDDEN)
    halves = [torch.eye(HIDDEN), 0.05 * torch.randn(HIDDEN, HIDDEN)]
    tensors[f"{prefix}{names['fc']}.weight"] = torch.cat(halves[:: -1 if names is _MIMO else 1], dim=1)
    for norm in ("token", "state", "norm"):
        tensors[f"{prefix}{names[norm]}.weight"] = tensors["model.norm.weight"].clone()
    for name, tensor in first.items():
        tensors[f"{prefix}{names['layer']}{name.removeprefix('model.layers.0.')}"] = tensor.clone()
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def load(folder: Path, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """The model of a checkpoint, without its head."""
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    return model.eval()  # type: ignore[no-any-return]
