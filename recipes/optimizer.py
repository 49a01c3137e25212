"""Muon for the stacked matrices, AdamW for the embedding and the norms, with float32 master weights."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from model import MATRICES, Shape

_NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)


@dataclass(frozen=True, slots=True)
class Rates:
    """Settings of the optimizer; learning rates are those of the stable phase.

    Attributes:
        muon: learning rate of the matrices; an update has a spectral norm of about this much.
        adam: learning rate of the embedding and the norms.
        decay: decoupled weight decay of the matrices, as a share of ``muon`` and step.
        momentum: momentum of Muon.
        betas: of AdamW.
    """

    muon: float = 0.02
    adam: float = 4e-3
    decay: float = 0.02
    momentum: float = 0.95
    betas: tuple[float, float] = (0.9, 0.95)


class Trainable:
    """Master weights and the working copy that the model computes with.

    The leaves handed to autograd are views of one stacked tensor for each kind of weight, and so are their gradients;
    the optimizer sees whole stacks, the model single layers, and nothing is copied between.

    Attributes:
        masters: float32 tensors named as by `model.initial_weights`.
        gradients: tensors of the same shapes in the working dtype.
        leaves: for each name the list of tensors that `model.Llama` takes.
    """

    def __init__(self, masters: dict[str, Tensor], device: torch.device, dtype: torch.dtype) -> None:
        """Move the master weights to ``device`` and make a working copy in ``dtype``."""
        self.masters = {name: master.to(device, torch.float32, copy=True) for name, master in masters.items()}
        self._copies = {name: master.to(dtype) for name, master in self.masters.items()}
        self.gradients = {name: torch.zeros_like(copy) for name, copy in self._copies.items()}
        self.leaves = {name: self._views(name) for name in masters}

    def refresh(self) -> None:
        """Copy the master weights into the working copy and clear the gradients."""
        for name, copy in self._copies.items():
            copy.copy_(self.masters[name])
            self.gradients[name].zero_()

    def _views(self, name: str) -> list[Tensor]:
        copy, gradient = self._copies[name], self.gradients[name]
        stacked = name not in ("embedding", "final_norm")
        leaves = []
        for part, part_gradient in zip(copy if stacked else [copy], gradient if stacked else [gradient], strict=True):
            leaf = part.detach().requires_grad_()
            leaf.grad = part_gradient
            leaves.append(leaf)
        return leaves


class Optimizer:
    """Applies one step to the master weights of a `Trainable`."""

    def __init__(self, trainable: Trainable, shape: Shape, rates: Rates) -> None:
        """Start with empty momentum."""
        self._trainable = trainable
        self._rates = rates
        self._rows = {
            "qkv": (shape.hidden, shape.key_value, shape.key_value),
            "out": (shape.hidden,),
            "gate_up": (shape.mlp, shape.mlp),
            "down": (shape.hidden,),
        }
        self._moments = {name: torch.zeros_like(master) for name, master in trainable.masters.items()}
        self._squares = {name: torch.zeros_like(m) for name, m in trainable.masters.items() if name not in MATRICES}
        self._steps = 0

    def state(self) -> dict[str, object]:
        """State that a checkpoint keeps beside the master weights."""
        return {"moments": self._moments, "squares": self._squares, "steps": self._steps}

    def restore(self, state: dict[str, object]) -> None:
        """Restore a state returned by `state`."""
        self._moments, self._squares, self._steps = state["moments"], state["squares"], state["steps"]

    @torch.no_grad()
    def step(self, scale: float) -> None:
        """Update the master weights from the gradients.

        Args:
            scale: share of the stable learning rates to apply, 0 ... 1.
        """
        self._steps += 1
        for name, master in self._trainable.masters.items():
            gradient = self._trainable.gradients[name].float()
            if name in MATRICES:
                self._muon(name, master, gradient, scale)
            else:
                self._adam(name, master, gradient, scale)

    def _muon(self, name: str, master: Tensor, gradient: Tensor, scale: float) -> None:
        rates, moment = self._rates, self._moments[name]
        moment.lerp_(gradient, 1 - rates.momentum)
        nesterov = gradient.lerp_(moment, rates.momentum)
        master.mul_(1 - scale * rates.muon * rates.decay)
        for part, part_update in zip(
            master.split(self._rows[name], dim=1), nesterov.split(self._rows[name], dim=1), strict=True
        ):
            rows, columns = part.shape[1:]
            factor = max(1.0, rows / columns) ** 0.5
            part.sub_(orthogonalize(part_update).to(part.dtype), alpha=scale * rates.muon * factor)

    def _adam(self, name: str, master: Tensor, gradient: Tensor, scale: float) -> None:
        (first, second), moment, square = self._rates.betas, self._moments[name], self._squares[name]
        moment.lerp_(gradient, 1 - first)
        square.lerp_(gradient.square(), 1 - second)
        denominator = (square / (1 - second**self._steps)).sqrt_().add_(1e-8)
        master.addcdiv_(moment, denominator, value=-scale * self._rates.adam / (1 - first**self._steps))


def orthogonalize(matrices: Tensor, iterations: int = 5, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Push all singular values of a batch of matrices towards 1 (Muon's Newton-Schulz iteration).

    Args:
        matrices: ``[batch, rows, columns]``.
        iterations: iterations of the quintic polynomial.
        dtype: of the arithmetic.

    Returns:
        same shape, in ``dtype``.
    """
    tall = matrices.shape[1] > matrices.shape[2]
    current = (matrices.mT if tall else matrices).to(dtype).contiguous()
    current = current / (current.norm(dim=(1, 2), keepdim=True) + 1e-7)
    first, third, fifth = _NEWTON_SCHULZ
    for _ in range(iterations):
        gram = torch.bmm(current, current.mT)
        polynomial = torch.baddbmm(gram, gram, gram, beta=third, alpha=fifth)
        current = torch.baddbmm(current, polynomial, current, beta=first)
    return current.mT if tall else current
