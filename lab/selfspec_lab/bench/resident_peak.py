"""Peak memory of one run in a process that runs many."""

import contextlib
from pathlib import Path

import torch

from selfspec.memory import release_freed_memory
from selfspec_lab.measuring import PeakMemory


class ResidentPeak:
    """Peak memory since the object was made, in bytes, even if the process had a higher peak before.

    Garbage is collected first. On CUDA it is the allocator's peak. On Linux the kernel's high-water mark of the
    resident size is reset, after glibc has returned freed memory to the system; otherwise freed memory of earlier runs
    would count. Where the mark cannot be reset, it is the peak of the whole process.

    Args:
        device: where the run takes place.
    """

    def __init__(self, device: torch.device) -> None:
        release_freed_memory()  # garbage is collected here, so that it does not happen during a timed run
        self._peak = PeakMemory(device)
        self._resettable = device.type != "cuda"
        if self._resettable:
            with contextlib.suppress(OSError):
                Path("/proc/self/clear_refs").write_text("5", encoding="ascii")

    def peak_bytes(self) -> int:
        """The peak so far, in bytes."""
        high_water = _high_water_bytes() if self._resettable else None
        return self._peak.peak_bytes() if high_water is None else high_water


def _high_water_bytes() -> int | None:
    try:
        lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    except OSError:
        return None
    return next((1024 * int(line.split()[1]) for line in lines if line.startswith("VmHWM:")), None)
