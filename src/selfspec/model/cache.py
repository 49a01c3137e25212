"""The one cache of keys and values: preallocated, with a length, in memory that a large one takes as it is written."""

import contextlib
import math
import mmap
import sys
import weakref
from collections.abc import Sequence
from ctypes import Array, c_void_p
from typing import Any

import torch

from selfspec.model.mxint8 import are_numbers, pack, packed_size, unpack, unpacked_size
from selfspec.model.transfer import send

LARGE = 2**25
"""Bytes of a tensor from which on its memory is taken as it is written."""


class KeyValueCache:
    """Keys and values of one sequence, for every layer of the target.

    The first ``length`` slots hold the target's keys and values of the committed tokens. Slots from ``length`` on are
    scratch: drafts write there, verifications overwrite it, and rejected rows are dropped by leaving ``length`` as it
    is. Nothing is cloned or concatenated.

    Where it is ``packed``, it holds them in 8 bits (``mxint8``): the last dimension of all below is then the bytes of a
    row. Rows are packed as they are written, so that every row of a forward sees the packed ones, itself included.

    Where the layers are on several ``devices``, each layer's are on its own.

    Where it does not have values (``has_values``), a row is what keys and values are computed from: DeepSeek's latent,
    and the rotated entries of a key. The values below are then empty.

    Attributes:
        states: the states of recurrent layers after the last rows.
        keys: per layer ``[1, key_value_heads, capacity, head_dim]``.
        values: per layer ``[1, key_value_heads, capacity, head_dim]``.
        length: committed slots.
        device: of what is said about rows, and of keys and values where all layers are on one.
        addresses: per layer the memory address of ``[2, key_value_heads, capacity, head_dim]``, keys and values.
    """

    def __init__(
        self,
        layer_count: int,
        key_value_heads: int,
        capacity: int,
        head_dim: int,
        *,
        dtype: torch.dtype,
        device: torch.device,
        packed: bool = False,
        devices: Sequence[torch.device] | None = None,
        has_values: bool = True,
    ) -> None:
        # Zeros, because attention multiplies the values of hidden slots by zero, and garbage may hold NaN.
        self.states = RowStates(self)
        self._unpacked, planes = dtype, 1 + has_values
        width, stored = (packed_size(head_dim), torch.uint8) if packed else (head_dim, dtype)
        split = devices is not None and set(devices) != {device}
        shape = (planes, key_value_heads, capacity, width)
        own: list[Pages] = []
        if devices is not None and split:
            pairs = [_zeros(shape, stored, each, own) for each in devices]
        else:
            every = _zeros((layer_count, *shape), stored, device, own)
            pairs = [every[layer] for layer in range(layer_count)]
        self._hold(pairs, own)
        self.device = device

    def _hold(self, pairs: Sequence[torch.Tensor], own: "Sequence[Pages]" = ()) -> None:
        """Sets each layer's keys and values, ``[2, key_value_heads, capacity, head_dim]``, with no committed slots.

        ``own`` is the memory of theirs that can be given back in parts.
        """
        self._pairs, self.device, self._own = list(pairs), pairs[0].device, own
        self.addresses = addresses_of(pairs)
        self.keys = [pair[:1] for pair in pairs]
        self.values = [pair[1:] for pair in pairs]
        self.capacity = pairs[0].shape[2]
        self.length = 0

    @property
    def has_values(self) -> bool:
        """Whether it has values beside keys."""
        return len(self.values[0]) > 0

    @property
    def packed(self) -> bool:
        """Whether keys and values are in 8 bits."""
        return self._pairs[0].dtype == torch.uint8

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of rows that are written and ``seen``."""
        return self._unpacked if self.packed else self._pairs[0].dtype

    @property
    def head_dim(self) -> int:
        """The numbers of such a row."""
        width = self._pairs[0].shape[3]
        return unpacked_size(width) if self.packed else width

    def stored(self, rows: torch.Tensor) -> torch.Tensor:
        """Rows of keys or values, ``[..., head_dim]``, as the cache has them."""
        return pack(rows) if self.packed else rows

    @property
    def planes(self) -> int:
        """Heads of keys and values of a layer: rows of a slot in ``addresses``."""
        return self._pairs[0].shape[0] * self._pairs[0].shape[1]

    @property
    def plane_slot_bytes(self) -> int:
        """Bytes of each of these rows."""
        return self._pairs[0].shape[3] * self._pairs[0].itemsize

    @property
    def size_in_bytes(self) -> int:
        """Bytes reserved for keys and values."""
        return sum(tensor.nbytes for tensor in (*self.keys, *self.values))

    def write(self, layer: int, start: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Writes rows of one layer, ``[1, key_value_heads, rows, head_dim]`` each, into the slots from ``start`` on."""
        rows = keys.shape[2]
        pair = self.slots_for(layer, start, rows).narrow(2, start, rows)
        pair[:1].copy_(self.stored(keys))
        pair[1:].copy_(self.stored(values))

    def write_pairs(self, layer: int, start: int, pairs: torch.Tensor) -> None:
        """Writes keys and values of one tensor, as a fused projection gives them, in one copy.

        ``pairs`` is ``[rows, 2 * key_value_heads, head_dim]``, the keys' heads before the values'.
        """
        rows = pairs.shape[0]
        pair = self.slots_for(layer, start, rows)
        pair.narrow(2, start, rows).copy_(self.stored(pairs.view(rows, *pair.shape[:2], -1).permute(1, 2, 0, 3)))

    def slots_for(self, layer: int, start: int, rows: int) -> torch.Tensor:
        """Keys and values of one layer to write to, after a check that the slots exist.

        ``[2, key_value_heads, capacity, head_dim]``.
        """
        assert start + rows <= self.capacity, f"slots {start}..{start + rows} do not fit a cache of {self.capacity}"
        return self._pairs[layer]

    def rows(self, start: int, count: int) -> torch.Tensor:
        """A copy of keys and values of consecutive slots, ``[layers, 2, key_value_heads, count, head_dim]``."""
        return torch.stack([pair.narrow(2, start, count).to(self.device) for pair in self._pairs])

    def append(self, rows: torch.Tensor) -> None:
        """Commits rows whose keys and values are known, as from ``rows``, after the committed slots."""
        count = rows.shape[3]
        for layer, pair in enumerate(rows):
            self.slots_for(layer, self.length, count).narrow(2, self.length, count).copy_(pair)
        self.length += count

    def seen(self, layer: int, first: int, slots: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of consecutive slots, ``[1, key_value_heads, slots, head_dim]`` each; views if not packed."""
        keys, values = self.keys[layer].narrow(2, first, slots), self.values[layer].narrow(2, first, slots)
        return (unpack(keys, self.dtype), unpack(values, self.dtype)) if self.packed else (keys, values)

    def commit(self, rows: Sequence[int]) -> None:
        """Keeps rows of the last verification and drops the others.

        ``rows`` are ascending indices, counted from the slot ``length``. For a chain they are ``0 … k`` and only
        ``length`` changes; the rows of a path in a tree are moved to consecutive slots.
        """
        if not _is_prefix(rows):
            for tensor in (*self.keys, *self.values):
                _gather(tensor, self.length, rows)
        self.length += len(rows)
        assert self.length <= self.capacity

    def release(self, most: int) -> int:
        """Gives the next part of its memory back to the system, of about ``most`` bytes; it is not to be used any more.

        Returns:
            Bytes of the part; 0 where there is no more that takes long to be given back as a whole.
        """
        for pages in self._own:
            if released := pages.release(most):
                return released
        return 0


def is_taken_late(size: int, device: torch.device) -> bool:
    """Whether a tensor of zeros of that many bytes takes no memory before it is written."""
    return device.type == "cpu" and size >= LARGE


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, own: "list[Pages]") -> torch.Tensor:
    """A tensor of zeros; a large one of a processor takes no time, and has memory of its ``own``."""
    size = math.prod(shape) * dtype.itemsize
    if not is_taken_late(size, device):
        return torch.zeros(shape, dtype=dtype, device=device)
    own.append(Pages(size))
    return own[-1].tensor(dtype).view(shape)


class Pages:
    """Zeros of this process alone: memory that could be shared takes longer to be first written, and given back.

    ``size`` is in bytes.
    """

    def __init__(self, size: int) -> None:
        self._size, self._released = size, 0
        if sys.platform == "win32":
            self._memory = mmap.mmap(-1, size)
            return
        self._memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if sys.platform == "linux":
            # Pages of the system's own size: huge ones would be cleared as a whole for the first token of each head.
            with contextlib.suppress(OSError):  # a system without huge ones
                self._memory.madvise(mmap.MADV_NOHUGEPAGE)

    def tensor(self, dtype: torch.dtype) -> torch.Tensor:
        """All of it, ``[size / itemsize]``."""
        return torch.frombuffer(self._memory, dtype=dtype)

    def release(self, most: int) -> int:
        """Returns the next part of it to the system, of about ``most`` bytes; it must not be read or written again.

        Returns:
            Bytes of the part; 0 after the last one, and where the system takes memory back as a whole only.
        """
        if sys.platform != "linux":
            return 0
        part = min(-(-most // mmap.PAGESIZE) * mmap.PAGESIZE, self._size - self._released)
        if part > 0:
            self._memory.madvise(mmap.MADV_DONTNEED, self._released, part)
            self._released += part
        return part


class RowStates:
    """What recurrent layers carry from token to token: their states after the last committed slot and those after it.

    Rejected rows are dropped like their keys, by leaving ``length`` of the cache as it is: the next row starts from the
    states after the slot before it. Older states are dropped, so that there are never more than the rows of a round.
    """

    def __init__(self, cache: KeyValueCache) -> None:
        self._cache = weakref.proxy(cache)
        self._layers: dict[int, dict[int, Any]] = {}

    def get(self, layer: int, slot: int) -> Any:
        """The states of a layer after a slot; ``None`` before the first one.

        Also after slots that nothing was written to, as where only the time of a forward is measured.
        """
        own = self._layers.get(layer, {})
        return own[slot] if 0 <= slot < self._cache.length else own.get(slot)

    def put(self, layer: int, slot: int, state: Any) -> None:
        """Keeps the states of a layer after a slot."""
        own = self._layers.setdefault(layer, {})
        for other in [other for other in own if other < self._cache.length - 1]:
            del own[other]
        own[slot] = state


def addresses_of(tensors: Sequence[torch.Tensor]) -> Array[c_void_p]:
    """The memory addresses of tensors, as a C array."""
    return (c_void_p * len(tensors))(*(tensor.data_ptr() for tensor in tensors))


def are_finite(rows: torch.Tensor) -> bool:
    """Whether keys and values, as a cache has them, are all finite."""
    if rows.dtype == torch.uint8:
        return are_numbers(rows)
    # The extremes of numbers with NaN are NaN. This reads them once; `isfinite` of all takes some thirty times as long.
    return not rows.numel() or all(bool(extreme.isfinite()) for extreme in torch.aminmax(rows))


def _is_prefix(rows: Sequence[int]) -> bool:
    return not rows or (rows[-1] == len(rows) - 1 and rows[0] == 0)


def _gather(buffer: torch.Tensor, start: int, rows: Sequence[int]) -> None:
    """Moves the rows from the first gap on; those before it are in place."""
    first = next(index for index, row in enumerate(rows) if row != index)
    source = send([start + row for row in rows[first:]], buffer.device)
    buffer.narrow(2, start + first, len(rows) - first).copy_(buffer.index_select(2, source))
