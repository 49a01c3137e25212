"""Mamba-2 (Granite 4, Falcon-H1, Nemotron-H, Mamba-2) as branches with states."""

from typing import Any

import torch
from torch import nn
from torch.nn import functional

from selfspec.model.forward import Forward, Rows
from selfspec.model.skeleton import substitute
from selfspec.model.splitting import LayerPart
from selfspec.runtimes.recurrent import Form
from selfspec.runtimes.state_net import Sizes, StateNet, has_kernel
from selfspec.runtimes.structures import NativeStateNet


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
        is_prompt = rows.start == 0 or rows.settled
        return self.run(rows, mixed, times, native=self._bounded if is_prompt else self._native)

    def leave(self, found: torch.Tensor, *entered: torch.Tensor) -> torch.Tensor:
        """Norm, gate and the last product."""
        left: torch.Tensor = self.module.out_proj(self.module.norm(found, entered[-1]).to(found.dtype))
        return left


class Mamba2BesideAttention(Mamba2):
    """The part of a Falcon-H1 layer in which Mamba-2 and attention read the same rows.

    Mamba-2 runs on all of them first. The layer's own forward does the rest, once for the rows of each sequence.

    Args:
        part: the same by transformers' modules.
        norm: the name of the norm in the layer.
        module: the name of Mamba-2.
    """

    def __init__(self, part: LayerPart, norm: str, module: str) -> None:
        self._part = part
        super().__init__(part, norm, module)

    @property
    def modules(self) -> list[nn.Module]:
        """Norm, module and attention."""
        return self._part.modules

    def is_current(self) -> bool:
        """Whether the layer's modules and weights still are those that were looked at."""
        return super().is_current() and self._part.is_current()

    def __call__(self, hidden_states: torch.Tensor, forward: Forward) -> torch.Tensor:
        """Runs on the rows of all sequences, ``[rows, hidden]``."""
        entered = self.enter(self.norm(hidden_states))
        left = self.leave(self.follow_all(forward, entered), *entered)

        def run(own: slice, rows: Rows) -> torch.Tensor:
            module = substitute(self._part.module, {self._names[1]: lambda **_: left[None, own]})
            return self._part.call(rows).run(module, hidden_states[None, own])[0]

        return forward.by_part(run)

    def enter(self, normed: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """See ``Mamba2``; with the multipliers of what goes in and comes out of the first product."""
        net = self.module
        gate, mixed, times = (net.in_proj(normed * net.ssm_in_multiplier) * net.mup_vector[0]).split(self._split, -1)
        return mixed, times, gate

    def leave(self, found: torch.Tensor, *entered: torch.Tensor) -> torch.Tensor:
        """See ``Mamba2``; some models have no norm."""
        if self.module.mamba_rms_norm:
            return super().leave(found, *entered)
        left: torch.Tensor = self.module.out_proj(found * functional.silu(entered[-1]))
        return left


def _sizes(net: Any) -> Sizes:
    return Sizes(net.n_groups, net.num_heads, net.ssm_state_size, net.head_dim)


def _make(part: LayerPart, norm: str, module: str, *attention: str) -> Mamba2 | None:
    net: Any = getattr(part.layer, module)
    if not has_kernel(net, _sizes(net)):
        return None
    return (Mamba2BesideAttention if attention else Mamba2)(part, norm, module)


FORMS: dict[str, Form] = {
    "GraniteMoeHybridMambaLayer": (("input_layernorm", "mamba"), _make),
    **dict.fromkeys(("NemotronHMamba2Mixer", "Mamba2Mixer"), (("norm", "mixer"), _make)),
    "FalconH1Mixer": (("input_layernorm", "mamba", "self_attn"), _make),
}
"""By the class of the module; attention runs beside the last one."""
