"""Supported families and dtypes in GGUF, and its names of tensors."""

from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedModel

from selfspec.errors import UnsupportedModelError
from selfspec.runtimes.packed import LowBitLinear


@dataclass(frozen=True)
class Architecture:
    """A family of models in llama.cpp.

    Attributes:
        name: its name in the file.
        permuted: whether the two halves of a rotary pair are interleaved in the rows of ``q`` and ``k``; otherwise the
            second half follows the first, as in transformers.
    """

    name: str
    permuted: bool


ARCHITECTURES = {
    "llama": Architecture("llama", permuted=True),
    "mistral": Architecture("llama", permuted=True),
    "qwen2": Architecture("qwen2", permuted=False),
    "qwen3": Architecture("qwen3", permuted=False),
}
"""By ``config.model_type``."""

_OUTSIDE = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
_IN_LAYER = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
"""Names in GGUF by the names of modules in transformers."""

TYPES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}
"""Names of dtypes in GGUF."""


def check_writable(model: PreTrainedModel, context: int) -> None:
    """Checks that a model can be written as GGUF and that llama.cpp computes it in the same way.

    Args:
        model: the model.
        context: number of positions needed, for prompt and output.

    Raises:
        UnsupportedModelError: the family or a feature is not supported; the message names it.
    """
    config: Any = model.config
    check_family(config)
    if model.dtype not in TYPES:
        raise UnsupportedModelError(f"GGUF files can be written in float32, bfloat16 or float16, not in {model.dtype}")
    rope = config.rope_parameters
    obstacles = {
        "weights of few bits (load it with unpack)": any(isinstance(each, LowBitLinear) for each in model.modules()),
        f"hidden_act {config.hidden_act}": config.hidden_act != "silu",
        f"rope of type {rope['rope_type']}": rope["rope_type"] not in ("default", "linear", "llama3"),
        "rope on a part of the head": rope.get("partial_rotary_factor", 1.0) != 1.0,
        "biases in a Qwen3 attention": config.model_type == "qwen3" and config.attention_bias,
        f"attention through a window of {_window(config)} positions, for a context of {context}": (
            context > (_window(config) or context)
        ),
    }
    found = [name for name, is_there in obstacles.items() if is_there]
    if found:
        raise UnsupportedModelError(f"this model cannot be written as a GGUF file: it has {', '.join(found)}")


def check_family(config: Any) -> None:
    """Raises ``UnsupportedModelError`` for a family that cannot be written, by its config alone."""
    if config.model_type not in ARCHITECTURES:
        raise UnsupportedModelError(
            f"GGUF files can be written for the families {', '.join(ARCHITECTURES)}, not for {config.model_type}"
        )


def head_dim(config: Any) -> int:
    """Size of an attention head."""
    return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)


def gguf_name(name: str) -> str:
    """The name in GGUF of a tensor of transformers.

    Raises:
        UnsupportedModelError: GGUF has no name for it.
    """
    module, _, kind = name.rpartition(".")
    if module in _OUTSIDE:
        return f"{_OUTSIDE[module]}.{kind}"
    layer, _, inner = module.removeprefix("model.layers.").partition(".")
    if inner not in _IN_LAYER or not layer.isdigit():
        raise UnsupportedModelError(f"this model cannot be written as a GGUF file: it has a tensor {name}")
    return f"blk.{layer}.{_IN_LAYER[inner]}.{kind}"


def _window(config: Any) -> int | None:
    """Size of the sliding window; ``None`` if no layer has one."""
    window = getattr(config, "sliding_window", None)
    by_layer = getattr(config, "layer_types", None)
    return None if by_layer is not None and "sliding_attention" not in by_layer else window
