"""Gated delta nets by a kernel (Qwen3-Next, Qwen3.5): the rows of a forward share the products and keep all states.

Transformers' own module gives the state after its last row only, so that the rows of a verification would have to read
its weights one by one.
"""

import ctypes
from typing import Any

import torch
from torch import nn

from selfspec.model.forward import Forward, Rows
from selfspec.model.splitting import LayerPart
from selfspec.model.sublayers import Sublayer
from selfspec.runtimes.formats import TILE
from selfspec.runtimes.kernels import DTYPES, find, load
from selfspec.runtimes.products import is_plain, signature
from selfspec.runtimes.structures import NativeDeltaNet

_CLASSES = ("Qwen3NextGatedDeltaNet", "Qwen3_5GatedDeltaNet", "Qwen3_5MoeGatedDeltaNet")
_NORM, _NET = "input_layernorm", "linear_attn"

State = tuple[torch.Tensor, torch.Tensor]
"""After a row: the rows that the convolution of the next one reads, ``[taps - 1, channels]``, and the heads' states."""


class CompiledDeltaNet(Sublayer):
    """The part of a decoder layer that is a gated delta net, with its norm.

    Args:
        part: the same by transformers' modules.
    """

    def __init__(self, part: LayerPart) -> None:
        super().__init__(part.layer)
        self.index = part.index
        self.norm: nn.Module = getattr(part.layer, _NORM)
        self.net: Any = getattr(part.layer, _NET)
        net = self.net
        self._signature = signature(self.modules)
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

    @property
    def window(self) -> int | None:
        """None: a state holds what was seen."""
        return None

    @property
    def modules(self) -> list[nn.Module]:
        """Norm and net."""
        return [self.norm, self.net]

    def is_current(self) -> bool:
        """Whether the layer's modules and weights still are those that were looked at."""
        return self.modules == [getattr(self.layer, _NORM), getattr(self.layer, _NET)] and (
            self._signature == signature(self.modules)
        )

    def __call__(self, hidden_states: torch.Tensor, forward: Forward) -> torch.Tensor:
        """Runs on the rows of all sequences, ``[rows, hidden]``."""
        mixed, gate, beta, alpha = self._project(self.norm(hidden_states))

        def run(own: slice, rows: Rows) -> torch.Tensor:
            return self._run(rows, mixed[own], *(each[own].contiguous() for each in (gate, beta, alpha)))

        output: torch.Tensor = hidden_states + self.net.out_proj(forward.by_part(run))
        return output

    def _project(self, normed: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Queries, keys and values together, gate, strength and decay: ``[rows, …]`` each, by head."""
        net = self.net
        if hasattr(net, "in_proj_qkv"):
            return tuple(each(normed) for each in (net.in_proj_qkv, net.in_proj_z, net.in_proj_b, net.in_proj_a))
        found = net.fix_query_key_value_ordering(net.in_proj_qkvz(normed)[None], net.in_proj_ba(normed)[None])
        query, key, value, gate, beta, alpha = (each[0].flatten(1) for each in found)
        return torch.cat([query, key, value], 1), gate, beta, alpha

    def _run(
        self, rows: Rows, mixed: torch.Tensor, gate: torch.Tensor, beta: torch.Tensor, alpha: torch.Tensor
    ) -> torch.Tensor:
        """The rows of a sequence, from the state before them; keeps those after each of them, or after the last."""
        before, state = rows.sequence.cache.states.get(self.index, rows.start - 1) or self._nothing(mixed)
        window, out, count = torch.cat([before, mixed]), torch.empty_like(gate), len(mixed)
        states = [torch.empty_like(state) for _ in range(1 if rows.settled else count)]
        run = getattr(load(), f"delta_net_{DTYPES[mixed.dtype]}")
        given = (each.data_ptr() for each in (window, gate, beta, alpha, state))
        addresses = (ctypes.c_void_p * len(states))(*(each.data_ptr() for each in states))
        kept, threads = len(states), torch.get_num_threads()
        run(ctypes.byref(self._native), *given, addresses, kept, out.data_ptr(), count, threads)
        for place, after in enumerate(states, count - kept):
            seen = window[place + 1 : place + 1 + len(before)]
            rows.sequence.cache.states.put(self.index, rows.start + place, (seen, after))
        return out

    def _nothing(self, like: torch.Tensor) -> State:
        """The state before the first row."""
        net = self.net
        before = like.new_zeros(net.conv_kernel_size - 1, like.shape[1])
        return before, torch.zeros(net.num_v_heads, net.head_k_dim, net.head_v_dim)


def compile_delta_net(sublayer: Sublayer) -> Sublayer:
    """The form of a gated delta net that a kernel runs; any other sublayer as it is.

    Raises:
        KernelBuildError: there are no kernels.
    """
    net: Any = getattr(sublayer.layer, _NET, None)
    if not isinstance(sublayer, LayerPart) or type(net).__name__ not in _CLASSES:
        return sublayer
    if {*map(id, sublayer.modules)} != {id(net), id(getattr(sublayer.layer, _NORM, None))}:
        return sublayer
    weights = [net.conv1d.weight, net.norm.weight, net.A_log, net.dt_bias]
    fits = max(net.head_k_dim, net.head_v_dim) <= find().constants["MOST_DIM"] and net.head_v_dim % TILE == 0
    fits = fits and net.conv1d.bias is None and net.activation == "silu" and net.norm.activation == "silu"
    fits = fits and all(weight.is_cpu for weight in weights) and all(map(is_plain, net.modules()))
    return CompiledDeltaNet(sublayer) if fits and net.norm.weight.dtype in DTYPES else sublayer
