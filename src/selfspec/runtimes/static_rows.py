"""What recorded forwards of one number of rows read and write, at addresses that never change."""

import weakref
from dataclasses import dataclass, field
from typing import Protocol

import torch

from selfspec.model.cache import KeyValueCache
from selfspec.model.masks import Layout
from selfspec.model.rope import Turn
from selfspec.model.sublayers import SequenceState, Step
from selfspec.runtimes.arena import Arena


class StaticRows:
    """The rows of a forward, filled up to a fixed number, with all that depends on where they stand.

    Nothing that a forward's place decides is a number of the host: cache slots, rotations and masks are tensors, filled
    once for a step. Rows that only fill up write their keys and values to the arena's last slot, which nobody reads.

    Args:
        arena: holds keys and values.
        count: number of rows, those that fill up included.
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
        self._turns: dict[str | None, Turn] = {}
        self._masks: dict[tuple[int | None, int, int], torch.Tensor] = {}  # by window, repeats and span
        self._loaded: weakref.ref[Step] | None = None  # weak, or the last step would keep its sequence's lease

    def load_stream(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Takes a residual stream ``[rows, hidden]`` in; returns the part of ``stream`` that it now is."""
        own, spare = self.stream[: len(hidden_states)], self.stream[len(hidden_states) :]
        own.copy_(hidden_states)
        if len(spare):
            spare.zero_()
        return own

    def load_step(self, step: Step, span: int) -> None:
        """Takes in where the rows of a step stand and what they see, unless that is what is loaded already.

        Args:
            step: the step, of at most ``count`` rows.
            span: slots that attention reads, at least up to the end of the step.
        """
        if self._loaded is not None and self._loaded() is step:
            return
        layout = step.layout
        torch.arange(layout.start, layout.end, out=self._slots[: layout.rows])
        self._slots[layout.rows :].fill_(self._arena.capacity)
        for kind, turn in step.turns().items():
            for static, given in zip(self._static_turn(kind, turn), turn, strict=True):
                static[: layout.rows].copy_(given)
        self._loaded = weakref.ref(step)
        for (window, repeats, slots), mask in self._masks.items():
            if slots == span:
                self._fill(mask, layout, window, repeats)

    def stand_in(self, step: Step, span: int) -> Step:
        """What the fused blocks take for the loaded step while they are recorded.

        Args:
            step: any step of the target, for what all its steps share.
            span: slots that attention reads.
        """
        layout = _StaticLayout(
            start=span - self.count, rows=self.count, prefix=0, positions=self._slots, lowest_position=0, masks=self
        )
        return Step(
            SequenceState(_StaticCache(self._arena, self._slots)), layout, step.rope, step.like, None, {}, self._turns
        )

    def mask(self, window: int | None, repeats: int, span: int) -> torch.Tensor:
        """The mask of the loaded step, bool ``[1, 1, count * repeats, span]``, at the same address every time."""
        key = window, repeats, span
        if key not in self._masks:
            with torch.inference_mode(mode=False):
                self._masks[key] = self.stream.new_zeros(1, 1, self.count * repeats, span, dtype=torch.bool)
            loaded = None if self._loaded is None else self._loaded()
            assert loaded is not None, "a mask is made for the step that is running"
            self._fill(self._masks[key], loaded.layout, window, repeats)
        return self._masks[key]

    def _fill(self, mask: torch.Tensor, layout: Layout, window: int | None, repeats: int) -> None:
        layout.fill(window, mask.view(self.count, repeats, -1))

    def _static_turn(self, kind: str | None, like: Turn) -> Turn:
        if kind not in self._turns:
            with torch.inference_mode(mode=False):
                cosine, sine = (part.new_zeros(self.count, *part.shape[1:]) for part in like)
            self._turns[kind] = cosine, sine
        return self._turns[kind]


class _Masks(Protocol):
    def mask(self, window: int | None, repeats: int, span: int) -> torch.Tensor: ...


@dataclass
class _StaticLayout(Layout):
    """The layout of rows that may stand anywhere in the first ``end`` slots, all of which are read."""

    masks: _Masks = field(kw_only=True)

    def mask(
        self, window: int | None, dtype: torch.dtype, *, additive: bool, causal_kernel: bool, repeats: int = 1
    ) -> torch.Tensor:
        """See ``Layout.mask``; there always is one, since the slots behind the rows are read too."""
        assert not additive
        return self.masks.mask(window, repeats, self.end)


class _StaticCache(KeyValueCache):
    """An arena's slots, written to where a tensor of slot numbers says."""

    def __init__(self, arena: Arena, slots: torch.Tensor) -> None:
        self._hold(list(arena.slots))
        self._slots = slots

    def write_pairs(self, layer: int, start: int, pairs: torch.Tensor) -> None:
        """Writes keys and values of all rows, see ``KeyValueCache.write_pairs``."""
        pair = self._pairs[layer]
        pair.index_copy_(2, self._slots, pairs.view(len(pairs), *pair.shape[:2], -1).permute(1, 2, 0, 3))
