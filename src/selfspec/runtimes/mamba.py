"""Mamba (Mamba, Falcon-Mamba, Jamba) as branches with states; see ``selective_scan.h``."""

import ctypes
from typing import Any

import torch
from torch.nn import functional

from selfspec.model.forward import Rows
from selfspec.model.splitting import LayerPart
from selfspec.runtimes.kernels import DTYPES, load
from selfspec.runtimes.recurrent import Form, StateBranch, kernels_take

_NORMS = "dt_layernorm", "b_layernorm", "c_layernorm"


class Mamba(StateBranch):
    """A Mamba branch. The state after a row has what the next convolution reads, and a state for each channel.

    Args:
        part: the same by transformers' modules.
        norm: the name of the norm in the layer.
        module: the name of the module.
    """

    def __init__(self, part: LayerPart, norm: str, module: str) -> None:
        super().__init__(part, norm, module, getattr(part.layer, module).A_log.shape)
        net = self.module
        self._sizes = net.time_step_rank, net.ssm_state_size, net.ssm_state_size
        bias = net.D.new_zeros(len(net.D)) if net.dt_proj.bias is None else net.dt_proj.bias
        held = -net.A_log.float().exp(), net.D, bias
        self._held = [each.detach().float().contiguous() for each in held]

    def enter(self, normed: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """What is convolved, and its gate."""
        mixed, gate = self.module.in_proj(normed).chunk(2, -1)
        return mixed, gate

    def follow(self, rows: Rows, *entered: torch.Tensor) -> torch.Tensor:
        """See ``RecurrentBranch``."""
        net = self.module
        mixed, gate = entered

        def run(window: torch.Tensor, before: torch.Tensor, states: "ctypes.Array[ctypes.c_void_p]") -> torch.Tensor:
            values = functional.silu(self._convolution.run(window)).to(mixed.dtype)
            parts = net.x_proj(values).split(self._sizes, -1)
            if hasattr(net, _NORMS[0]):
                parts = [getattr(net, name)(each) for name, each in zip(_NORMS, parts, strict=True)]
            times, keys, queries = parts
            times = functional.linear(times, net.dt_proj.weight)
            given = [each.contiguous() for each in (values, times, keys, queries, gate)]
            out = torch.empty_like(values)
            pointers = [each.data_ptr() for each in (*self._held, *given, before)]
            sizes = rows.count, *before.shape, torch.get_num_threads()
            call = getattr(load(), f"selective_scan_{DTYPES[mixed.dtype]}")
            call(*pointers, states, len(states), out.data_ptr(), *sizes)
            return out

        return self.follow_states(rows, mixed, run)


def _make(part: LayerPart, norm: str, module: str) -> Mamba | None:
    net: Any = getattr(part.layer, module)
    is_plain = type(net.dt_proj) is torch.nn.Linear and net.activation == "silu"
    if type(net).__name__ == "FalconMambaMixer" and not hasattr(net, _NORMS[0]):  # an older transformers norms itself
        return None
    return Mamba(part, norm, module) if is_plain and kernels_take(net) else None


FORMS: dict[str, Form] = {
    **dict.fromkeys(("MambaMixer", "FalconMambaMixer"), (("norm", "mixer"), _make)),
    "JambaMambaMixer": (("input_layernorm", "mamba"), _make),
}
"""By the class of the module."""
