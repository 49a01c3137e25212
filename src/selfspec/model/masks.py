"""Where each row of a forward stands, and what it sees: causal rows, token trees, independent branches."""

from dataclasses import dataclass, field

import torch
from torch.nn import functional


def causal(rows: int, device: torch.device | str = "cpu") -> torch.Tensor:
    """Rows of one sequence: each sees itself and those before it. Returns bool ``[rows, rows]``."""
    return torch.ones(rows, rows, dtype=torch.bool, device=device).tril_()


def branches(count: int, length: int, device: torch.device | str = "cpu") -> torch.Tensor:
    """``count`` independent continuations of ``length`` rows each, laid out one after the other.

    Each branch sees the cached prefix and itself, causally, and no other branch (CLaSp's and KnapSpec's parallel rows).

    Returns:
        bool ``[count * length, count * length]``, block diagonal.
    """
    branch = torch.arange(count * length, device=device) // length
    return causal(count * length, device) & (branch[:, None] == branch[None, :])


@dataclass
class Layout:
    """The rows of one forward: their cache slots, their positions and what they see. Shared by all its sublayers.

    A row sees the first ``prefix`` slots of the cache, and of the slots behind them those that ``visible`` names. Where
    ``visible`` is ``None`` it sees the rows of its own forward up to itself, and none of the slots between.

    Attributes:
        start: cache slot of the first row; row ``i`` writes its keys and values to slot ``start + i``.
        rows: number of rows.
        prefix: number of leading slots that every row sees, at most ``start``.
        positions: long ``[rows]``, the position of each row in the sequence.
        lowest_position: smallest of the positions.
        visible: bool ``[rows, end - prefix]`` (query, slot from ``prefix`` on), or ``None`` for causal rows.
    """

    start: int
    rows: int
    prefix: int
    positions: torch.Tensor
    lowest_position: int
    visible: torch.Tensor | None = None
    _masks: dict[tuple[int | None, bool, bool, int], torch.Tensor | None] = field(default_factory=dict)

    @property
    def end(self) -> int:
        """The slot behind the last row."""
        return self.start + self.rows

    def first_slot(self, window: int | None) -> int:
        """The first slot that any row can see through a sliding window; 0 without one."""
        if window is None:
            return 0
        return max(0, min(self.prefix, self.lowest_position - window + 1))

    def mask(
        self, window: int | None, dtype: torch.dtype, *, additive: bool, causal_kernel: bool, repeats: int = 1
    ) -> torch.Tensor | None:
        """The attention mask over the slots ``first_slot(window) … end``, made once for each window.

        Args:
            window: positions of the sliding window, if the layer has one.
            dtype: of an additive mask.
            additive: give 0 / lowest value to be added to the scores (eager attention) instead of true / false.
            causal_kernel: without a mask, attention takes several rows to be causal on its own.
            repeats: how many queries of each row stand one behind the other, seeing the same.

        Returns:
            ``[1, 1, rows * repeats, slots]``, or ``None`` where every row sees every slot.
        """
        key = (window, additive, causal_kernel, repeats)
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
        """Which slots from ``first_slot(window)`` on each row sees: bool ``[rows, slots]`` (query, key)."""
        device = self.positions.device
        first = self.first_slot(window)
        seen = self._seen_from(first)
        if window is not None:
            # Before ``start``, a slot's number is its position.
            key_positions = torch.cat([torch.arange(first, self.start, device=device), self.positions])
            seen &= key_positions[None, :] > self.positions[:, None] - window
        return seen

    def fill(self, window: int | None, mask: torch.Tensor) -> None:
        """Writes what each row sees into a mask that may have more rows and more slots than this forward.

        Args:
            window: positions of the sliding window, if the layer has one.
            mask: bool ``[rows or more, repeats, end or more]``, from slot 0 on. Rows too many see slot 0 only, since
                attention of a row that sees nothing is not a number.
        """
        own, spare = mask[: self.rows], mask[self.rows :]
        if window is None and self.visible is None and self.prefix == self.start:  # by far the most common, made short
            slots = torch.arange(mask.shape[2], device=mask.device)
            own.copy_((slots <= slots[self.start : self.end, None])[:, None])
        else:
            own.zero_()
            own[:, :, self.first_slot(window) : self.end] = self.visibility(window)[:, None]
        if len(spare):
            spare.zero_()
            spare[:, :, 0] = True

    def joined(self, other: "Layout") -> "Layout":
        """Two forwards as one, whose rows do not see each other's.

        Args:
            other: its slots follow on this one's.
        """
        assert other.start == self.end
        prefix = min(self.prefix, other.prefix)
        own = functional.pad(self._seen_from(prefix), (0, other.rows))
        return Layout(
            self.start,
            self.rows + other.rows,
            prefix,
            torch.cat([self.positions, other.positions]),
            min(self.lowest_position, other.lowest_position),
            torch.cat([own, other._seen_from(prefix)]),
        )

    def _seen_from(self, first: int) -> torch.Tensor:
        """``visibility`` without a window, from a slot of the prefix on."""
        behind_prefix = self._behind_prefix() if self.visible is None else self.visible
        return functional.pad(behind_prefix, (self.prefix - first, 0), value=True)

    def _behind_prefix(self) -> torch.Tensor:
        return functional.pad(causal(self.rows, self.positions.device), (self.start - self.prefix, 0))

    def _needs_no_mask(self, window: int | None, causal_kernel: bool) -> bool:
        if self.prefix != self.start or self.visible is not None:
            return False
        if self.rows == 1:
            return True
        whole_window = window is None or self.rows <= window
        return causal_kernel and self.start == 0 and whole_window
