"""Gated delta nets by a kernel (Qwen3-Next, Qwen3.5)."""

import ctypes
from typing import Any

import torch

from selfspec.model.forward import Rows
from selfspec.model.splitting import LayerPart
from selfspec.model.sublayers import Sublayer
from selfspec.runtimes.formats import TILE
from selfspec.runtimes.kernels import DTYPES, find, load
from selfspec.runtimes.recurrent import RecurrentBranch, holds_only
from selfspec.runtimes.structures import NativeDeltaNet

_CLASSES = ("Qwen3NextGatedDeltaNet", "Qwen3_5GatedDeltaNet", "Qwen3_5MoeGatedDeltaNet")
_NAMES = "input_layernorm", "linear_attn"

State = tuple[torch.Tensor, torch.Tensor]
"""After a row: the rows that the convolution of the next one reads, ``[taps - 1, channels]``, and the heads' states."""


class CompiledDeltaNet(RecurrentBranch):
    """A gated delta net.

    Args:
        part: the same by transformers' modules.
    """

    def __init__(self, part: LayerPart) -> None:
        super().__init__(part, *_NAMES)
        net = self.module
        self._held = (
            net.conv1d.weight.detach()[:, 0].float().T.contiguous(),
            net.A_log.detach().float().exp(),
            net.dt_bias.detach().float().contiguous(),
            net.norm.weight.detach().contiguous(),
        )
        self._native = NativeDeltaNet(
            *(tensor.data_ptr() for tensor in self._held),
            net.norm.variance_epsilon,
            *(net.num_k_heads, net.num_v_heads, net.head_k_dim, net.head_v_dim, net.conv_kernel_size),
        )

    def enter(self, normed: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Queries, keys and values together, gate, strength and decay: ``[rows, …]`` each, by head."""
        net = self.module
        if hasattr(net, "in_proj_qkv"):
            return tuple(each(normed) for each in (net.in_proj_qkv, net.in_proj_z, net.in_proj_b, net.in_proj_a))
        found = net.fix_query_key_value_ordering(net.in_proj_qkvz(normed)[None], net.in_proj_ba(normed)[None])
        query, key, value, gate, beta, alpha = (each[0].flatten(1) for each in found)
        return torch.cat([query, key, value], 1), gate, beta, alpha

    def follow(self, rows: Rows, *entered: torch.Tensor) -> torch.Tensor:
        """See ``RecurrentBranch``."""
        mixed, gate, beta, alpha = (each.contiguous() for each in entered)
        cache = rows.sequence.cache.states
        before, state = cache.get(self.index, rows.start - 1) or self._nothing(mixed)
        window, out = torch.cat([before, mixed]), torch.empty_like(gate)
        states = [torch.empty_like(state) for _ in range(1 if rows.settled else rows.count)]
        given = (each.data_ptr() for each in (window, gate, beta, alpha, state))
        addresses = (ctypes.c_void_p * len(states))(*(each.data_ptr() for each in states))
        run, sizes = getattr(load(), f"delta_net_{DTYPES[mixed.dtype]}"), (rows.count, torch.get_num_threads())
        run(ctypes.byref(self._native), *given, addresses, len(states), out.data_ptr(), *sizes)
        for row, after in enumerate(states, rows.count - len(states)):
            cache.put(self.index, rows.start + row, (window[row + 1 : row + 1 + len(before)], after))
        return out

    def _nothing(self, like: torch.Tensor) -> State:
        """The state before the first row."""
        net = self.module
        before = like.new_zeros(net.conv_kernel_size - 1, like.shape[1])
        return before, torch.zeros(net.num_v_heads, net.head_k_dim, net.head_v_dim)


def compile_delta_net(sublayer: Sublayer) -> Sublayer:
    """The form of a gated delta net that a kernel runs; any other sublayer as it is.

    Raises:
        KernelBuildError: there are no kernels.
    """
    net: Any = getattr(sublayer.layer, _NAMES[1], None)
    if type(net).__name__ not in _CLASSES or not holds_only(sublayer, *_NAMES):
        return sublayer
    assert isinstance(sublayer, LayerPart)
    fits = max(net.head_k_dim, net.head_v_dim) <= find().constants["MOST_DIM"] and net.head_v_dim % TILE == 0
    fits = fits and net.conv1d.bias is None and net.activation == net.norm.activation == "silu"
    weights = net.conv1d.weight, net.norm.weight, net.A_log, net.dt_bias
    fits = fits and all(weight.is_cpu for weight in weights) and net.norm.weight.dtype in DTYPES
    return CompiledDeltaNet(sublayer) if fits else sublayer
