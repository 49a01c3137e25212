"""Adapters of low rank (LoRA: Hu et al. 2021): what is added to products for the rows of a sequence."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from functools import cached_property
from typing import Any

import torch
from torch.nn import functional


class AdaptedProduct(IntEnum):
    """One of the two products of a sublayer."""

    ENTERING = 0
    """Of its input: queries, keys and values; gate and up."""
    LEAVING = 1
    """Of its output."""


@dataclass(frozen=True, eq=False)
class LowRankFactors:
    """``scale * up.T @ down``, which is added to the weights of some outputs of a product.

    Attributes:
        down: ``[rank, inputs]``, ``lora_A``.
        up: ``[rank, outputs]``, ``lora_B`` transposed.
        first: the first of these outputs.
        scale: see above.
    """

    down: torch.Tensor
    up: torch.Tensor
    first: int
    scale: float


class LowRankSum:
    """What an adapter adds to one product; its first factors are one matrix, so that the input is read once.

    Attributes:
        factors: of each linear layer that the product joins.
        down: ``[rank of all, inputs]``.
    """

    def __init__(self, factors: tuple[LowRankFactors, ...]) -> None:
        self.factors = factors
        self.down = torch.cat([each.down for each in factors])

    def add(self, inputs: torch.Tensor, outputs: torch.Tensor) -> None:
        """Adds to the outputs of a product, ``[rows, outputs]`` of ``[rows, inputs]``, in place."""
        reduced = functional.linear(inputs, self.down)
        ranks = [len(each.down) for each in self.factors]
        for each, rows in zip(self.factors, torch.split(reduced, ranks, dim=1), strict=True):
            some = outputs.narrow(1, each.first, each.up.shape[1])
            some.add_(rows @ each.up, alpha=each.scale)


@dataclass(frozen=True, eq=False)
class Adapter:
    """An adapter of a model, in the model's dtype and on its device.

    Attributes:
        name: what requests call it.
        digest: identifies its weights; keys and values depend on them.
        sums: what is added, by sublayer and product.
        sublayers: number of the model's sublayers, ``2L``.
        memo: its form for the kernels.
    """

    name: str
    digest: str
    sums: Mapping[tuple[int, AdaptedProduct], LowRankSum]
    sublayers: int
    memo: dict[str, Any] = field(default_factory=dict)

    @cached_property
    def adapted(self) -> frozenset[int]:
        """The sublayers to which it adds anything."""
        return frozenset(sublayer for sublayer, _ in self.sums)

    @property
    def bytes(self) -> int:
        """Memory of its weights."""
        factors = [each for found in self.sums.values() for each in found.factors]
        return sum(found.down.nbytes for found in self.sums.values()) + sum(each.up.nbytes for each in factors)

    def salted(self, salt: str) -> str:
        """A salt for what is known of earlier texts: keys and values depend on the adapter."""
        return f"{salt}\nadapter {self.digest}"

    def add(self, sublayer: int, product: AdaptedProduct, inputs: torch.Tensor, outputs: torch.Tensor) -> None:
        """Adds to what a product of a sublayer gives for the rows of a sequence, in place (``LowRankSum.add``)."""
        if (found := self.sums.get((sublayer, product))) is not None:
            found.add(inputs, outputs)
