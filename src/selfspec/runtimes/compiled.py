"""Fused blocks that run in the compiled kernels of the CPU, up to as many rows as these are good at."""

import ctypes
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from selfspec.model.sublayers import Step, Sublayer
from selfspec.runtimes.fused import FusedAttention, FusedMLP
from selfspec.runtimes.kernels import DTYPES, Mlp, NativeSublayer, Projection, load, most_attending, most_rows
from selfspec.runtimes.products import Product, can_join

_LARGEST_HEAD = 512
"""Largest head that the kernel of attention has room for; ``MOST_DIM`` in ``kernels.cpp``."""


def compile_block(sublayer: Sublayer) -> Sublayer:
    """The compiled form of a fused block.

    Args:
        sublayer: any sublayer.

    Returns:
        A block with kernels for up to ``most_rows`` rows, or the sublayer itself where there are none for it: it is not
        fused, has norms in other places than Llama, or is not float32 or bfloat16 on the CPU.

    Raises:
        KernelBuildError: the kernels cannot be built.
    """
    if not isinstance(sublayer, (FusedAttention, FusedMLP)) or not sublayer.is_llama_like:
        return sublayer
    weights = list(sublayer.parameters())
    if {weight.device.type for weight in weights} != {"cpu"} or len({weight.dtype for weight in weights}) > 1:
        return sublayer
    if weights[0].dtype not in DTYPES:
        return sublayer
    load()
    return CompiledAttention(sublayer) if isinstance(sublayer, FusedAttention) else CompiledMLP(sublayer)


def compile_head(head: nn.Module) -> Callable[[torch.Tensor], torch.Tensor]:
    """The LM head with a kernel for a few rows, or the head itself where there is none for it.

    Raises:
        KernelBuildError: the kernels cannot be built.
    """
    if not can_join([head]):
        return head
    product = Product([head])  # type: ignore[list-item]
    known = product.weight.device.type == "cpu" and product.weight.dtype in DTYPES
    return CompiledProduct(product) if known else head


class CompiledMLP(FusedMLP):
    """A fused MLP that runs a few rows in one call. Made by ``compile_block``."""

    def __init__(self, fused: FusedMLP) -> None:
        vars(self).update(vars(fused))
        norm: Any = self.norm_before
        self._call = getattr(load(), f"mlp_{DTYPES[norm.weight.dtype]}")
        self._most_rows = most_rows(norm.weight.dtype)
        self._weights = Mlp(
            norm=norm.weight.data_ptr(),
            gate_up=self._gate_up.weight.data_ptr(),
            gate_up_bias=_address(self._gate_up.bias),
            down=self._down.weight.data_ptr(),
            down_bias=_address(self._down.bias),
            epsilon=norm.variance_epsilon,
            hidden=self._gate_up.weight.shape[1],
            inner=self._down.weight.shape[1],
        )
        self._reference = ctypes.byref(self._weights)

    def _branch(self, hidden_states: torch.Tensor, step: Step) -> torch.Tensor:
        rows = hidden_states.shape[0]
        if rows > self._most_rows or not hidden_states.is_contiguous():
            return super()._branch(hidden_states, step)
        branch = torch.empty_like(hidden_states)
        self._weights.threads = torch.get_num_threads()
        self._call(self._reference, hidden_states.data_ptr(), branch.data_ptr(), rows)
        return branch if self.multiplier == 1.0 else branch.mul_(self.multiplier)

    def describe(self, layer: int, view: int, turn: int) -> NativeSublayer | None:
        """What a native forward is told of it; ``None`` where it cannot be part of one."""
        if self.multiplier != 1.0:
            return None
        return NativeSublayer(mlp=ctypes.pointer(self._weights), layer=layer, view=view, turn=turn)


