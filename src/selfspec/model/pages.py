"""Memory of large caches: zeros that take none before they are written, and that the system gets back in parts."""

import contextlib
import mmap
import sys

import torch

LARGE = 2**25
"""Bytes of a tensor from which on its memory is taken as it is written."""


def is_taken_late(size: int, device: torch.device) -> bool:
    """Whether a tensor of zeros of that many bytes takes no memory before it is written."""
    return device.type == "cpu" and size >= LARGE


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
