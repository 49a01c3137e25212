"""Gated delta nets (Qwen3-Next, Qwen3.5) as branches with states."""

from typing import Any

import torch

from selfspec.model.forward import Rows
from selfspec.model.splitting import LayerPart
from selfspec.runtimes.recurrent import Form
from selfspec.runtimes.state_net import Sizes, StateNet, has_kernel


class DeltaNet(StateNet):
    """A gated delta net.

    Args:
        part: the same by transformers' modules.
        norm: the name of the norm in the layer.
        module: the name of the module.
    """

    def __init__(self, part: LayerPart, norm: str, module: str) -> None:
        net: Any = getattr(part.layer, module)
        super().__init__(part, norm, module, firsts=(0, net.key_dim, 2 * net.key_dim), sizes=_sizes(net), gated=True)

    def enter(self, normed: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Queries, keys and values together, steps, shares and gates: ``[rows, …]`` each, by head."""
        net = self.module
        if hasattr(net, "in_proj_qkv"):
            return tuple(each(normed) for each in (net.in_proj_qkv, net.in_proj_a, net.in_proj_b, net.in_proj_z))
        found = net.fix_query_key_value_ordering(net.in_proj_qkvz(normed)[None], net.in_proj_ba(normed)[None])
        query, key, value, gate, shares, times = (each[0].flatten(1) for each in found)
        return torch.cat([query, key, value], 1), times, shares, gate

    def follow(self, rows: Rows, *entered: torch.Tensor) -> torch.Tensor:
        """See ``RecurrentBranch``."""
        return self.run(rows, *entered, native=self._native)


def _sizes(net: Any) -> Sizes:
    return Sizes(net.num_k_heads, net.num_v_heads, net.head_k_dim, net.head_v_dim)


def _make(part: LayerPart, norm: str, module: str) -> DeltaNet | None:
    net: Any = getattr(part.layer, module)
    return DeltaNet(part, norm, module) if has_kernel(net, _sizes(net)) and net.norm.activation == "silu" else None


FORMS: dict[str, Form] = dict.fromkeys(
    ("Qwen3NextGatedDeltaNet", "Qwen3_5GatedDeltaNet", "Qwen3_5MoeGatedDeltaNet"),
    (("input_layernorm", "linear_attn"), _make),
)
"""By the class of the module."""
