"""Fused sublayers: the same weights with fewer torch operations.

The families of the table share one form of attention and MLP. The fused blocks compute it with one product for queries,
keys and values, rope in place, keys and values written straight into the cache, attention on views of the cache, and
one product for gate and up. A sublayer that differs (other classes, other parts, hooks, adapters, quantised layers)
keeps the module itself, and so does a mixture of experts, but where it has kernels (``mixtures.py``).
"""

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import nn
from torch.nn import functional

from selfspec.model.families import Branch, Family, RopeLayout
from selfspec.model.forward import Forward, Rows
from selfspec.model.low_rank import AdaptedProduct
from selfspec.model.sublayers import AttentionSublayer, BranchSublayer, Sublayer
from selfspec.runtimes.activations import ATTRIBUTES, activate_gated, activation_of
from selfspec.runtimes.products import Function, Product, are_plain, can_join, is_plain, join, signature

if TYPE_CHECKING:
    from typing_extensions import Self

_PACKED_ROWS = 32
"""Up to this many, the query heads of a key head are the rows of one product, which reads the keys once."""

Attend: TypeAlias = Callable[["FusedAttention", torch.Tensor, Rows], torch.Tensor | None]
"""Attention of queries ``[rows, heads, head_dim]`` to what is in the cache, their own keys and values included.

It gives ``[rows, heads * head_dim]``, or ``None`` for rows that torch attends for.
"""


class FusedBlock(BranchSublayer):
    """A sublayer whose norms and products are ours, over the modules' very weights; else it is the ``generic`` one.

    ``place`` is its index among the sublayers.
    """

    place: int
    norms: tuple[Function | None, Function | None]
    products: tuple[Product, ...]
    _signature: list[Any]

    def __init__(self, generic: BranchSublayer) -> None:
        vars(self).update(vars(generic))

    def is_current(self) -> bool:
        """Whether the modules still are those, with those weights, that were fused."""
        return self._signature == signature(self.modules)

    def replaced(self, **parts: Any) -> "Self":
        """The same branch with other parts, which are named as its attributes are."""
        other = copy.copy(self)
        vars(other).update(parts)
        return other

    def enter(self, hidden_states: torch.Tensor, forward: Forward) -> torch.Tensor:
        """The first product, of the normed rows."""
        before = self.norms[0]
        normed = hidden_states if before is None else before(hidden_states)
        entered = self.products[0](normed, forward.widest)
        if (adapt := forward.adapting) is not None:
            adapt(self.place, AdaptedProduct.ENTERING, normed, entered)
        return entered

    def leave(self, activated: torch.Tensor, forward: Forward) -> torch.Tensor:
        """The branch, ``[rows, hidden]``, of the inputs of the second product."""
        branch, after = self.products[1](activated, forward.widest), self.norms[1]
        if (adapt := forward.adapting) is not None:
            adapt(self.place, AdaptedProduct.LEAVING, activated, branch)
        branch = branch if after is None else after(branch)
        return branch if self.multiplier == 1.0 else branch.mul_(self.multiplier)


def fuse(sublayer: Sublayer, family: Family, layer: int) -> Sublayer:
    """The fused form of a sublayer of a decoder layer, or itself where one of its modules is not its family's own."""
    if not are_plain(sublayer.modules):
        return sublayer
    if isinstance(sublayer, AttentionSublayer):
        known = _is_own(sublayer.module, family, family.attention, family.head_norms)
        return FusedAttention(sublayer, family, layer) if known else sublayer
    assert isinstance(sublayer, BranchSublayer)
    known = _is_own(sublayer.module, family, family.mlp, ATTRIBUTES)
    return FusedMLP(sublayer, family, layer) if known else sublayer


def _is_own(module: nn.Module, family: Family, branch: Branch, others: tuple[str, ...]) -> bool:
    """Whether a module is of its family's class and holds only ordinary linear layers and the modules named."""
    if not family.owns(module, branch.class_ending) or not {name for name, _ in module.named_children()} <= {
        *branch.parts,
        *others,
    }:
        return False
    return can_join(_inputs(module, branch)) and can_join([getattr(module, branch.output)])


