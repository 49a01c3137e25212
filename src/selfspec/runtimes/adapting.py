"""Adapters fitted to a model: where their factors belong."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from selfspec.errors import AdapterError
from selfspec.model.low_rank import AdaptedProduct, Adapter, LowRankFactors, LowRankSum
from selfspec.model.sublayers import Sublayer
from selfspec.runtimes.fused import FusedAttention, FusedBlock, FusedMLP

Factors = tuple[torch.Tensor, torch.Tensor, float]
"""``lora_A`` ``[rank, inputs]``, ``lora_B`` ``[outputs, rank]`` and the scale of their product."""

Place = tuple[int, AdaptedProduct]

_ADAPTED = (FusedAttention, FusedMLP)
"""The blocks whose products can have adapters."""


def fit_adapter(
    name: str, digest: str, factors: Mapping[str, Factors], model: nn.Module, sublayers: Sequence[Sublayer]
) -> Adapter:
    """An adapter of a model, of factors by the names of the linear layers that they belong to.

    Args:
        name: what requests call it.
        digest: identifies its weights.
        factors: by the names that modules have in the model.
        model: the model.
        sublayers: all of its sublayers, as they run.

    Raises:
        AdapterError: the model has no such linear layer, it has another shape, or it is none of those that can be
            adapted beside the weights.
    """
    modules, products = dict(model.named_modules()), _products(sublayers)
    found: dict[Place, list[LowRankFactors]] = {}
    for layer, (down, up, scale) in factors.items():
        linear: Any = modules.get(layer)
        if linear is None:
            raise AdapterError(f"adapter '{name}' is of another model: there is no '{layer}' in this one")
        if id(linear) not in products:
            raise AdapterError(
                f"adapter '{name}' changes '{layer}', which has no low-rank products here: only attention and MLPs "
                "that run as fused blocks have; merge it (PEFT's merge_and_unload), or give Engine a PeftModel"
            )
        place, first = products[id(linear)]
        shapes, expected = (tuple(up.shape), tuple(down.shape)), (linear.out_features, linear.in_features)
        if (up.shape[0], down.shape[1]) != expected or up.shape[1] != down.shape[0]:
            raise AdapterError(
                f"adapter '{name}' is of another model: for '{layer}', which has {expected[1]} inputs and "
                f"{expected[0]} outputs, its factors are {shapes[0]} and {shapes[1]}"
            )
        block = sublayers[place[0]]
        assert isinstance(block, FusedBlock)
        dtype, device = block.products[place[1]].dtype, next(iter(block.parameters())).device
        down, up = (each.to(device=device, dtype=dtype).contiguous() for each in (down, up.T))
        found.setdefault(place, []).append(LowRankFactors(down, up, first, scale))
    sums = {place: LowRankSum(tuple(each)) for place, each in found.items()}
    return Adapter(name, digest, sums, len(sublayers))


def adaptable_layers(model: nn.Module, sublayers: Sequence[Sublayer]) -> dict[str, Any]:
    """By name the linear layers of a model that can have low-rank products, as its sublayers run."""
    products = _products(sublayers)
    return {name: module for name, module in model.named_modules() if id(module) in products}


def check_adapted(adapter: Adapter, sublayers: Sequence[Sublayer]) -> None:
    """Refuses an adapter where hooks that were added since have replaced sublayers that it changes, or their dtype.

    Raises:
        AdapterError: see above.
    """
    for index in adapter.adapted:
        if not isinstance(sublayers[index], _ADAPTED):
            raise AdapterError(
                f"adapter '{adapter.name}' changes sublayer {index}, which runs by transformers' own module since the "
                "model was changed; remove its hooks"
            )
    for (index, product), added in adapter.sums.items():
        block: Any = sublayers[index]
        if added.down.dtype != block.products[product].dtype:
            raise AdapterError(
                f"adapter '{adapter.name}' was read as {added.down.dtype}, and the model is of another dtype now; make "
                "another engine"
            )


def _products(sublayers: Sequence[Sublayer]) -> dict[int, tuple[Place, int]]:
    """By the identity of a linear layer the product that it is a part of, and its first output there."""
    return {
        id(linear): ((index, product), first)
        for index, block in enumerate(sublayers)
        if isinstance(block, _ADAPTED)
        for product, linear, first in _linears(block)
    }


def _linears(block: FusedBlock) -> Iterator[tuple[AdaptedProduct, nn.Module, int]]:
    first = 0
    for name in block.spec.inputs:
        linear: Any = getattr(block.module, name)
        yield AdaptedProduct.ENTERING, linear, first
        first += linear.out_features
    yield AdaptedProduct.LEAVING, getattr(block.module, block.spec.output), 0
