"""Mamba-2 (Granite 4, Nemotron-H, Mamba-2) as branches with states."""

from typing import Any

import torch

from selfspec.model.forward import Rows
from selfspec.model.splitting import LayerPart
from selfspec.model.sublayers import Sublayer
from selfspec.runtimes.recurrent import holds_only
from selfspec.runtimes.state_net import Sizes, StateNet, has_kernel
from selfspec.runtimes.structures import NativeStateNet

_NAMES = {
    "GraniteMoeHybridMambaLayer": ("input_layernorm", "mamba"),
    "NemotronHMamba2Mixer": ("norm", "mixer"),
    "Mamba2Mixer": ("norm", "mixer"),
}
"""By class, the names of the norm before it and of itself in a layer."""


class Mamba2(StateNet):
    """A Mamba-2 branch. As in transformers, the steps of a prompt have bounds, and those of single tokens have none.

    Args:
        part: the same by transformers' modules.
        norm: the name of the norm in the layer.
        module: the name of the module.
    """

    def __init__(self, part: LayerPart, norm: str, module: str) -> None:
        net: Any = getattr(part.layer, module)
        inner, keys = net.intermediate_size, net.n_groups * net.ssm_state_size
        super().__init__(part, norm, module, firsts=(inner + keys, inner, 0), sizes=_sizes(net), gated=False)
        self._split = inner, inner + 2 * keys, net.num_heads
        self._bounded = NativeStateNet.from_buffer_copy(self._native)
        self._bounded.lowest, self._bounded.highest = net.time_step_limit
        self.multiplier = float(getattr(part.layer, "residual_multiplier", 1.0))

    def enter(self, normed: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """What is convolved, steps, and gates."""
        gate, mixed, times = self.module.in_proj(normed).split(self._split, -1)
        return mixed, times, gate

    def follow(self, rows: Rows, *entered: torch.Tensor) -> torch.Tensor:
        """See ``RecurrentBranch``."""
        mixed, times, _ = entered
        is_prompt = rows.start == 0 or (rows.settled and rows.count > 1)
        return self.run(rows, mixed, times, native=self._bounded if is_prompt else self._native)

    def leave(self, found: torch.Tensor, *entered: torch.Tensor) -> torch.Tensor:
        """Norm, gate and the last product."""
        left: torch.Tensor = self.module.out_proj(self.module.norm(found, entered[-1]).to(found.dtype))
        return left


def _sizes(net: Any) -> Sizes:
    return Sizes(net.n_groups, net.num_heads, net.ssm_state_size, net.head_dim)


def compile_mamba2(sublayer: Sublayer) -> Sublayer:
    """The form of a Mamba-2 branch that a kernel runs; any other sublayer as it is.

    Raises:
        KernelBuildError: there are no kernels.
    """
    layer: Any = sublayer.layer
    found = (names for name, names in _NAMES.items() if type(getattr(layer, names[1], None)).__name__ == name)
    names = next(found, None)
    if names is None or not holds_only(sublayer, *names):
        return sublayer
    net: Any = getattr(layer, names[1])
    if not has_kernel(net, _sizes(net)):
        return sublayer
    assert isinstance(sublayer, LayerPart)
    widens = getattr(layer, "residual_in_fp32", False) and net.norm.weight.dtype != torch.float32
    return sublayer if widens else Mamba2(sublayer, *names)