def _inputs(module: nn.Module, branch: Branch) -> list[Any]:
    return [getattr(module, name) for name in branch.inputs]


class RowNorm(ABC):
    """The function of a plain norm module, over its very weights.

    Attributes:
        weight: of each entry.
        bias: of each entry, if any.
        epsilon: added to the variance.
        rounds: it rounds to the dtype before it multiplies by the weight.
        added: to the weight.
    """

    def __init__(self, norm: nn.Module, *, rounds: bool = False, added: float = 0.0) -> None:
        module: Any = norm
        self.weight: torch.Tensor = module.weight
        self.bias: torch.Tensor | None = getattr(module, "bias", None)
        self.epsilon = float(module.variance_epsilon if hasattr(module, "variance_epsilon") else module.eps)
        self.rounds, self.added = rounds, added
        self._shape = tuple(self.weight.shape)

    @abstractmethod
    def __call__(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Norms the last dimension."""


class RmsNorm(RowNorm):
    """An RMS norm. Most families round before they multiply by the weight; Gemma adds 1 to it in float32."""

    def __call__(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Norms the last dimension."""
        if self.added:
            weight = self.weight.float() + self.added
            return torch.rms_norm(hidden_states.float(), self._shape, weight, self.epsilon).to(hidden_states.dtype)
        if self.weight.dtype == torch.float32 or not self.rounds:
            return torch.rms_norm(hidden_states, self._shape, self.weight, self.epsilon)
        return torch.rms_norm(hidden_states, self._shape, None, self.epsilon).mul_(self.weight)


class LayerNorm(RowNorm):
    """A layer norm. Nemotron adds 1 to the weight."""

    def __call__(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Norms the last dimension."""
        weight = self.weight + self.added if self.added else self.weight
        return functional.layer_norm(hidden_states, self._shape, weight, self.bias, self.epsilon)


def fast_norm(norm: nn.Module, family: Family) -> Function:
    """A norm with as few operations as its rounding allows where it is one of its family's, else the module itself."""
    added = float(family.norms_plus_one)
    if not is_plain(norm) or getattr(norm, "weight", None) is None:
        return norm
    if family.owns(norm, "RMSNorm"):
        return RmsNorm(norm, rounds=family.rounds_normed, added=added)
    is_layer_norm = type(norm) is nn.LayerNorm or family.owns(norm, "LayerNorm1P")
    return LayerNorm(norm, added=added) if is_layer_norm else norm


def fast_norms(sublayer: BranchSublayer, family: Family) -> tuple[Function | None, Function | None]:
    """The norms before and after a branch."""
    before, after = sublayer.norm_before, sublayer.norm_after
    return before and fast_norm(before, family), after and fast_norm(after, family)


class FusedMLP(FusedBlock):
    """Norm, gate and up in one product, activation, down. Made by ``fuse``.

    Attributes:
        gated: there is a gate; else the first product gives what is activated.
    """

    def __init__(self, generic: BranchSublayer, family: Family, layer: int) -> None:
        super().__init__(generic)
        module: Any = self.module
        self.place = 2 * layer + 1
        self.norms = fast_norms(self, family)
        self.products = join(_inputs(module, family.mlp)), join([getattr(module, family.mlp.output)])
        self.activate, self.gated = activation_of(module), family.gated
        self._signature = signature(self.modules)

    def _branch(self, hidden_states: torch.Tensor, forward: Forward) -> torch.Tensor:
        entered = self.enter(hidden_states, forward)
        activated = activate_gated(self.activate, entered) if self.gated else self.activate(entered)
        return self.leave(activated, forward)


def turn_heads(heads: torch.Tensor, cosine: torch.Tensor, sine: torch.Tensor, *, neighbours: bool) -> None:
    """Rope in place on the first ``dim`` entries of ``[rows, heads, head_dim]``, of a cosine and a signed sine."""
    dim = cosine.shape[-1]
    turned = heads if dim == heads.shape[-1] else heads.narrow(2, 0, dim)
    swapped = turned.view(*turned.shape[:-1], -1, 2).flip(-1).flatten(-2) if neighbours else turned.roll(dim // 2, -1)
    if cosine.dtype == heads.dtype:
        turned.mul_(cosine).add_(swapped.mul_(sine))
    else:  # OLMo-2 computes rope in float32
        turned.copy_(turned * cosine + swapped * sine)


class FusedAttention(FusedBlock, AttentionSublayer):
    """Norm, projections in one product, rope in place, attention on the cache, output. Made by ``fuse``.

    Norms and products run over the rows of all sequences at once, attention over those of each sequence.

    Attributes:
        turns: it has a rope.
        turned: most entries of a head that it rotates.
        neighbours: neighbouring entries of a head rotate against each other, not its halves.
        norms_rows: norms of queries and keys are over all heads of a row together, as in OLMo-2, not over each head.
        norms_last: they follow rope.
        sinks: by query head, the score of a slot without a value that every row sees; ``None`` where there are none.
        kernel: attends before torch is asked; ``None`` where torch always does.
        turn: turns queries and keys in place; see ``turn_heads``.
    """

    kernel: Attend | None = None
    turn: Callable[..., None] = staticmethod(turn_heads)

    def __init__(self, generic: AttentionSublayer, family: Family, layer: int) -> None:
        super().__init__(generic)
        module: Any = self.module
        self.index, self.place = layer, 2 * layer
        self.norms = fast_norms(self, family)
        output = getattr(module, family.attention.output)
        self.products = join(_inputs(module, family.attention)), join([output])
        self.head_dim = self.turned = int(module.head_dim)
        self.heads = output.in_features // self.head_dim
        self.key_heads = (self.products[0].shape[0] // self.head_dim - self.heads) // 2
        self._group = self.heads // self.key_heads
        self.scale = float(module.scaling)
        local = family.local_rope and module.sliding_window is not None
        self.turns = bool(getattr(module, "use_rope", True)) and not (local and self.window is None)
        self.neighbours = family.rope is RopeLayout.NEIGHBOURS
        self.softcap: float | None = getattr(module, family.softcap) if family.softcap else None
        self.sinks: torch.Tensor | None = getattr(module, "sinks", None)
        norms: list[Any] = [getattr(module, name) for name in family.head_norms if hasattr(module, name)]
        self.head_norms = [fast_norm(norm, family) for norm in norms]
        self.norms_rows = bool(norms) and norms[0].weight.numel() != self.head_dim
        self.norms_last = family.head_norms_last
        self._signature = signature(self.modules)

    def _branch(self, hidden_states: torch.Tensor, forward: Forward) -> torch.Tensor:
        heads = self._project(hidden_states, forward)
        return self.leave(forward.by_part(lambda own, rows: self._attend(heads[own], rows)), forward)

    def _project(self, hidden_states: torch.Tensor, forward: Forward) -> torch.Tensor:
        """Queries, keys and values ``[rows, all heads, head_dim]``, after rope (``Forward.turn``)."""
        turned = self.heads + self.key_heads
        heads = self.enter(hidden_states, forward).view(-1, turned + self.key_heads, self.head_dim)
        if self.head_norms and not self.norms_last:
            self._norm_heads(heads)
        if self.turns:
            self.turn(heads.narrow(1, 0, turned), *forward.turn(self.rope), neighbours=self.neighbours)
        if self.head_norms and self.norms_last:
            self._norm_heads(heads)
        return heads

    def _norm_heads(self, heads: torch.Tensor) -> None:
        """Norms queries and keys of ``[rows, all heads, head_dim]`` in place."""
        parts = heads.narrow(1, 0, self.heads), heads.narrow(1, self.heads, self.key_heads)
        for part, norm in zip(parts, self.head_norms, strict=True):
            part.copy_(norm(part.flatten(1)).view_as(part) if self.norms_rows else norm(part))

    def _attend(self, heads: torch.Tensor, rows: Rows) -> torch.Tensor:
        """Writes keys and values of the rows of one sequence, and attends for them, ``[rows, heads * head_dim]``.

        ``heads`` are queries, keys and values, ``[rows, all heads, head_dim]``.
        """
        cache, first, queries = rows.sequence.cache, rows.first_slot(self.window), heads.narrow(1, 0, self.heads)
        cache.write_pairs(self.index, rows.start, heads.narrow(1, self.heads, 2 * self.key_heads))
        if self.kernel is not None and (attended := self.kernel(self, queries, rows)) is not None:
            return attended
        keys, values = cache.seen(self.index, first, rows.end - first)
        grouped = queries.view(rows.count, self.key_heads, self._group, self.head_dim)
        if rows.count * self._group <= _PACKED_ROWS or self._is_stepwise:
            return self._attend_packed(grouped, keys, values, rows)
        # Key heads take the place of the batch and are the same, without a copy, for every query head of their group.
        mask = rows.mask(self.window, queries.dtype, additive=False, causal_kernel=True)
        shape = (self.key_heads, self._group, *keys.shape[2:])
        attended = functional.scaled_dot_product_attention(
            grouped.permute(1, 2, 0, 3),
            keys.transpose(0, 1).expand(shape),
            values.transpose(0, 1).expand(shape),
            attn_mask=mask,
            is_causal=mask is None,
            scale=self.scale,
        )
        return attended.permute(2, 0, 1, 3).reshape(rows.count, -1)

    @property
    def _is_stepwise(self) -> bool:
        """Whether torch has no kernel for the scores."""
        return self.softcap is not None or self.sinks is not None

    def _attend_packed(
        self, grouped: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, rows: Rows
    ) -> torch.Tensor:
        """Attention with the query heads of a key head as consecutive rows of one product."""
        packed = grouped.transpose(0, 1).reshape(1, self.key_heads, rows.count * self._group, self.head_dim)
        mask = rows.mask(self.window, grouped.dtype, additive=False, causal_kernel=False, repeats=self._group)
        if self._is_stepwise:
            sinks = None
            if self.sinks is not None:
                sinks = self.sinks.view(1, self.key_heads, self._group).repeat(1, 1, rows.count)[..., None]
            attended = _attend_stepwise(packed, keys, values, mask, self.scale, softcap=self.softcap, sinks=sinks)
        else:
            attended = functional.scaled_dot_product_attention(packed, keys, values, attn_mask=mask, scale=self.scale)
        unpacked = attended.view(self.key_heads, rows.count, self._group, self.head_dim)
        return unpacked.transpose(0, 1).reshape(rows.count, -1)


def _attend_stepwise(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    mask: torch.Tensor | None,
    scale: float,
    *,
    softcap: float | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """Attention step by step, as transformers computes it: torch has no kernel for capped scores or sinks.

    Args:
        queries: ``[1, key heads, rows, head_dim]``.
        keys: ``[1, key heads, slots, head_dim]``.
        values: likewise.
        mask: bool, which slots each row sees; ``None`` for all.
        scale: of the scores.
        softcap: caps them.
        sinks: by row the score of a slot without a value that it sees besides, ``[1, key heads, rows, 1]``.

    Returns:
        Like the queries.
    """
    scores = torch.matmul(queries, keys.transpose(2, 3)).mul_(scale)
    if softcap is not None:
        scores = scores.div_(softcap).tanh_().mul_(softcap)
    if mask is not None:
        scores = scores.masked_fill_(~mask, torch.finfo(scores.dtype).min)
    if sinks is None:
        shares = scores.softmax(-1, dtype=torch.float32)
    else:
        shares = torch.cat([scores, sinks], -1).softmax(-1, dtype=torch.float32)[..., :-1]
    return torch.matmul(shares.to(queries.dtype), values)
