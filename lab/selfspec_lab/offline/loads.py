"""The bytes that kernels load and store, counted in Triton's interpreter."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

Addresses = npt.NDArray[np.uint64]


class Accesses:
    """What kernels have read and written.

    Attributes:
        loaded: bytes of all loads together; what several programs load counts several times.
        stored: bytes of all stores.
    """

    def __init__(self) -> None:
        self.loaded = self.stored = 0
        self._read: list[tuple[Addresses, int]] = []

    def load(self, addresses: Addresses, size: int) -> None:
        """Notes a load of numbers of some bytes."""
        self.loaded += addresses.size * size
        self._read.append((addresses, size))

    def distinct(self, tensor: torch.Tensor) -> int:
        """The bytes of a tensor's memory that were loaded, each once."""
        start, end = tensor.data_ptr(), tensor.data_ptr() + tensor.untyped_storage().nbytes()
        found = set[int]()
        for addresses, size in self._read:
            own = addresses[(addresses >= start) & (addresses < end)]
            found.update((np.unique(own)[:, None] + np.arange(size, dtype=np.uint64)).ravel().tolist())
        return len(found)


@contextmanager
def counted_accesses() -> Iterator[Accesses]:
    """Counts what kernels that run inside load and store; they have to run in the interpreter."""
    from triton.runtime.interpreter import InterpreterBuilder

    builder: Any = InterpreterBuilder
    accesses, load, store = Accesses(), builder.create_masked_load, builder.create_masked_store

    def counted_load(self: Any, pointers: Any, mask: Any, *others: Any) -> Any:
        read = load(self, pointers, mask, *others)
        kept = np.broadcast_to(mask.data, np.shape(pointers.data))
        accesses.load(np.asarray(pointers.data)[kept].astype(np.uint64), read.data.dtype.itemsize)
        return read

    def counted_store(self: Any, pointers: Any, value: Any, mask: Any, *others: Any) -> Any:
        accesses.stored += int(np.broadcast_to(mask.data, np.shape(pointers.data)).sum()) * value.data.dtype.itemsize
        return store(self, pointers, value, mask, *others)

    builder.create_masked_load, builder.create_masked_store = counted_load, counted_store
    try:
        yield accesses
    finally:
        builder.create_masked_load, builder.create_masked_store = load, store
