"""What recorded forwards of one number of rows read and write, at fixed addresses."""

import weakref
from dataclasses import dataclass, field
from typing import Protocol

import torch

from selfspec.model.cache import KeyValueCache
from selfspec.model.forward import Forward, Rows, SequenceState
from selfspec.model.rope import CosSin
from selfspec.runtimes.arena import Arena


class StaticRows:
    """The rows of a forward, padded to a fixed number, with their cache slots, rotations and masks.

    Slots, rotations and masks are tensors, filled once for a forward; a recording depends on no number of the host. The
    rows added as padding write their keys and values to the arena's last slot, which is never read.

    Args:
        arena: holds keys and values.
        count: number of rows, padding included.
        hidden_states: any rows of the residual stream.

    Attributes:
        count: number of rows.
        stream: ``[count, hidden]``, the residual stream, changed in place from sublayer to sublayer.
    """

    def __init__(self, arena: Arena, count: int, hidden_states: torch.Tensor) -> None:
        self.count = count
        self._arena = arena
        with torch.inference_mode(mode=False):
            self.stream = hidden_states.new_zeros(count, hidden_states.shape[1])
            self._slots = hidden_states.new_zeros(count, dtype=torch.long)
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

    def load(self, forward: Forward, span: int) -> None:
        """Fills slots, rotations and masks for a forward, unless it is loaded already.

        Args:
            forward: of one sequence and at most ``count`` rows.
            span: slots that attention reads, at least up to the forward's end.
        """
        if self._loaded is not None and self._loaded() is forward:
            return
        (rows,) = forward.parts
        torch.arange(rows.start, rows.end, out=self._slots[: rows.count])
        self._slots[rows.count :].fill_(self._arena.capacity)
        for kind, turn in forward.turns().items():
            for static, given in zip(self._static_turn(kind, turn), turn, strict=True):
                static[: rows.count].copy_(given)
        self._loaded = weakref.ref(forward)
        for (window, repeats, slots), mask in self._masks.items():
            if slots == span:
                self._fill(mask, rows, window, repeats)

    def stand_in(self, forward: Forward, span: int) -> Forward:
        """The forward that is given to the fused blocks while they are recorded.

        Args:
            forward: any forward of the target; its rope is used.
            span: slots that attention reads.
        """
        rows = _RowsAnywhere(
            SequenceState(_StaticCache(self._arena, self._slots)),
            start=span - self.count,
            count=self.count,
            prefix=0,
            slots=self._slots,
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
            self._fill(self._masks[key], loaded.parts[0], window, repeats)
        return self._masks[key]

    def _fill(self, mask: torch.Tensor, rows: Rows, window: int | None, repeats: int) -> None:
        rows.fill(window, mask.view(self.count, repeats, -1))

    def _static_turn(self, kind: str | None, like: CosSin) -> CosSin:
        if kind not in self._turns:
            with torch.inference_mode(mode=False):
                cosine, sine = (part.new_zeros(self.count, *part.shape[1:]) for part in like)
            self._turns[kind] = cosine, sine
        return self._turns[kind]


class _Masks(Protocol):
    def mask(self, window: int | None, repeats: int, span: int) -> torch.Tensor: ...


@dataclass(frozen=True, eq=False)
class _RowsAnywhere(Rows):
    """Rows at any of the first ``end`` slots; attention reads all of these."""

    slots: torch.Tensor = field(kw_only=True)
    masks: _Masks = field(kw_only=True)

    @property
    def positions(self) -> torch.Tensor:
        """Long ``[count]``, on the device, changed before each replay."""
        return self.slots

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
