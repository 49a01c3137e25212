"""Several linear layers as one product over the very same weights."""

import threading
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import nn
from torch.nn import functional

_ALIGNMENT = 64
"""Bytes to which torch aligns a tensor; products of a view without this alignment could differ in the last bits."""

_WATCHING = "transformers.utils.output_capturing"
"""The module of transformers' hooks that record hidden states and attention weights."""

_joining = threading.Lock()


def is_plain(module: nn.Module) -> bool:
    """Whether a module has no hooks and its class's own ``forward``.

    transformers' hooks that record hidden states or attention weights do not count. They stay in a model after such a
    call, change nothing, and record only while asked to.
    """
    attributes = vars(module)
    hooks = [hook for hook in attributes["_forward_hooks"].values() if getattr(hook, "__module__", None) != _WATCHING]
    return not (hooks or attributes["_forward_pre_hooks"] or "forward" in attributes)


def signature(modules: Sequence[nn.Module]) -> list[Any]:
    """Identifies modules, their weights and their hooks: equal as long as none of these has been replaced."""
    found: list[Any] = []
    for root in modules:
        for module in root.modules():
            found.append((id(module), is_plain(module)))
            found += [
                parameter.data_ptr() for parameter in vars(module)["_parameters"].values() if parameter is not None
            ]
    return found


def can_join(linears: Sequence[Any]) -> bool:
    """Whether modules are ordinary linear layers whose weights can share one piece of memory.

    Quantised layers, LoRA adapters and other wrappers are of another class.
    """
    if not all(type(linear) is nn.Linear and is_plain(linear) for linear in linears):
        return False
    weights = [linear.weight for linear in linears]
    biases = [linear.bias for linear in linears if linear.bias is not None]
    if len(biases) not in (0, len(linears)) or not all(map(_is_ordinary, weights + biases)):
        return False
    if len({(weight.dtype, weight.device, weight.shape[1]) for weight in weights}) > 1:
        return False
    return all(weight.nbytes % _ALIGNMENT == 0 for weight in weights[:-1])


class Product:
    """The concatenated outputs of linear layers with the same input, in one product.

    Their weights are moved into one piece of memory, and the layers' own parameters become views of it. So the model
    computes what it did, bit for bit, a change of a weight is seen by both, and nothing is held twice. Only while the
    weights are moved, the new piece is held beside the originals.

    Args:
        linears: layers that ``can_join``.
    """

    def __init__(self, linears: Sequence[nn.Linear]) -> None:
        self.weight = _join([linear.weight for linear in linears])
        self.bias = None if linears[0].bias is None else _join([linear.bias for linear in linears])

    def __call__(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """``[rows, inputs]`` to ``[rows, outputs of all]``."""
        return functional.linear(hidden_states, self.weight, self.bias)


def _is_ordinary(parameter: Any) -> bool:
    return type(parameter) is nn.Parameter and type(parameter.data) is torch.Tensor and parameter.is_contiguous()


def _join(parameters: Sequence[torch.Tensor]) -> torch.Tensor:
    with _joining, torch.inference_mode(mode=False), torch.no_grad():
        first = parameters[0].data
        if len(parameters) == 1:
            return first
        if all(_follows(left, right) for left, right in pairwise(parameters)):  # an earlier engine has joined them
            return first.as_strided((sum(map(len, parameters)), *first.shape[1:]), first.stride())
        joined = torch.cat([parameter.data for parameter in parameters])
        parts = torch.split(joined, [len(parameter) for parameter in parameters])
        for parameter, part in zip(parameters, parts, strict=True):
            parameter.data = part
        return joined


def _follows(left: torch.Tensor, right: torch.Tensor) -> bool:
    same = left.untyped_storage().data_ptr() == right.untyped_storage().data_ptr()
    return same and right.storage_offset() == left.storage_offset() + left.numel()
