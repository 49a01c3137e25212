"""Mamba (Mamba, Falcon-Mamba, Jamba) as branches with states; see ``selective_scan.h``."""

import ctypes
from typing import Any

import torch
from torch.nn import functional

from selfspec.model.forward import Rows
from selfspec.model.splitting import LayerPart
from selfspec.model.sublayers import Sublayer
from selfspec.runtimes.kernels import DTYPES, load
from selfspec.runtimes.recurrent import Convolution, RecurrentBranch, holds_only, kernels_take

_NAMES = {
    "MambaMixer": ("norm", "mixer"),
    "FalconMambaMixer": ("norm", "mixer"),
    "JambaMambaMixer": ("input_layernorm", "mamba"),
}
"""By class, the names of the norm before it and of itself in a layer."""

_NORMS = "dt_layernorm", "b_layernorm", "c_layernorm"


class Mamba(RecurrentBranch):
    """A Mamba branch. The state after a row has what the next convolution reads, and a state for each channel.

    Args:
        part: the same by transformers' modules.
        norm: the name of the norm in the layer.
        module: the name of the module.
    """

    def __init__(self, part: LayerPart, norm: str, module: str) -> None:
        super().__init__(part, norm, module)
        net = self.module
        self._convolution = Convolution(net.conv1d)
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
        net, cache = self.module, rows.sequence.cache.states
        mixed, gate = entered
        seen, before = cache.get(self.index, rows.start - 1) or (None, torch.zeros(self._held[0].shape))
        window = self._convolution.window(mixed, seen)
        values = functional.silu(self._convolution.run(window)).to(mixed.dtype)
        parts = net.x_proj(values).split(self._sizes, -1)
        if hasattr(net, _NORMS[0]):
            parts = [getattr(net, name)(each) for name, each in zip(_NORMS, parts, strict=True)]
        times, keys, queries = parts
        times = functional.linear(times, net.dt_proj.weight)
        given = [each.contiguous() for each in (values, times, keys, queries, gate)]
        states = [torch.empty_like(before) for _ in range(1 if rows.settled else rows.count)]
        places = (ctypes.c_void_p * len(states))(*(each.data_ptr() for each in states))
        out = torch.empty_like(values)
        pointers = [each.data_ptr() for each in (*self._held, *given, before)]
        sizes = rows.count, *before.shape, torch.get_num_threads()
        getattr(load(), f"selective_scan_{DTYPES[mixed.dtype]}")(*pointers, places, len(states), out.data_ptr(), *sizes)
        for row, after in enumerate(states, rows.count - len(states)):
            cache.put(self.index, rows.start + row, (self._convolution.seen(window, row), after))
        return out


def compile_mamba(sublayer: Sublayer) -> Sublayer:
    """The form of a Mamba branch that a kernel runs; any other sublayer as it is.

    Raises:
        KernelBuildError: there are no kernels.
    """
    layer: Any = sublayer.layer
    found = (names for name, names in _NAMES.items() if type(getattr(layer, names[1], None)).__name__ == name)
    names = next(found, None)
    if names is None or not holds_only(sublayer, *names):
        return sublayer
    net: Any = getattr(layer, names[1])
    assert isinstance(sublayer, LayerPart)
    is_plain = type(net.dt_proj) is torch.nn.Linear and net.activation == "silu"
    if type(net).__name__ == "FalconMambaMixer" and not hasattr(net, _NORMS[0]):  # an older transformers norms itself
        return sublayer
    return Mamba(sublayer, *names) if is_plain and kernels_take(net) else sublayer
