"""One forward: rows of one or several sequences, with their cache slots, positions and masks.

Everything but attention runs over the rows of all sequences at once. Attention runs for the rows of each sequence.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch.nn import functional

from selfspec.model import transfer
from selfspec.model.cache import KeyValueCache
from selfspec.model.low_rank import AdaptedProduct, Adapter
from selfspec.model.rope import CosSin, Rope, Rotation

Adapt = Callable[[int, AdaptedProduct, torch.Tensor, torch.Tensor], None]
"""``Forward.adapt``."""


@dataclass
class SequenceState:
    """What the model keeps of one sequence.

    Attributes:
        cache: its keys and values.
        long_rope: rope uses the long frequencies (``longrope``).
        adapter: what is added to the model's products for its rows, if anything.
    """

    cache: KeyValueCache
    long_rope: bool = False
    adapter: Adapter | None = None


class Likely(NamedTuple):
    """Which tokens may be drawn: filters that are applied one after the other, as in transformers.

    Attributes:
        top_k: keep the ``k`` most probable tokens, and those that tie with the last of them; 0 keeps all.
        top_p: keep the smallest set of tokens with at least this share of the probability mass that is left.
        min_p: drop tokens less probable than this share of the most probable one.
    """

    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0


ALL = Likely()
"""All tokens may be drawn."""


@dataclass(frozen=True)
class Drawing:
    """How tokens are drawn from logits, by noise that depends on seed, position and token (``sampling.rules``).

    Attributes:
        key: the seed's, an unsigned integer of 64 bits.
        temperature: divides the logits; 0 for the token of the largest.
        likely: which tokens are drawn, on a CPU.
        changed: how logits change before, in native calls, which know the tokens before a row (``ChangedLogits``); or
            ``None``.
    """

    key: int
    temperature: float
    likely: Likely = ALL
    changed: Any = None


@dataclass(frozen=True, eq=False)
class Rows:
    """The rows of one sequence in a forward: their cache slots, positions and visibility.

    A row sees the first ``prefix`` slots of the cache, and of the slots after them those that ``visible`` names. If
    ``visible`` is ``None``, it sees the rows of this object up to itself, and none of the slots between.

    Attributes:
        sequence: the sequence.
        start: cache slot of the first row; row ``i`` writes its keys and values to slot ``start + i``.
        count: number of rows.
        prefix: number of leading slots that every row sees, at most ``start``.
        depths: position of each row, counted from ``prefix``; ``None`` for ``0, 1, 2 …``.
        visible: bool ``[count, end - prefix]`` (query, slot from ``prefix`` on), or ``None`` for causal rows.
        drawing: how each row's next token is drawn, if the forward can do that.
        settled: all rows will be committed, whatever they give, as those of a prompt.
        seen: what of the text they see where they run natively (``SeenText``); ``None`` for all of it.
        memo: what is computed once for all layers.
    """

    sequence: SequenceState
    start: int
    count: int
    prefix: int
    depths: tuple[int, ...] | None = None
    visible: torch.Tensor | None = None
    drawing: Drawing | None = None
    settled: bool = False
    seen: Any = None
    memo: dict[str, Any] = field(default_factory=dict)
    _masks: dict[tuple[int | None, torch.dtype | None, bool, int], torch.Tensor | None] = field(default_factory=dict)

    @property
    def end(self) -> int:
        """The slot after the last row's."""
        return self.start + self.count

    @cached_property
    def positions(self) -> torch.Tensor:
        """Long ``[count]``, the position of each row in the sequence; computed on first use."""
        device = self.sequence.cache.device
        if self.depths is None:
            return torch.arange(self.prefix, self.prefix + self.count, device=device)
        return transfer.send([self.prefix + depth for depth in self.depths], device)

    @property
    def is_chain(self) -> bool:
        """The rows are consecutive tokens after the prefix, each of which sees all before it."""
        return self.visible is None and self.depths is None and self.prefix == self.start

    def each(self) -> list["Rows"]:
        """The rows one by one, each of which sees all slots before it; always the same objects."""
        assert self.is_chain, "these rows cannot run one after the other"
        if "each" not in self.memo:
            starts = range(self.start, self.end)
            self.memo["each"] = [Rows(self.sequence, start, 1, start, drawing=self.drawing) for start in starts]
        rows: list[Rows] = self.memo["each"]
        return rows

    @cached_property
    def slot_positions(self) -> torch.Tensor:
        """Long ``[end]``, the position of what is in each slot; before ``start``, a slot's number is its position."""
        return torch.cat([torch.arange(self.start, device=self.positions.device), self.positions])

    @property
    def drawings(self) -> Iterator[tuple[Drawing | None, int]]:
        """For each row how its token is drawn, and the position of that."""
        depths = range(self.count) if self.depths is None else self.depths
        return ((self.drawing, self.prefix + depth + 1) for depth in depths)

    @property
    def lowest_position(self) -> int:
        """Smallest of the positions."""
        return self.prefix if self.depths is None else self.prefix + min(self.depths)

    def first_slot(self, window: int | None) -> int:
        """The first slot that any row can see through a sliding window; 0 without one."""
        if window is None:
            return 0
        return max(0, min(self.prefix, self.lowest_position - window + 1))

    def mask(
        self, window: int | None, dtype: torch.dtype, *, additive: bool, causal_kernel: bool, repeats: int = 1
    ) -> torch.Tensor | None:
        """The attention mask over the slots ``first_slot(window) … end``, computed once for each window.

        Args:
            window: positions of the sliding window, if the layer has one.
            dtype: of an additive mask.
            additive: give 0 / lowest value to be added to the scores (eager attention) instead of true / false.
            causal_kernel: without a mask, attention treats several rows as causal.
            repeats: consecutive queries that each row stands for; they see the same slots.

        Returns:
            ``[1, 1, count * repeats, slots]``, or ``None`` if every row sees every slot.
        """
        key = (window, dtype if additive else None, causal_kernel, repeats)
        if key not in self._masks:
            visible = None if self._needs_no_mask(window, causal_kernel) else self.visibility(window)[None, None]
            if visible is not None and repeats > 1:
                visible = visible.repeat_interleave(repeats, dim=2)
            if visible is not None and additive:
                lowest = torch.finfo(dtype).min
                visible = torch.zeros_like(visible, dtype=dtype).masked_fill_(~visible, lowest)
            self._masks[key] = visible
        return self._masks[key]

    def visibility(self, window: int | None) -> torch.Tensor:
        """Which slots from ``first_slot(window)`` on each row sees: bool ``[count, slots]`` (query, key)."""
        first = self.first_slot(window)
        own = self._after_prefix() if self.visible is None else self.visible
        seen = functional.pad(own, (self.prefix - first, 0), value=True)
        if window is not None:
            seen &= self.slot_positions[None, first:] > self.positions[:, None] - window
        return seen

    def fill(self, window: int | None, mask: torch.Tensor) -> None:
        """Writes visibility into a mask that may have more rows and more slots than these rows need.

        ``mask`` is bool ``[count or more, repeats, end or more]``, from slot 0 on. Unused rows see slot 0 only, since
        attention of a row that sees nothing is not a number.
        """
        own, spare = mask[: self.count], mask[self.count :]
        if window is None and self.visible is None and self.prefix == self.start:  # the most common case, made fast
            slots = torch.arange(mask.shape[2], device=mask.device)
            own.copy_((slots <= slots[self.start : self.end, None])[:, None])
        else:
            own.zero_()
            own[:, :, self.first_slot(window) : self.end] = self.visibility(window)[:, None]
        if len(spare):
            spare.zero_()
            spare[:, :, 0] = True

    def _after_prefix(self) -> torch.Tensor:
        return functional.pad(causal(self.count, self.positions.device), (self.start - self.prefix, 0))

    def _needs_no_mask(self, window: int | None, causal_kernel: bool) -> bool:
        if self.prefix != self.start or self.visible is not None:
            return False
        if self.count == 1:
            return True
        whole_window = window is None or self.count <= window
        return causal_kernel and self.start == 0 and whole_window