class CompiledAttention(FusedAttention):
    """A fused attention branch that runs a few rows in three calls."""

    def __init__(self, fused: FusedAttention) -> None:
        vars(self).update(vars(fused))
        norm: Any = self.norm_before
        self._call = getattr(load(), f"project_{DTYPES[norm.weight.dtype]}")
        self._most_rows = most_rows(norm.weight.dtype)
        self._weights = Projection(
            norm=norm.weight.data_ptr(),
            weights=self._qkv.weight.data_ptr(),
            bias=_address(self._qkv.bias),
            epsilon=norm.variance_epsilon,
            hidden=self._qkv.weight.shape[1],
            heads=self._heads,
            key_heads=self._kv_heads,
            head_dim=self._head_dim,
        )
        self._reference = ctypes.byref(self._weights)
        self._output = CompiledProduct(self._output)
        self._attend_call = getattr(load(), f"attend_{DTYPES[norm.weight.dtype]}")
        has_kernel = self._softcap is None and self._head_dim % 64 == 0 and self._head_dim <= _LARGEST_HEAD
        self._most_attending = most_attending(norm.weight.dtype) if has_kernel else 0

    def _project(self, hidden_states: torch.Tensor, step: Step) -> torch.Tensor:
        rows, cosine, sine, turned = hidden_states.shape[0], None, None, 0
        if rows > self._most_rows or not hidden_states.is_contiguous():
            return super()._project(hidden_states, step)
        if self._turns:
            cosine, sine = step.turn(self.rope)
            turned = cosine.shape[-1]
            if cosine.dtype != hidden_states.dtype or not (cosine.is_contiguous() and sine.is_contiguous()):
                return super()._project(hidden_states, step)
        pair = step.sequence.cache.slots_for(self._layer, step.layout.start, rows)
        heads = hidden_states.new_empty(rows, self._heads + 2 * self._kv_heads, self._head_dim)
        self._weights.threads = torch.get_num_threads()
        self._call(
            self._reference,
            hidden_states.data_ptr(),
            _address(cosine),
            _address(sine),
            turned,
            heads.data_ptr(),
            pair.data_ptr(),
            pair.shape[2],
            step.layout.start,
            rows,
        )
        return heads

    def _attend(self, queries: torch.Tensor, step: Step) -> torch.Tensor:
        rows, layout = queries.shape[0], step.layout
        if rows > self._most_attending:
            return super()._attend(queries, step)
        first = layout.first_slot(self.window)
        pair = step.sequence.cache.slots_for(self._layer, layout.start, rows)
        mask = layout.mask(self.window, queries.dtype, additive=False, causal_kernel=False)
        attended = queries.new_empty(rows, self._heads * self._head_dim)
        assert mask is None or mask.is_contiguous()
        assert queries.stride(0) == (self._heads + 2 * self._kv_heads) * self._head_dim
        self._weights.threads = torch.get_num_threads()
        self._attend_call(
            self._reference,
            queries.data_ptr(),
            pair.data_ptr(),
            pair.shape[2],
            first,
            layout.end - first,
            _address(mask),
            self._scale,
            attended.data_ptr(),
            rows,
        )
        return attended

    def describe(self, layer: int, view: int, turn: int) -> NativeSublayer | None:
        """What a native forward is told of it; ``None`` where it cannot be part of one."""
        if self.multiplier != 1.0 or not self._most_attending:
            return None
        return NativeSublayer(
            attention=ctypes.pointer(self._weights),
            output=self._output.weight.data_ptr(),
            output_bias=_address(self._output.bias),
            scale=self._scale,
            layer=layer,
            view=view,
            turn=turn if self._turns else -1,
        )


class CompiledProduct(Product):
    """A product that runs a few rows in one call.

    Args:
        product: the product, whose weights it takes.
    """

    def __init__(self, product: Product) -> None:
        self.weight, self.bias = product.weight, product.bias
        self._call = getattr(load(), f"product_{DTYPES[self.weight.dtype]}")
        self._most_rows = most_rows(self.weight.dtype)
        self._addresses = self.weight.data_ptr(), _address(self.bias)

    def __call__(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """``[rows, inputs]`` to ``[rows, outputs]``."""
        rows, (outputs, inputs) = hidden_states.shape[0], self.weight.shape
        if rows > self._most_rows or not hidden_states.is_contiguous():
            return super().__call__(hidden_states)
        out = hidden_states.new_empty(rows, outputs)
        self._call(
            *self._addresses, hidden_states.data_ptr(), out.data_ptr(), rows, inputs, outputs, torch.get_num_threads()
        )
        return out


def _address(tensor: torch.Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()
