"""Fused Llama-like sublayers: the fast path, made from the same weights.

The families of the table share one shape of attention and MLP. The fused blocks compute it with as few operations as
torch has for it: one product for queries, keys and values, rope in place, keys and values straight into the cache,
attention on views of the cache, one product for gate and up. What a block does not know exactly (other classes, other
parts, interleaved rope, an MLP without a gate, hooks, adapters, quantised layers, mixtures of experts) stays with the
module itself. Norms that are no RMS norms are called as they are.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from transformers.activations import SiLUActivation

from selfspec.model.families import Branch, Family, Norms, RopeLayout
from selfspec.model.sublayers import AttentionSublayer, Step, Sublayer
from selfspec.runtimes.products import Product, can_join, is_plain, signature

Function = Callable[[torch.Tensor], torch.Tensor]

_HEAD_NORMS = ("q_norm", "k_norm")
_ACTIVATIONS = ("act_fn", "activation_fn")

_PACKED_ROWS = 32
"""Up to here the query heads of one key head are attended to as rows of one product, which reads its keys once."""


def fuse(sublayer: Sublayer, family: Family, layer: int) -> Sublayer:
    """The fast form of a sublayer.

    Args:
        sublayer: the generic one.
        family: the row of its family.
        layer: index of its decoder layer.

    Returns:
        A fused block, or the sublayer itself where a module of it is not what its family's are.
    """
    if not all(is_plain(part) for root in sublayer.modules for part in root.modules()):
        return sublayer
    if isinstance(sublayer, AttentionSublayer):
        known = family.rope is RopeLayout.HALVES and _is_own(sublayer.module, family, family.attention, _HEAD_NORMS)
        return FusedAttention(sublayer, family, layer) if known else sublayer
    known = family.gated and _is_own(sublayer.module, family, family.mlp, _ACTIVATIONS)
    return FusedMLP(sublayer, family) if known else sublayer


def _is_own(module: nn.Module, family: Family, branch: Branch, others: tuple[str, ...]) -> bool:
    """Whether a module is of its family's class, with ordinary linear layers, and holds nothing but them and others."""
    if not family.owns(module, branch) or not {name for name, _ in module.named_children()} <= {*branch.parts, *others}:
        return False
    return can_join(_inputs(module, branch)) and can_join([getattr(module, branch.output)])


def _inputs(module: nn.Module, branch: Branch) -> list[Any]:
    return [getattr(module, name) for name in branch.inputs]


def fast_norm(norm: nn.Module, family: Family) -> Function:
    """A norm with as few operations as its rounding allows where it is a plain RMS norm, else the module itself."""
    known = family.norms is Norms.RMS and type(norm).__name__ == f"{family.classes}RMSNorm" and is_plain(norm)
    if not known or not type(norm).__module__.startswith("transformers.models."):
        return norm
    weight: Any = norm.weight
    shape, epsilon = tuple(weight.shape), float(norm.variance_epsilon)  # type: ignore[arg-type]
    if weight.dtype == torch.float32 or not family.rounds_normed:
        return lambda hidden_states: torch.rms_norm(hidden_states, shape, weight, epsilon)
    return lambda hidden_states: torch.rms_norm(hidden_states, shape, None, epsilon).mul_(weight)


def _is_fast(norm: Function | None) -> bool:
    return norm is not None and not isinstance(norm, nn.Module)


class FusedMLP(Sublayer):
    """Norm, gate and up in one product, activation, down. Made by ``fuse``."""

    def __init__(self, generic: Sublayer, family: Family) -> None:
        vars(self).update(vars(generic))  # the same modules, norms and multiplier
        module: Any = self.module
        self._norms = [
            None if norm is None else fast_norm(norm, family) for norm in (self.norm_before, self.norm_after)
        ]
        self._gate_up = Product(_inputs(module, family.mlp))
        self._down = Product([getattr(module, family.mlp.output)])
        activation = next(getattr(module, name) for name in _ACTIVATIONS if hasattr(module, name))
        self._activate: Function = functional.silu if type(activation) in (nn.SiLU, SiLUActivation) else activation
        self._signature = signature(self.modules)

    @property
    def is_llama_like(self) -> bool:
        """Whether it is a plain RMS norm before, none behind, and silu."""
        return _is_fast(self._norms[0]) and self._norms[1] is None and self._activate is functional.silu

    def is_current(self) -> bool:
        """Whether the modules still are those, with those weights, that were fused."""
        return self._signature == signature(self.modules)

    def _branch(self, hidden_states: torch.Tensor, step: Step) -> torch.Tensor:
        before, after = self._norms
        normed = hidden_states if before is None else before(hidden_states)
        gate, up = self._gate_up(normed).chunk(2, dim=-1)
        branch = self._down(self._activate(gate).mul_(up))
        branch = branch if after is None else after(branch)
        return branch if self.multiplier == 1.0 else branch.mul_(self.multiplier)


