"""RMS norms with as few operations as their rounding allows."""

from typing import Any

import torch
from torch import nn


class RmsNorm:
    """The function of a plain RMS norm module, over its very weight.

    Args:
        norm: the module; it has a ``weight``, and a ``variance_epsilon`` or ``eps``.
        rounds: rounds to the dtype before it multiplies by the weight, as most families do.
        added: what is added to the weight, in float32; 1 in Gemma.

    Attributes:
        weight: the module's own.
        epsilon: added to the mean square.
        rounds: see above.
        added: see above.
    """

    def __init__(self, norm: nn.Module, *, rounds: bool, added: float = 0.0) -> None:
        module: Any = norm
        self.weight: torch.Tensor = module.weight
        self.epsilon = float(module.variance_epsilon if hasattr(module, "variance_epsilon") else module.eps)
        self.rounds, self.added = rounds, added
        self._shape = tuple(self.weight.shape)

    def __call__(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Norms the last dimension."""
        if self.added:
            weight = self.weight.float() + self.added
            return torch.rms_norm(hidden_states.float(), self._shape, weight, self.epsilon).to(hidden_states.dtype)
        if self.weight.dtype == torch.float32 or not self.rounds:
            return torch.rms_norm(hidden_states, self._shape, self.weight, self.epsilon)
        return torch.rms_norm(hidden_states, self._shape, None, self.epsilon).mul_(self.weight)
