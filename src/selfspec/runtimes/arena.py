"""Cache slots at a fixed address, which replays use: an arena of a model, leased to one sequence at a time."""

import threading
import weakref
from collections.abc import Callable
from typing import Protocol

import torch

from selfspec.model.cache import KeyValueCache

FEWEST_SLOTS = 1024
"""A smaller arena would be replaced, and with it everything recorded, at the first request of usual length."""


class Recordings(Protocol):
    """What was recorded on an arena."""

    def forget(self) -> None:
        """Drops all of it, since the arena ends."""


class Arena:
    """Keys and values at a fixed address, leased to one sequence at a time.

    ``make_slots`` gives zeros ``[layers, 2, key_value_heads, slots, head_dim]``. The capacity is a power of two, at
    least the one asked for. The slot after it is written by padding rows and never read.
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
        """An empty cache in this arena, which is released when the cache is garbage collected."""
        assert not self.is_leased
        self.slots.zero_()
        cache = LeasedCache(self, capacity)
        self._lessee = weakref.ref(cache)
        return cache


class LeasedCache(KeyValueCache):
    """A cache in the first slots of an arena. All slots from ``written`` on hold zeros."""

    def __init__(self, arena: Arena, capacity: int) -> None:
        assert capacity <= arena.capacity
        self._hold([pair[:, :, :capacity] for pair in arena.slots])
        self.arena = arena
        self.written = 0

    def slots_for(self, layer: int, start: int, rows: int) -> torch.Tensor:
        """Keys and values of one layer to write to, see ``KeyValueCache.slots_for``."""
        self.written = max(self.written, start + rows)
        return super().slots_for(layer, start, rows)

    def clear_from(self, end: int) -> None:
        """Sets the written slots from ``end`` on, the end of the coming forward, to zero.

        Recorded attention reads hidden slots too, with a weight of zero, and a draft may have left non-finite numbers
        there. All layers are cleared at once, and only when a forward ends before an earlier one did.
        """
        if self.written > end:
            self.arena.slots[:, :, :, end : self.written].zero_()
        self.written = end


class Arenas:
    """The arena of a model, which is replaced by a larger one where a sequence needs it.

    Attributes:
        current: the slots that replays read and write; ``None`` before the first lease.
        recorded: replays that were recorded so far, at any precision, on any arena.
    """

    def __init__(self, make_slots: Callable[[int], torch.Tensor]) -> None:
        self._make_slots, self._leasing = make_slots, threading.Lock()
        self.current: Arena | None = None
        self.recorded = 0
        self.users: weakref.WeakSet[Recordings] = weakref.WeakSet()
        """What has recorded on it."""

    def lease(self, capacity: int) -> LeasedCache | None:
        """The cache of a new sequence; ``None`` while another one has the arena."""
        with self._leasing:
            if self.current is not None and self.current.is_leased:
                return None
            if self.current is None or self.current.capacity < capacity:
                self._drop()  # first, or two arenas would be held at once
                self.current = Arena(self._make_slots, capacity)
            return self.current.lease(capacity)

    def drop(self) -> None:
        """Forgets the arena, unless a sequence has it."""
        with self._leasing:
            if self.current is not None and not self.current.is_leased:
                self._drop()

    def _drop(self) -> None:
        for each in list(self.users):
            each.forget()
        self.current = None


def power_of_two(number: int) -> int:
    """The smallest power of two that is at least a positive number."""
    return 1 << (number - 1).bit_length()
