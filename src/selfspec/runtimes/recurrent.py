"""Recurrent layers whose rows share the products, and which keep the state after every row.

Transformers' own modules give the state after their last row only, so that each row of a verification would have to
read their weights for itself.
"""

from abc import abstractmethod
from typing import Any

import torch
from torch import nn

from selfspec.model.forward import Forward, Rows
from selfspec.model.splitting import LayerPart
from selfspec.model.sublayers import Sublayer
from selfspec.runtimes.products import is_plain, signature


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
        """Runs on the rows of all sequences, ``[rows, hidden]``."""
        entered = self.enter(self.norm(hidden_states))
        found = forward.by_part(lambda own, rows: self.follow(rows, *(each[own] for each in entered)))
        left = self.leave(found, *entered)
        return hidden_states + (left if self.multiplier == 1.0 else left * self.multiplier)

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


def holds_only(part: Sublayer, norm: str, module: str) -> bool:
    """Whether a part of a layer is this norm and this module, without hooks."""
    named = [getattr(part.layer, name, None) for name in (norm, module)]
    if not isinstance(part, LayerPart) or None in named or {*map(id, part.modules)} != {*map(id, named)}:
        return False
    return all(is_plain(each) for root in part.modules for each in root.modules())
