"""Recurrent layers whose rows share the products, and which keep the state after every row.

Transformers' own modules give the state after their last row only, so that each row of a verification would have to
read their weights for itself.
"""

import ctypes
from abc import abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import torch
from torch import nn

from selfspec.model.forward import Forward, Rows
from selfspec.model.splitting import LayerPart
from selfspec.model.sublayers import Sublayer
from selfspec.runtimes.kernels import DTYPES, find
from selfspec.runtimes.products import are_plain, signature

Kernel: TypeAlias = Callable[[torch.Tensor, torch.Tensor, "ctypes.Array[ctypes.c_void_p]"], torch.Tensor]
"""Of the window of a convolution, the state before its rows, and the addresses of those after the last of them."""

Form: TypeAlias = tuple[tuple[str, ...], Callable[..., "RecurrentBranch | None"]]
"""What a layer calls the norm, the recurrent module and what else is in a part, and what makes the branch of them.

That is called with the part and the names, and returns ``None`` where no kernel runs the branch. It raises
``KernelBuildError`` where there are none.
"""


class RecurrentBranch(Sublayer):
    """The part of a decoder layer that is a recurrent module, with the norm before it.

    Args:
        part: the same by transformers' modules.
        norm: the name of the norm in the layer.
        module: the name of the module.

    Attributes:
        multiplier: scales the branch before it is added to the residual stream.
    """

    multiplier = 1.0

    def __init__(self, part: LayerPart, norm: str, module: str) -> None:
        super().__init__(part.layer)
        self.index = part.index
        self._names = norm, module
        self.norm, self.module = self._named()
        self._signature = signature(self.modules)
        self._widens = bool(getattr(part.layer, "residual_in_fp32", False))

    def _named(self) -> tuple[Any, Any]:
        norm, module = (getattr(self.layer, name) for name in self._names)
        return norm, module

    @property
    def window(self) -> int | None:
        """None: a state holds what was seen."""
        return None

    @property
    def modules(self) -> list[nn.Module]:
        """Norm and module."""
        return [self.norm, self.module]

    def is_current(self) -> bool:
        """Whether the layer's modules and weights still are those that were looked at."""
        return self._named() == (self.norm, self.module) and self._signature == signature(self.modules)

    def __call__(self, hidden_states: torch.Tensor, forward: Forward) -> torch.Tensor:
        """Runs on the rows of all sequences, ``[rows, hidden]``. Some layers have their stream in float32."""
        entered = self.enter(self.norm(hidden_states.to(self.norm.weight.dtype) if self._widens else hidden_states))
        hidden_states = hidden_states.float() if self._widens else hidden_states
        left = self.leave(self.follow_all(forward, entered), *entered)
        return hidden_states + (left if self.multiplier == 1.0 else left * self.multiplier)

    def follow_all(self, forward: Forward, entered: tuple[torch.Tensor, ...]) -> torch.Tensor:
        """See ``follow``, for the rows of all sequences."""
        return forward.by_part(lambda own, rows: self.follow(rows, *(each[own] for each in entered)))

    @abstractmethod
    def enter(self, normed: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """What the module's first products give for rows, ``[rows, …]`` each."""

    @abstractmethod
    def follow(self, rows: Rows, *entered: torch.Tensor) -> torch.Tensor:
        """What is read of the states for the rows of a sequence, one after the other from the state before them.

        Keeps the states after each of them, or after the last where all are settled.
        """

    def leave(self, found: torch.Tensor, *entered: torch.Tensor) -> torch.Tensor:
        """What is added to the stream, of what was read for all rows; by default the module's last product."""
        left: torch.Tensor = self.module.out_proj(found)
        return left


class StateBranch(RecurrentBranch):
    """One whose module has a convolution, ``conv1d``, and a state in float32 that a kernel of the CPU follows.

    Args:
        part: the same by transformers' modules.
        norm: the name of the norm in the layer.
        module: the name of the module.
        shape: of the state.
    """

    def __init__(self, part: LayerPart, norm: str, module: str, shape: tuple[int, ...]) -> None:
        super().__init__(part, norm, module)
        self._convolution, self._shape = Convolution(self.module.conv1d), shape

    def follow_states(self, rows: Rows, mixed: torch.Tensor, run: Kernel) -> torch.Tensor:
        """What ``run`` gives for the rows of a sequence.

        Keeps the states after each of them, or after the last where all are settled, with the rows that the
        convolution of the next one reads.

        Args:
            rows: of the sequence.
            mixed: what is convolved, ``[rows, channels]``.
            run: is called with the window of the convolution, the state before the rows, and where those after the
                last rows go.
        """
        cache = rows.sequence.cache.states
        seen, before = cache.get(self.index, rows.start - 1) or (None, torch.zeros(self._shape))
        window = self._convolution.window(mixed, seen)
        states = [torch.empty_like(before) for _ in range(1 if rows.settled else rows.count)]
        found = run(window, before, (ctypes.c_void_p * len(states))(*(each.data_ptr() for each in states)))
        for row, after in enumerate(states, rows.count - len(states)):
            cache.put(self.index, rows.start + row, (self._convolution.seen(window, row), after))
        return found


class Convolution:
    """A causal convolution of each channel. Entries are added one by one, so that a row does not depend on the others.

    Args:
        conv: as transformers has it.
    """

    def __init__(self, conv: nn.Conv1d) -> None:
        self._weight = conv.weight.detach()[:, 0].float().T.contiguous()
        self._bias = None if conv.bias is None else conv.bias.detach().float()

    def window(self, rows: torch.Tensor, seen: torch.Tensor | None) -> torch.Tensor:
        """Rows ``[rows, channels]`` with those before them, zeros at the start of a text."""
        return torch.cat([rows.new_zeros(len(self._weight) - 1, rows.shape[1]) if seen is None else seen, rows])

    def run(self, window: torch.Tensor) -> torch.Tensor:
        """The convolved rows of a window, in float32."""
        taps, count = len(self._weight), len(window) + 1 - len(self._weight)
        found = window[:count].float() * self._weight[0]
        for tap in range(1, taps):
            found += window[tap : tap + count].float() * self._weight[tap]
        return found if self._bias is None else found.add_(self._bias)

    def seen(self, window: torch.Tensor, row: int) -> torch.Tensor:
        """What the row after a row of a window reads beside itself."""
        return window[row + 1 : row + len(self._weight)].clone()  # a view would hold the window of a whole prompt


def kernels_take(net: nn.Module) -> bool:
    """Whether kernels run a module on the device and in the dtype that its weights have.

    Raises:
        KernelBuildError: there are no kernels.
    """
    dtypes = {weight.dtype for weight in net.parameters() if weight.is_floating_point()}
    if not all(weight.is_cpu for weight in net.parameters()) or not dtypes <= DTYPES.keys():
        return False
    find()
    return True


def compile_recurrent(part: Sublayer, forms: Mapping[str, Form]) -> Sublayer:
    """The form of a recurrent branch whose rows share the products; any other sublayer, or one with hooks, as it is.

    Args:
        part: of a layer.
        forms: by the class of the recurrent module.

    Raises:
        KernelBuildError: there are no kernels.
    """
    for kind, (names, make) in forms.items():
        named = [getattr(part.layer, name, None) for name in names]
        if type(named[1]).__name__ != kind or {*map(id, part.modules)} != {*map(id, named)}:
            continue
        if isinstance(part, LayerPart) and are_plain(part.modules):
            return make(part, *names) or part
    return part
