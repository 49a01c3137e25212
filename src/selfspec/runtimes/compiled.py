"""Fused blocks that run in the compiled kernels of the CPU, up to as many rows as these are good at."""

import copy
import ctypes
import sys
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from transformers.activations import GELUTanh

from selfspec.model.families import Family
from selfspec.model.forward import Forward
from selfspec.model.sublayers import Sublayer
from selfspec.runtimes.fused import Function, FusedAttention, FusedMLP
from selfspec.runtimes.kernels import DTYPES, load, most_rows
from selfspec.runtimes.native import NativeForward
from selfspec.runtimes.native_weights import NativeBranch, describe_norm
from selfspec.runtimes.norms import RmsNorm
from selfspec.runtimes.products import Product, can_join, join
from selfspec.runtimes.structures import AttentionWeights, Heads, Linear, MlpWeights

_LARGEST_HEAD = 512
"""Largest head that the attention kernel has room for; ``MOST_DIM`` in ``attention.h``."""

_HEAD_STEP = 32
"""The head size must be a multiple of this for the attention kernel."""


def compile_block(sublayer: Sublayer, family: Family) -> Sublayer:
    """The compiled form of a fused block.

    Args:
        sublayer: any sublayer.
        family: the row of its family.

    Returns:
        A block with kernels for few rows, or the sublayer itself where there are none for it: it is not fused, or not
        float32 or bfloat16 on the CPU.

    Raises:
        KernelBuildError: the kernels cannot be built.
    """
    if not isinstance(sublayer, (FusedAttention, FusedMLP)):
        return sublayer
    weights = list(sublayer.parameters())
    dtypes = {weight.dtype for weight in weights if weight.is_floating_point()}
    if not _on_cpu(weights) or len(dtypes) > 1 or not dtypes <= DTYPES.keys():
        return sublayer
    load()
    if isinstance(sublayer, FusedAttention):
        return CompiledAttention(sublayer, family)
    return CompiledMLP(sublayer, family)


def compile_head(head: nn.Module) -> Callable[..., torch.Tensor]:
    """The LM head with a kernel for a few rows, or the head itself where there is none for it.

    Raises:
        KernelBuildError: the kernels cannot be built.
    """
    if not can_join([head]):
        return head
    product = join([head])
    known = _on_cpu(head.parameters()) and product.dtype in DTYPES
    return CompiledProduct(product) if known else head


class CompiledMLP(FusedMLP):
    """A fused MLP that runs a few rows in one native call. Made by ``compile_block``.

    Args:
        fused: the fused block.
        family: the row of its family.

    Attributes:
        native: the form that a native forward takes; ``None`` where it cannot take part.
        alone: a native forward of this sublayer only.
    """

    def __init__(self, fused: FusedMLP, family: Family) -> None:
        super().__init__(fused, family)
        self._gate_up, self._down = CompiledProduct(self._gate_up), CompiledProduct(self._down)
        self._activation = native_activation(self._activate)
        self.native = None if self._activation is None else self._describe()
        self.alone = NativeForward([self.native])

    def __call__(self, hidden_states: torch.Tensor, forward: Forward) -> torch.Tensor:
        """Runs the branch and adds it to the residual stream, ``[rows, hidden]`` in and out."""
        return _run(self, super().__call__, hidden_states, forward)

    def _describe(self) -> NativeBranch | None:
        norms = _known(*self._norms)
        if norms is None:
            return None
        return NativeBranch(
            weights=MlpWeights(self._gate_up.linear, self._down.linear, self._down.shape[1], self._activation),
            norms=norms,
            multiplier=self.multiplier,
            hidden=self._gate_up.shape[1],
            dtype=self._down.dtype,
        )


class CompiledAttention(FusedAttention):
    """A fused attention branch that runs a few rows in one native call. Made by ``compile_block``.

    Args:
        fused: the fused block.
        family: the row of its family.

    Attributes:
        native: the form that a native forward takes; ``None`` where it cannot take part.
        alone: a native forward of this sublayer only.
    """

    def __init__(self, fused: FusedAttention, family: Family) -> None:
        super().__init__(fused, family, fused._layer)
        self._qkv, self._output = CompiledProduct(self._qkv), CompiledProduct(self._output)
        has_kernel = self._head_dim % _HEAD_STEP == 0 and self._head_dim <= _LARGEST_HEAD
        self.native = self._describe() if has_kernel else None
        self.alone = NativeForward([self.native])

    def __call__(self, hidden_states: torch.Tensor, forward: Forward) -> torch.Tensor:
        """Runs the branch and adds it to the residual stream, ``[rows, hidden]`` in and out."""
        return _run(self, super().__call__, hidden_states, forward)

    def _describe(self) -> NativeBranch | None:
        norms, head_norms = _known(*self._norms), _known(*(self._head_norms or (None, None)))
        if norms is None or head_norms is None:
            return None
        weights = AttentionWeights(
            inputs=self._qkv.linear,
            output=self._output.linear,
            query_norm=describe_norm(head_norms[0]),
            key_norm=describe_norm(head_norms[1]),
            norms_rows=self._norms_rows,
            sizes=Heads(self._heads, self._kv_heads, self._head_dim),
            scale=self._scale,
            softcap=self._softcap or 0.0,
            layer=self._layer,
        )
        return NativeBranch(
            weights=weights,
            norms=norms,
            multiplier=self.multiplier,
            hidden=self._qkv.shape[1],
            dtype=self._qkv.dtype,
            window=self.window,
            rope=self.rope,
            turns=self._turns,
        )


