"""RMS norms with as few operations as their rounding allows."""

from typing import Any

import torch
from torch import nn


class RmsNorm:
    """The function of a plain RMS norm module, over its very weight.

    Args:
        norm: the module; it has a ``weight`` and a ``variance_epsilon``.
        rounds: rounds to the dtype before it multiplies by the weight, as most families do.

    Attributes:
        weight: the module's own.
        epsilon: added to the mean square.
        rounds: see above.
    """

    def __init__(self, norm: nn.Module, *, rounds: bool) -> None:
        module: Any = norm
        self.weight: torch.Tensor = module.weight
        self.epsilon = float(module.variance_epsilon)
        self.rounds = rounds
        self._shape = tuple(self.weight.shape)

    def __call__(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Norms the last dimension."""
        if self.weight.dtype == torch.float32 or not self.rounds:
            return torch.rms_norm(hidden_states, self._shape, self.weight, self.epsilon)
        return torch.rms_norm(hidden_states, self._shape, None, self.epsilon).mul_(self.weight)
