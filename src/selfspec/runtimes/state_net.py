"""Recurrent branches with a state for each head, by a kernel: see ``state_net.h``."""

import ctypes
import math
from dataclasses import asdict, dataclass
from typing import Any

import torch

from selfspec.model.forward import Rows
from selfspec.model.splitting import LayerPart
from selfspec.runtimes.formats import TILE
from selfspec.runtimes.kernels import DTYPES, find, load
from selfspec.runtimes.recurrent import StateBranch, kernels_take
from selfspec.runtimes.structures import NativeStateNet


@dataclass(frozen=True)
class Sizes:
    """Sizes of a net.

    Attributes:
        groups: heads of queries and keys.
        heads: heads of values.
        state: size of a key.
        size: size of a value.
    """

    groups: int
    heads: int
    state: int
    size: int


class StateNet(StateBranch):
    """A recurrent branch whose heads have states.

    Args:
        part: the same by transformers' modules.
        norm: the name of the norm in the layer.
        module: the name of the module, which has ``conv1d``, ``A_log`` and ``dt_bias``.
        firsts: the first channels of queries, keys and values among those that are convolved.
        sizes: of its heads.
        gated: a norm and a gate follow in the kernel: that of ``module.norm``, by head.
    """

    def __init__(
        self,
        part: LayerPart,
        norm: str,
        module: str,
        *,
        firsts: tuple[int, int, int],
        sizes: Sizes,
        gated: bool,
    ) -> None:
        super().__init__(part, norm, module, (sizes.heads, sizes.state, sizes.size))
        net, conv = self.module, self.module.conv1d
        bias = conv.weight.new_zeros(len(conv.weight)) if conv.bias is None else conv.bias
        held: dict[str, torch.Tensor] = {
            "conv": conv.weight[:, 0].T,
            "conv_bias": bias,
            "decay": net.A_log.float().exp(),
            "bias": net.dt_bias,
            **({"norm": net.norm.weight} if gated else {"skip": net.D}),
        }
        self._held = {name: tensor.detach().float().contiguous() for name, tensor in held.items()}
        self._native = NativeStateNet(
            **{name: tensor.data_ptr() for name, tensor in self._held.items()},
            **dict(zip(("queries", "keys", "values"), firsts, strict=True)),
            **asdict(sizes),
            taps=int(net.conv_kernel_size),
            epsilon=net.norm.variance_epsilon if gated else 0.0,
            lowest=0.0,
            highest=math.inf,
            delta=gated,
        )

    def run(
        self, rows: Rows, mixed: torch.Tensor, times: torch.Tensor, *gated: torch.Tensor, native: NativeStateNet
    ) -> torch.Tensor:
        """Follows the rows of a sequence.

        Args:
            rows: of the sequence.
            mixed: what is convolved, ``[rows, channels]``.
            times: the steps before their bias, ``[rows, heads]``.
            gated: shares ``[rows, heads]`` and gates ``[rows, heads * size]``, if the kernel has a norm.
            native: the net.

        Returns:
            What is read, ``[rows, heads * size]``.
        """
        times, gated = times.contiguous(), tuple(each.contiguous() for each in gated)
        out = mixed.new_empty(rows.count, self._shape[0] * self._shape[2])

        def run(window: torch.Tensor, before: torch.Tensor, states: "ctypes.Array[ctypes.c_void_p]") -> torch.Tensor:
            given = times.data_ptr(), *([each.data_ptr() for each in gated] or (None, None)), before.data_ptr()
            sizes = len(states), out.data_ptr(), rows.count, torch.get_num_threads()
            call = getattr(load(), f"state_net_{DTYPES[mixed.dtype]}")
            call(ctypes.byref(native), window.data_ptr(), window.shape[1], *given, states, *sizes)
            return out

        return self.follow_states(rows, mixed, run)


def has_kernel(net: Any, sizes: Sizes) -> bool:
    """Whether the kernel runs a module of these sizes, on the device and in the dtype that its weights have.

    Raises:
        KernelBuildError: there are no kernels.
    """
    fits = sizes.size % TILE == 0 and sizes.heads % sizes.groups == 0 and net.activation == "silu" and kernels_take(net)
    return fits and max(sizes.state, sizes.size) <= find().constants["MOST_DIM"]
