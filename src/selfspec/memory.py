"""Peak memory of a request."""

import sys

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


def _peak_resident_bytes() -> int:
    try:
        import resource
    except ImportError:  # not on Windows
        return 0
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
