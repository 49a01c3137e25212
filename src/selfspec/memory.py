"""Peak memory of a request, the memory that is available, and memory in large pages."""

import contextlib
import ctypes
import gc
import mmap
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from selfspec.control_group import memory_left
from selfspec.errors import OutOfMemoryError


class PeakMemory:
    """Measures peak memory, starting when it is created.

    On a CUDA device this is the allocator's peak since then, weights included. Elsewhere it is the largest resident
    size the process has ever had, the only peak that operating systems record.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)

    def peak_bytes(self) -> int:
        """The peak so far, in bytes; 0 on Windows without CUDA, which reports none."""
        if self._device.type == "cuda":
            return int(torch.cuda.max_memory_allocated(self._device))
        return _peak_resident_bytes()


def release_freed_memory() -> None:
    """Collects garbage and returns freed memory to the system, which would stay at its peak else; only glibc can."""
    gc.collect()
    with contextlib.suppress(AttributeError, OSError, TypeError):
        ctypes.CDLL(None).malloc_trim(0)


def free_bytes(device: torch.device) -> int | None:
    """Memory of a device that can be allocated now, in bytes; ``None`` if unknown. For a CPU, the machine's memory.

    On MPS it is what torch recommends to take at most, less what the process has.
    """
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    if device.type == "xpu":
        return int(torch.xpu.mem_get_info(device)[0])
    if device.type == "mps":
        return max(0, int(torch.mps.recommended_max_memory()) - int(torch.mps.driver_allocated_memory()))
    return available_bytes()


def available_bytes() -> int | None:
    """Memory of the machine that can be allocated now, in bytes; ``None`` if the system does not report it.

    The limit of a container counts.
    """
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    available = next((line.split()[1] for line in lines if line.startswith("MemAvailable:")), None)
    if available is None:
        return None
    left = memory_left()
    return min(1024 * int(available), sys.maxsize if left is None else left)


def check_memory(needed: int, what: str, remedy: str, device: torch.device | None = None) -> None:
    """Refuses what takes more bytes than can be allocated, on the CPU if no device is given.

    Raises:
        OutOfMemoryError: names ``what``, which says how many bytes are needed, and the ``remedy``.
    """
    available = free_bytes(device or torch.device("cpu"))
    if available is not None and needed > available:
        raise OutOfMemoryError(f"{what}, but {available:,} are available; {remedy}")


def empty_in_large_pages(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """Memory of the CPU, not filled, in pages of 2 MB where Linux gives them to who asks.

    Weights are read from it up to 1.4 times as fast: processors fetch ahead within a page, and find its address once.
    """
    memory = torch.empty(tuple(shape), dtype=dtype, device="cpu")
    if sys.platform == "linux" and memory.nbytes >= _LARGE:
        # From page to page, so that neighbours are one area, which large pages can cover. Refused, it changes nothing.
        start = memory.data_ptr() & -mmap.PAGESIZE
        end = -(-(memory.data_ptr() + memory.nbytes) // mmap.PAGESIZE) * mmap.PAGESIZE
        ctypes.CDLL(None).madvise(ctypes.c_void_p(start), ctypes.c_size_t(end - start), mmap.MADV_HUGEPAGE)
    return memory


_LARGE = 256 << 10
"""Bytes of memory that large pages are asked for; less is not mapped by itself."""


def _peak_resident_bytes() -> int:
    try:
        import resource
    except ImportError:  # not on Windows
        return 0
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
