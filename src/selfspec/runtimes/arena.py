"""Cache slots at fixed addresses, leased to one sequence at a time."""

import weakref
from collections.abc import Callable

import torch

from selfspec.model.cache import KeyValueCache

FEWEST_SLOTS = 1024
"""A smaller arena would be replaced, and with it everything recorded, at the first request of usual length."""


class Arena:
    """Keys and values at a fixed address, for recorded work.

    Args:
        make_slots: gives zeros ``[layers, 2, key_value_heads, slots, head_dim]`` for a number of slots.
        capacity: slots that a sequence needs.

    Attributes:
        capacity: slots that a sequence can have, a power of two.
        slots: ``[layers, 2, key_value_heads, capacity + 1, head_dim]``, keys before values. The slot after
            the capacity is written by padding rows and never read.
    """

    def __init__(self, make_slots: Callable[[int], torch.Tensor], capacity: int) -> None:
        self.capacity = power_of_two(max(capacity, FEWEST_SLOTS))
        with torch.inference_mode(mode=False):  # whichever mode the first request runs in, later ones write to it too
            self.slots = make_slots(self.capacity + 1)
        self._lessee: weakref.ref[LeasedCache] | None = None

    @property
    def is_leased(self) -> bool:
        """Whether a sequence has it: the cache that it got is still alive."""
        return self._lessee is not None and self._lessee() is not None

    def lease(self, capacity: int) -> "LeasedCache":
        """An empty cache in this arena. The arena is released when the cache is garbage collected.

        Args:
            capacity: its slots, at most the arena's.
        """
        assert not self.is_leased
        self.slots.zero_()
        cache = LeasedCache(self, capacity)
        self._lessee = weakref.ref(cache)
        return cache


class LeasedCache(KeyValueCache):
    """A cache in the first slots of an arena. Made by ``Arena.lease``.

    Attributes:
        arena: whose slots they are.
        written: end of the slots that may have been written; all slots after it hold zeros.
    """

    def __init__(self, arena: Arena, capacity: int) -> None:
        assert capacity <= arena.capacity
        self._hold([pair[:, :, :capacity] for pair in arena.slots])
        self.arena = arena
        self.written = 0

    def write(self, layer: int, start: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Writes the rows of one layer, see ``KeyValueCache.write``."""
        self.written = max(self.written, start + keys.shape[2])
        super().write(layer, start, keys, values)

    def slots_for(self, layer: int, start: int, rows: int) -> torch.Tensor:
        """Keys and values of one layer to write to, see ``KeyValueCache.slots_for``."""
        self.written = max(self.written, start + rows)
        return super().slots_for(layer, start, rows)

    def clear_from(self, end: int) -> None:
        """Sets the written slots from ``end`` on to zero.

        Recorded attention reads hidden slots too, with a weight of zero, and a draft may have left non-finite numbers
        there. All layers are cleared at once, and only when a forward ends before an earlier one did.

        Args:
            end: the slot after the last row of the forward that is about to run.
        """
        if self.written > end:
            self.arena.slots[:, :, :, end : self.written].zero_()
        self.written = end


def power_of_two(number: int) -> int:
    """The smallest power of two that is at least a positive number."""
    return 1 << (number - 1).bit_length()
