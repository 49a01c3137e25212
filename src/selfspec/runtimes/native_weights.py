"""Sublayers, and final norm with LM head, in the form that a native forward takes."""

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from selfspec.runtimes.norms import RmsNorm
from selfspec.runtimes.structures import AttentionWeights, Linear, MlpWeights, NativeSublayer, Norm


@dataclass(frozen=True, eq=False)
class NativeBranch:
    """A sublayer in the form that a native forward takes. Its tensors have to outlive it.

    Attributes:
        weights: of an attention branch or of an MLP.
        norms: before and after the branch.
        multiplier: of what the branch adds to the residual stream.
        hidden: width of the residual stream.
        dtype: of the weights.
        window: positions of the sliding window of an attention branch, if any.
        rope: layer type of its rope.
        turns: it has a rope.
    """

    weights: AttentionWeights | MlpWeights
    norms: tuple[RmsNorm | None, ...]
    multiplier: float
    hidden: int
    dtype: torch.dtype
    window: int | None = None
    rope: str | None = None
    turns: bool = False

    @property
    def is_low_bit(self) -> bool:
        """One of its products has low-bit weights."""
        weights = self.weights
        is_mlp = isinstance(weights, MlpWeights)
        linears = (weights.gate_up, weights.down) if is_mlp else (weights.inputs, weights.output)
        return any(linear.bits > 0 for linear in linears)

    def with_linears(self, first: Linear, last: Linear) -> "NativeBranch":
        """The same branch with other weights.

        Args:
            first: of queries, keys and values, or of gate and up.
            last: of the output.
        """
        weights = type(self.weights).from_buffer_copy(self.weights)
        if isinstance(weights, MlpWeights):
            weights.gate_up, weights.down = first, last
        else:
            weights.inputs, weights.output = first, last
        return replace(self, weights=weights)

    def structure(self, windows: Sequence[int | None], kinds: Sequence[str | None]) -> NativeSublayer:
        """The structure for the C++ code.

        Args:
            windows: the sliding windows of a forward, among them this one.
            kinds: the layer types of its ropes, among them this one.
        """
        before, after = map(describe_norm, self.norms)
        common = {"before": before, "after": after, "multiplier": self.multiplier, "hidden": self.hidden}
        if isinstance(self.weights, MlpWeights):
            return NativeSublayer(mlp=ctypes.pointer(self.weights), **common)
        turn = kinds.index(self.rope) if self.turns else -1
        view = windows.index(self.window)
        return NativeSublayer(attention=ctypes.pointer(self.weights), view=view, turn=turn, **common)


@dataclass(frozen=True, eq=False)
class HeadWeights:
    """Final norm and LM head in the form that a native forward takes. Their tensors have to outlive it.

    Attributes:
        norm: the final norm.
        linear: the head.
        outputs: of the head.
    """

    norm: RmsNorm
    linear: Linear
    outputs: int


def describe_norm(norm: RmsNorm | None) -> Norm:
    """A norm, or that there is none, for the C++ code."""
    return Norm() if norm is None else Norm(norm.weight.data_ptr(), norm.epsilon, norm.rounds, norm.added)
