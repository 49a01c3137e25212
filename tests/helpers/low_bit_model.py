"""A random model whose heads have 32 dimensions, which the kernels of low-bit copies take."""

import torch
from transformers import LlamaConfig, LlamaForCausalLM

SUBLAYERS = 8


def random_model(dtype: torch.dtype = torch.float32) -> LlamaForCausalLM:
    """Heads of 32, which the kernels take."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=128,
        hidden_size=64,
        intermediate_size=160,
        num_hidden_layers=SUBLAYERS // 2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=256,
        initializer_range=0.2,
    )
    return LlamaForCausalLM(config).eval().to(dtype)
