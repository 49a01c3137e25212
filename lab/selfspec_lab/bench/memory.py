"""What the memory does: how fast it copies, and how much of it a run took at most."""

import contextlib
import ctypes
import gc
import statistics
from pathlib import Path

import torch

from selfspec.memory import PeakMemory
from selfspec.timing import timed

_COPY_BYTES = {"cuda": 2**30}
_CPU_COPY_BYTES = 2**28
_COPIES = 5


def copy_bytes_per_second(device: torch.device, size: int | None = None, copies: int = _COPIES) -> float:
    """Copy bandwidth of a device's memory.

    One large tensor is copied into another, far larger than any processor cache (256 MiB, on CUDA 1 GiB), with as many
    threads as torch uses. The bytes read and the bytes written both count, ``2 * size`` a copy, as in the STREAM
    benchmark; what a processor reads in order to write to a line is not counted. Both tensors are touched before the
    clock runs.

    Args:
        device: whose memory.
        size: bytes of the tensor.
        copies: timed copies, of which the median counts.

    Returns:
        Bytes a second.
    """
    size = size if size is not None else _COPY_BYTES.get(device.type, _CPU_COPY_BYTES)
    source = torch.ones(size, dtype=torch.uint8, device=device)
    destination = torch.zeros_like(source)
    destination.copy_(source)
    seconds = statistics.median(timed(lambda: destination.copy_(source), device) for _ in range(copies))
    return 2 * size / seconds


class ResidentPeak:
    """The peak of memory since it was made, in bytes, also where the process had a higher one before.

    Garbage is collected first. On CUDA the peak is the allocator's. On Linux the kernel's high-water mark is set back,
    and what earlier runs have freed is given back to it, or it would count for this one too; where that is not possible
    it is the highest of the whole process, which then tells runs in one process apart only while it rises.
    """

    def __init__(self, device: torch.device) -> None:
        gc.collect()  # takes a while, and happens to nobody in the middle of a run if it happens here
        self._peak = PeakMemory(device)
        self._resettable = device.type != "cuda"
        if self._resettable:
            _give_back_freed_memory()
            with contextlib.suppress(OSError):
                Path("/proc/self/clear_refs").write_text("5", encoding="ascii")

    def peak_bytes(self) -> int:
        """The peak so far."""
        high_water = _high_water_bytes() if self._resettable else None
        return self._peak.peak_bytes() if high_water is None else high_water


def _give_back_freed_memory() -> None:
    """The C library keeps what was freed for later; glibc can be told to let it go."""
    with contextlib.suppress(AttributeError, OSError, TypeError):
        ctypes.CDLL(None).malloc_trim(0)


def _high_water_bytes() -> int | None:
    try:
        lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    except OSError:
        return None
    return next((1024 * int(line.split()[1]) for line in lines if line.startswith("VmHWM:")), None)