class FusedAttention(AttentionSublayer):
    """Norm, projections in one product, rope in place, attention on the cache, output. Made by ``fuse``."""

    def __init__(self, generic: AttentionSublayer, family: Family, layer: int) -> None:
        vars(self).update(vars(generic))  # the same modules, norms, multiplier, window and rope
        module: Any = self.module
        self._layer = layer
        self._norms = [
            None if norm is None else fast_norm(norm, family) for norm in (self.norm_before, self.norm_after)
        ]
        output = getattr(module, family.attention.output)
        self._qkv = Product(_inputs(module, family.attention))
        self._output = Product([output])
        self._head_dim = int(module.head_dim)
        self._heads = output.in_features // self._head_dim
        self._kv_heads = (self._qkv.weight.shape[0] // self._head_dim - self._heads) // 2
        self._group = self._heads // self._kv_heads
        self._scale = float(module.scaling)
        self._turns = bool(getattr(module, "use_rope", True))
        self._softcap: float | None = getattr(module, family.softcap) if family.softcap else None
        self._head_norms = [fast_norm(getattr(module, name), family) for name in _HEAD_NORMS if hasattr(module, name)]
        # OLMo-2 norms the heads of a row together, the others one by one.
        self._norms_rows = bool(self._head_norms) and module.q_norm.weight.numel() != self._head_dim
        self._signature = signature(self.modules)

    @property
    def is_llama_like(self) -> bool:
        """Whether it is a plain RMS norm before, none behind, and none of queries and keys."""
        return _is_fast(self._norms[0]) and self._norms[1] is None and not self._head_norms

    def is_current(self) -> bool:
        """Whether the modules still are those, with those weights, that were fused."""
        return self._signature == signature(self.modules)

    def _branch(self, hidden_states: torch.Tensor, step: Step) -> torch.Tensor:
        heads = self._project(hidden_states, step)
        branch, after = self._output(self._attend(heads.narrow(1, 0, self._heads), step)), self._norms[1]
        branch = branch if after is None else after(branch)
        return branch if self.multiplier == 1.0 else branch.mul_(self.multiplier)

    def _project(self, hidden_states: torch.Tensor, step: Step) -> torch.Tensor:
        """Queries, keys and values ``[rows, all heads, head_dim]``, turned; keys and values are in the cache then."""
        before = self._norms[0]
        normed = hidden_states if before is None else before(hidden_states)
        turned = self._heads + self._kv_heads
        heads = self._qkv(normed).view(-1, turned + self._kv_heads, self._head_dim)
        if self._head_norms:
            self._norm_heads(heads)
        if self._turns:
            _turn(heads.narrow(1, 0, turned), *step.turn(self.rope))
        pairs = heads.narrow(1, self._heads, 2 * self._kv_heads)
        step.sequence.cache.write_pairs(self._layer, step.layout.start, pairs)
        return heads

    def _norm_heads(self, heads: torch.Tensor) -> None:
        """Norms queries and keys of ``[rows, all heads, head_dim]`` in place."""
        parts = heads.narrow(1, 0, self._heads), heads.narrow(1, self._heads, self._kv_heads)
        for part, norm in zip(parts, self._head_norms, strict=True):
            part.copy_(norm(part.flatten(1)).view_as(part) if self._norms_rows else norm(part))

    def _attend(self, queries: torch.Tensor, step: Step) -> torch.Tensor:
        """``[rows, heads, head_dim]`` to ``[rows, heads * head_dim]``."""
        rows, layout = queries.shape[0], step.layout
        first = layout.first_slot(self.window)
        keys, values = step.sequence.cache.seen(self._layer, first, layout.end - first)
        grouped = queries.view(rows, self._kv_heads, self._group, self._head_dim)
        if rows * self._group <= _PACKED_ROWS or self._softcap is not None:
            return self._attend_packed(grouped, keys, values, step)
        # Key heads take the place of the batch and are the same, without a copy, for every query head of their group.
        mask = layout.mask(self.window, queries.dtype, additive=False, causal_kernel=True)
        shape = (self._kv_heads, self._group, *keys.shape[2:])
        attended = functional.scaled_dot_product_attention(
            grouped.permute(1, 2, 0, 3),
            keys.transpose(0, 1).expand(shape),
            values.transpose(0, 1).expand(shape),
            attn_mask=mask,
            is_causal=mask is None,
            scale=self._scale,
        )
        return attended.permute(2, 0, 1, 3).reshape(rows, -1)

    def _attend_packed(
        self, grouped: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, step: Step
    ) -> torch.Tensor:
        """The query heads of a key head stand behind one another, as more rows of one product."""
        rows = grouped.shape[0]
        packed = grouped.transpose(0, 1).reshape(1, self._kv_heads, rows * self._group, self._head_dim)
        mask = step.layout.mask(self.window, grouped.dtype, additive=False, causal_kernel=False, repeats=self._group)
        if self._softcap is None:
            attended = functional.scaled_dot_product_attention(packed, keys, values, attn_mask=mask, scale=self._scale)
        else:
            attended = _softcapped(packed, keys, values, mask, self._scale, self._softcap)
        unpacked = attended.view(self._kv_heads, rows, self._group, self._head_dim)
        return unpacked.transpose(0, 1).reshape(rows, -1)


def _turn(heads: torch.Tensor, cosine: torch.Tensor, sine: torch.Tensor) -> None:
    """Rope in place: ``[rows, heads, head_dim]``, of which as much turns as ``[rows, 1, dim]`` has."""
    dim = cosine.shape[-1]
    turned = heads if dim == heads.shape[-1] else heads.narrow(2, 0, dim)
    swapped = turned.roll(dim // 2, -1)
    if cosine.dtype == heads.dtype:
        turned.mul_(cosine).add_(swapped.mul_(sine))
    else:  # OLMo-2 turns in float32
        turned.copy_(turned * cosine + swapped * sine)


def _softcapped(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    mask: torch.Tensor | None,
    scale: float,
    softcap: float,
) -> torch.Tensor:
    """Attention with capped scores, for which torch has no kernel; step by step as transformers computes it."""
    scores = torch.matmul(queries, keys.transpose(2, 3)).mul_(scale)
    scores = scores.div_(softcap).tanh_().mul_(softcap)
    if mask is not None:
        scores = scores.masked_fill_(~mask, torch.finfo(scores.dtype).min)
    return torch.matmul(scores.softmax(-1, dtype=torch.float32).to(queries.dtype), values)
