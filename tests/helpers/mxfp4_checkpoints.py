"""Tiny gpt-oss checkpoints whose experts are in MXFP4, in the form of its own."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import PreTrainedModel

from helpers.checkpoints import make_tokenizer
from helpers.models import VARIANTS, make

Tensors = dict[str, torch.Tensor]
VALUES = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
BLOCK = 32


def gpt_oss(**sizes: Any) -> PreTrainedModel:
    """A random model whose heads have 32 entries, as kernels need."""
    heads = {"head_dim": 32, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 96}
    return make(VARIANTS["gpt-oss"](**{**heads, **sizes}), "gpt-oss")  # type: ignore[call-arg]


def round_to_mxfp4(weights: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Weights ``[..., inputs]`` as blocks ``[..., units, 16]`` of two codes a byte, and exponents ``[..., units]``."""
    values = weights.float().unflatten(-1, (-1, BLOCK))
    exponents = torch.floor(torch.log2(values.abs().amax(-1))).clamp(-125, 125) - 2
    scaled = values / 2.0 ** exponents[..., None]
    codes = (scaled.abs()[..., None] - VALUES).abs().argmin(-1) + 8 * (scaled < 0)
    pairs = codes.unflatten(-1, (-1, 2)).to(torch.uint8)
    return pairs[..., 0] | pairs[..., 1] << 4, (exponents + 127).to(torch.uint8)


def save_mxfp4(
    folder: Path,
    model: PreTrainedModel,
    *,
    dtype: torch.dtype = torch.bfloat16,
    change: Callable[[Tensors], None] | None = None,
) -> Path:
    """Writes a checkpoint and a tokenizer.

    Args:
        folder: where to.
        model: a gpt-oss one.
        dtype: of everything but the weights of experts.
        change: what is done to the tensors at last.
    """
    tensors: Tensors = {}
    for name, parameter in model.named_parameters():
        if name.endswith(("gate_up_proj", "down_proj")):
            blocks, exponents = round_to_mxfp4(parameter.detach().transpose(1, 2))
            tensors |= {f"{name}_blocks": blocks.contiguous(), f"{name}_scales": exponents.contiguous()}
        else:
            tensors[name] = parameter.detach().to(dtype).contiguous()
    if change is not None:
        change(tensors)
    model.config.dtype = dtype
    model.config.save_pretrained(folder)
    content = json.loads((folder / "config.json").read_text())
    settings = {
        "quant_method": "mxfp4",
        "modules_to_not_convert": ["model.layers.*.self_attn", "model.layers.*.mlp.router"],
    }
    (folder / "config.json").write_text(json.dumps({**content, "quantization_config": settings}))
    make_tokenizer(int(model.config.vocab_size)).save_pretrained(folder)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder
