"""A random model whose heads have 32 dimensions, which the kernels of low-bit weights take."""

from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

SUBLAYERS = 8

SIZES: dict[str, Any] = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": SUBLAYERS // 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 256,
    "initializer_range": 0.2,
}


def random_model(dtype: torch.dtype = torch.float32, **sizes: Any) -> LlamaForCausalLM:
    """Heads of 32, which the kernels take; ``sizes`` replaces some of ``SIZES``."""
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**{**SIZES, **sizes})).eval().to(dtype)
