"""Peak memory of a request, and the memory that is available."""

import sys
from pathlib import Path

import torch


class PeakMemory:
    """Measures peak memory, starting when it is created.

    On a CUDA device this is the allocator's peak since then, weights included. Elsewhere it is the largest resident
    size the process has ever had, the only peak that operating systems record.

    Args:
        device: device of the model.
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


def available_bytes() -> int | None:
    """Memory of the machine that can be allocated now, in bytes; ``None`` where the system does not report it."""
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    available = next((line.split()[1] for line in lines if line.startswith("MemAvailable:")), None)
    return None if available is None else 1024 * int(available)


def _peak_resident_bytes() -> int:
    try:
        import resource
    except ImportError:  # not on Windows
        return 0
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