@dataclass(frozen=True, eq=False)
class Forward:
    """The rows of one forward, in the order of ``[rows, hidden]``; rope and masks are computed once for all sublayers.

    Rows of one part do not see those of another, unless their ``visible`` names slots that an earlier part of the same
    sequence writes. A sequence may have several parts; their slots are disjoint.

    Attributes:
        parts: the rows of each sequence.
        rope: computes the rotations of their positions.
        like: any tensor with the model's dtype and device.
    """

    parts: tuple[Rows, ...]
    rope: Rope
    like: torch.Tensor
    _rotations: dict[str | None, Rotation] = field(default_factory=dict)
    _turns: dict[str | None, CosSin] = field(default_factory=dict)

    @staticmethod
    def join(forwards: Sequence["Forward"]) -> "Forward":
        """The parts of several forwards of one model in one, in order."""
        first, *others = forwards
        if not others:
            return first
        return Forward(tuple(part for forward in forwards for part in forward.parts), first.rope, first.like)

    def only(self, parts: Sequence[int]) -> "Forward":
        """A forward of some of the parts, by their ascending indices."""
        return Forward(tuple(self.parts[index] for index in parts), self.rope, self.like)

    @cached_property
    def rows(self) -> int:
        """Number of rows of all parts together."""
        return sum(part.count for part in self.parts)

    @cached_property
    def widest(self) -> int:
        """The largest number of rows of a part."""
        return max(part.count for part in self.parts)

    @cached_property
    def slices(self) -> tuple[slice, ...]:
        """The slice of each part in ``[rows, hidden]``."""
        slices, start = [], 0
        for part in self.parts:
            slices.append(slice(start, start + part.count))
            start += part.count
        return tuple(slices)

    def by_part(self, run: Callable[[slice, Rows], torch.Tensor], dim: int = 0) -> torch.Tensor:
        """What a function gives for each part, by its slice and its rows, one after the other along a dimension."""
        pieces = [run(own, rows) for own, rows in zip(self.slices, self.parts, strict=True)]
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim)

    @cached_property
    def positions(self) -> torch.Tensor:
        """Long ``[rows]``, the position of each row in its sequence."""
        return self.by_part(lambda _, rows: rows.positions)

    @property
    def drawings(self) -> list[tuple[Drawing | None, int]]:
        """For each row how its token is drawn, and the position of that."""
        return [each for part in self.parts for each in part.drawings]

    @cached_property
    def adapting(self) -> Adapt | None:
        """``adapt``; ``None`` where no sequence has an adapter."""
        return self.adapt if any(part.sequence.adapter is not None for part in self.parts) else None

    def adapt(self, sublayer: int, product: AdaptedProduct, inputs: torch.Tensor, outputs: torch.Tensor) -> None:
        """Adds in place what the adapters of the sequences add to a product of a sublayer.

        ``inputs`` and ``outputs`` are those of the product, ``[rows, inputs]`` and ``[rows, outputs]``.
        """
        for part, own in zip(self.parts, self.slices, strict=True):
            if part.sequence.adapter is not None:
                part.sequence.adapter.add(sublayer, product, inputs[own], outputs[own])

    def rotation(self, kind: str | None) -> Rotation:
        """Cosine and sine, ``[1, rows, dim]`` each, as transformers' attention takes them (``position_embeddings``).

        ``kind`` is the layer type, ``None`` if one rope serves all layers.
        """
        if not self._rotations:
            pieces = [
                self.rope.rotations(self.like, part.positions, long=part.sequence.long_rope) for part in self.parts
            ]
            self._rotations.update(_concatenated(pieces, dim=1))
        return self._rotations[kind]

    def turn(self, kind: str | None) -> CosSin:
        """Cosine and signed sine, ``[rows, 1, dim]`` each, as the fused attention takes them, for a layer type."""
        return (self._turns or self.turns())[kind]

    def turns(self) -> dict[str | None, CosSin]:
        """``turn`` for every layer type."""
        if not self._turns:
            self._turns.update(self._look_up())
        return self._turns

    def table(self, kind: str | None) -> tuple[CosSin, int]:
        """``turn`` as rows of a table, without the tensors that slicing it makes.

        Returns:
            Cosine and signed sine, ``[rows or more, 1, dim]`` each, and the index of the first row in them.
        """
        part = self.parts[0]
        if len(self.parts) == 1 and part.depths is None and self.rope.is_fixed and not self._turns:
            return self.rope.tables[kind], part.lowest_position
        return self.turn(kind), 0

    def _look_up(self) -> dict[str | None, CosSin]:
        if not self.rope.is_fixed:
            pieces = [self.rope.turns(self.like, part.positions, long=part.sequence.long_rope) for part in self.parts]
            return _concatenated(pieces, dim=0)
        first = self.parts[0]
        alone = len(self.parts) == 1 and first.depths is None

        def rows_of(table: torch.Tensor) -> torch.Tensor:
            return table.narrow(0, first.lowest_position, first.count) if alone else table[self.positions]

        return {kind: (rows_of(cosine), rows_of(sine)) for kind, (cosine, sine) in self.rope.tables.items()}


def _concatenated(pieces: Sequence[dict[str | None, CosSin]], dim: int) -> dict[str | None, CosSin]:
    """The rotations of several parts as one, by layer type."""
    first, *others = pieces
    if not others:
        return first
    return {
        kind: (
            torch.cat([piece[kind][0] for piece in pieces], dim),
            torch.cat([piece[kind][1] for piece in pieces], dim),
        )
        for kind in first
    }


def causal(rows: int, device: torch.device | str = "cpu") -> torch.Tensor:
    """A causal mask, bool ``[rows, rows]`` (query, key): each row sees itself and the rows before it."""
    return torch.ones(rows, rows, dtype=torch.bool, device=device).tril_()


def branches(count: int, length: int, device: torch.device | str = "cpu") -> torch.Tensor:
    """The mask of ``count`` independent continuations of ``length`` rows, laid out one after the other.

    Each sees the cached prefix and itself, causally, and no other one (CLaSp's and KnapSpec's parallel rows). Bool
    ``[count * length, count * length]`` (query, key), block diagonal.
    """
    branch = torch.arange(count * length, device=device) // length
    return causal(count * length, device) & (branch[:, None] == branch[None, :])
