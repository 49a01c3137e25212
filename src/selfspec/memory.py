"""Peak memory of a request, as far as device and operating system tell."""

import sys

import torch


class PeakMemory:
    """Watches the memory from its making on.

    On a CUDA device it is the allocator's peak since then, weights included; elsewhere the largest resident size that
    the process ever had, since operating systems keep no other peak.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)

    def peak_bytes(self) -> int:
        """The peak so far, in bytes."""
        if self._device.type == "cuda":
            return int(torch.cuda.max_memory_allocated(self._device))
        return _peak_resident_bytes()


def _peak_resident_bytes() -> int:
    try:
        import resource
    except ImportError:  # not on Windows
        return 0
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
