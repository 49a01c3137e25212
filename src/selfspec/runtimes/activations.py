"""The activations of MLPs and experts."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional

ATTRIBUTES = ("act_fn", "activation_fn", "act")
"""Where modules have their activation."""


class GatedActivation(ABC):
    """What takes gate and the other half together, where an ordinary activation takes the gate alone."""

    @abstractmethod
    def __call__(self, entered: torch.Tensor) -> torch.Tensor:
        """``[..., 2 * inner]`` to ``[..., inner]``."""


@dataclass(frozen=True)
class ClampedGlu(GatedActivation):
    """The clamped gated unit of gpt-oss: gate and what its activation is multiplied by are pairs.

    Attributes:
        alpha: what a gate is multiplied by within the sigmoid.
        limit: the largest gate, and the largest size of the other one.
    """

    alpha: float
    limit: float

    def __call__(self, entered: torch.Tensor) -> torch.Tensor:
        """``[..., 2 * inner]`` to ``[..., inner]``."""
        gate = entered[..., ::2].clamp(max=self.limit)
        other = entered[..., 1::2].clamp(-self.limit, self.limit)
        return gate * torch.sigmoid(gate * self.alpha) * (other + 1)


def activation_of(module: nn.Module) -> Callable[[torch.Tensor], torch.Tensor]:
    """The activation of an MLP, or of experts."""
    from transformers.activations import SiLUActivation  # imports transformers' models

    name = next((name for name in ATTRIBUTES if hasattr(module, name)), None)
    experts: Any = module
    if name is None:
        return ClampedGlu(float(experts.alpha), float(experts.limit))
    activation: Callable[[torch.Tensor], torch.Tensor] = getattr(experts, name)
    return functional.silu if type(activation) in (nn.SiLU, SiLUActivation) else activation


def activate_gated(activation: Callable[[torch.Tensor], torch.Tensor], entered: torch.Tensor) -> torch.Tensor:
    """What the gate and the other half of ``[..., 2 * inner]`` give together, ``[..., inner]``."""
    if isinstance(activation, GatedActivation):
        return activation(entered)
    gate, other = entered.chunk(2, dim=-1)
    return activation(gate).mul_(other)
