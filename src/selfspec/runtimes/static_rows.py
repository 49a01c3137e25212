"""Rows of a forward at fixed addresses, for replays: their stream, slots, rotations and masks, and paths in a tree."""

import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from selfspec.model.cache import KeyValueCache
from selfspec.model.forward import Forward, Rows, SequenceState
from selfspec.model.rope import CosSin
from selfspec.runtimes.arena import Arena

LONGEST_PATH = 256
"""Most slots after the prefix that a row of a tree sees, where a kernel attends."""


class Tree(NamedTuple):
    """Where the rows of a tree find their ancestors, for kernels that attend.

    Attributes:
        prefix: int32 ``[1]``, leading slots that every row sees, whose positions are their numbers.
        slots: int32 ``[rows, n]``, by row the slots it sees after the prefix, counted from it, by ascending position,
            its own last; what follows that is not read.
    """

    prefix: torch.Tensor
    slots: torch.Tensor


FindTree = Callable[[Rows], Tree | None]
"""The tree of rows; ``None`` for a chain."""


class StaticRows:
    """The rows of a forward, padded to a fixed number, with their cache slots, rotations and masks.

    Slots, rotations and masks are tensors, filled once for a forward; a recording depends on no number of the host. The
    rows added as padding write their keys and values to the arena's last slot, which is never read. The residual
    stream, ``[count, hidden]``, is changed in place from sublayer to sublayer.
    """

    def __init__(self, arena: Arena, count: int, hidden_states: torch.Tensor) -> None:
        self.count = count
        self._arena = arena
        with torch.inference_mode(mode=False):
            self.stream = hidden_states.new_zeros(count, hidden_states.shape[1])
            self._slots, self._positions = hidden_states.new_zeros(2, count, dtype=torch.long)
            self._tree = Tree(
                hidden_states.new_zeros(1, dtype=torch.int32),
                hidden_states.new_zeros(count, LONGEST_PATH, dtype=torch.int32),
            )
        self._turns: dict[str | None, CosSin] = {}
        self._masks: dict[tuple[int | None, int, int], torch.Tensor] = {}  # by window, repeats and span
        self._loaded: weakref.ref[Forward] | None = None  # weak, or it would hold its sequence's lease

    def load_stream(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Copies a residual stream ``[rows, hidden]`` into ``stream``; returns the rows of it that are not padding."""
        own, spare = self.stream[: len(hidden_states)], self.stream[len(hidden_states) :]
        own.copy_(hidden_states)
        if len(spare):
            spare.zero_()
        return own

    def load(self, forward: Forward, span: int, tree: Tree | None) -> None:
        """Fills slots, rotations, masks and paths for a forward of one sequence, unless it is loaded already.

        Attention reads ``span`` slots, at least up to the forward's end.
        """
        if self._loaded is not None and self._loaded() is forward:
            return
        (rows,) = forward.parts
        torch.arange(rows.start, rows.end, out=self._slots[: rows.count])
        self._slots[rows.count :].fill_(self._arena.capacity)
        self._positions[: rows.count].copy_(rows.positions)  # what is added sees slots before the rows alone
        self._positions[rows.count :].zero_()
        if tree is not None:
            length = min(LONGEST_PATH, tree.slots.shape[1])
            self._tree.prefix.copy_(tree.prefix)
            self._tree.slots[: rows.count, :length].copy_(tree.slots[:, :length])
        for kind, turn in forward.turns().items():
            for static, given in zip(self._static_turn(kind, turn), turn, strict=True):
                static[: rows.count].copy_(given)
        self._loaded = weakref.ref(forward)
        for (window, repeats, slots), mask in self._masks.items():
            if slots == span:
                rows.fill(window, mask.view(self.count, repeats, -1))

    def stand_in(self, forward: Forward, span: int, *, is_tree: bool) -> Forward:
        """The forward that is given to the fused blocks while they are recorded, with the rope of any other one."""
        rows = _RowsAnywhere(
            SequenceState(_StaticCache(self._arena, self._slots)),
            start=span - self.count,
            count=self.count,
            prefix=0,
            memo={"tree": self._tree},
            seen_positions=self._positions,
            is_tree=is_tree,
            masks=self,
        )
        return Forward((rows,), forward.rope, forward.like, _turns=self._turns)

    def mask(self, window: int | None, repeats: int, span: int) -> torch.Tensor:
        """The mask of the loaded forward, bool ``[1, 1, count * repeats, span]``, at the same address every time."""
        key = window, repeats, span
        if key not in self._masks:
            with torch.inference_mode(mode=False):
                self._masks[key] = self.stream.new_zeros(1, 1, self.count * repeats, span, dtype=torch.bool)
            loaded = None if self._loaded is None else self._loaded()
            assert loaded is not None, "a mask is made for the forward that is running"
            loaded.parts[0].fill(window, self._masks[key].view(self.count, repeats, -1))
        return self._masks[key]

    def _static_turn(self, kind: str | None, like: CosSin) -> CosSin:
        if kind not in self._turns:
            with torch.inference_mode(mode=False):
                cosine, sine = (part.new_zeros(self.count, *part.shape[1:]) for part in like)
            self._turns[kind] = cosine, sine
        return self._turns[kind]


@dataclass(frozen=True, eq=False)
class _RowsAnywhere(Rows):
    """Rows at any of the first ``end`` slots; attention reads all of these."""

    seen_positions: torch.Tensor = field(kw_only=True)
    is_tree: bool = field(kw_only=True)
    masks: StaticRows = field(kw_only=True)

    @property
    def positions(self) -> torch.Tensor:
        """Long ``[count]``, on the device, changed before each replay."""
        return self.seen_positions

    @property
    def is_chain(self) -> bool:
        """Kernels attend for rows that are no tree by their positions."""
        return not self.is_tree

    def mask(
        self, window: int | None, dtype: torch.dtype, *, additive: bool, causal_kernel: bool, repeats: int = 1
    ) -> torch.Tensor:
        """See ``Rows.mask``; there always is one, since the slots after the rows are read too."""
        assert not additive
        return self.masks.mask(window, repeats, self.end)


class _StaticCache(KeyValueCache):
    """An arena's slots, written at the slots that a tensor names."""

    def __init__(self, arena: Arena, slots: torch.Tensor) -> None:
        self._hold(list(arena.slots))
        self._slots = slots

    def write_pairs(self, layer: int, start: int, pairs: torch.Tensor) -> None:
        """Writes keys and values of all rows, see ``KeyValueCache.write_pairs``."""
        pair = self._pairs[layer]
        pair.index_copy_(2, self._slots, pairs.view(len(pairs), *pair.shape[:2], -1).permute(1, 2, 0, 3))