class CompiledProduct(Product):
    """A product that runs a few rows in one call; of low-bit weights, any number of rows.

    Args:
        product: the product, whose weights it takes.

    Attributes:
        linear: the form that the kernels take.
    """

    def __init__(self, product: Product) -> None:
        super().__init__(product.shape, product.dtype, product.bias, product.linear)
        self._product = product
        self._call = getattr(load(), f"product_{DTYPES[self.dtype]}")
        self._most_rows = sys.maxsize if self.bits else most_rows(self.dtype)
        self._reference = ctypes.byref(self.linear)

    def values(self) -> torch.Tensor:
        """The weights ``[outputs, inputs]``."""
        return self._product.values()

    def with_linear(self, linear: Linear) -> "CompiledProduct":
        """The same product from other weights, which the kernel multiplies whatever the number of rows.

        Args:
            linear: the weights; they have to outlive the product.
        """
        other = copy.copy(self)
        other.linear, other._reference, other._most_rows = linear, ctypes.byref(linear), sys.maxsize
        return other

    def __call__(self, hidden_states: torch.Tensor, widest: int | None = None) -> torch.Tensor:
        """``[rows, inputs]`` to ``[rows, outputs]``.

        Args:
            hidden_states: ``[rows, inputs]``.
            widest: with rows of several sequences, the most rows of one of them: it decides whether the kernel runs,
                so that a row gets what it gets with the rows of its own sequence alone.
        """
        rows, (outputs, inputs) = hidden_states.shape[0], self.shape
        if (rows if widest is None else widest) > self._most_rows or not hidden_states.is_contiguous():
            return self._product(hidden_states)
        out = hidden_states.new_empty(rows, outputs)
        threads = torch.get_num_threads()
        self._call(self._reference, hidden_states.data_ptr(), out.data_ptr(), rows, inputs, outputs, threads)
        return out


def _run(
    block: "CompiledMLP | CompiledAttention",
    fused: Callable[[torch.Tensor, Forward], torch.Tensor],
    hidden_states: torch.Tensor,
    forward: Forward,
) -> torch.Tensor:
    """Runs one sublayer natively where that takes the rows of each sequence, else its fused form."""
    if block.alone.takes(hidden_states, (0,), forward):
        stream = hidden_states.clone(memory_format=torch.contiguous_format)
        block.alone.run(stream, (0,), forward)
        return stream
    groups = _groups(forward, block.alone.most_rows, most_rows(hidden_states.dtype))
    if len(groups) == 1:
        return fused(hidden_states, forward)
    slices = [slice(forward.slices[group[0]].start, forward.slices[group[-1]].stop) for group in groups]
    parts = [
        _run(block, fused, hidden_states[own], forward.only(group)) for own, group in zip(slices, groups, strict=True)
    ]
    return torch.cat(parts)


def _groups(forward: Forward, native_rows: int, product_rows: int) -> list[list[int]]:
    """Consecutive sequences whose rows get together what they get alone.

    Args:
        forward: the rows.
        native_rows: most rows of one sequence that run natively; 0 where none do.
        product_rows: most rows of all sequences together whose products run in the kernels.
    """
    groups: list[list[int]] = []
    counts = [part.count for part in forward.parts]
    for index, count in enumerate(counts):
        last = groups[-1] if groups else []
        if native_rows:
            joins = last and max(count, counts[last[-1]]) <= native_rows
        else:
            joins = last and count + sum(counts[other] for other in last) <= product_rows
        if joins:
            last.append(index)
        else:
            groups.append([index])
    return groups


def _on_cpu(weights: Iterable[torch.Tensor]) -> bool:
    """Whether weights are on the CPU, or on the device ``meta``, where only shapes are checked."""
    return {weight.device.type for weight in weights} in ({"cpu"}, {"meta"})


def native_activation(function: Function) -> int | None:
    """The number by which ``rows.h`` knows an activation; ``None`` for one that it does not know.

    Args:
        function: the activation of a fused MLP.
    """
    if function is functional.silu:
        return 0
    kernel = function.act if isinstance(function, GELUTanh) else None
    return 1 if isinstance(kernel, partial) and kernel.func is functional.gelu else None


def _known(*norms: Any) -> tuple[RmsNorm | None, ...] | None:
    """The norms, where the kernels compute each of them, else ``None``."""
    return norms if all(norm is None or isinstance(norm, RmsNorm) for norm in norms) else None
