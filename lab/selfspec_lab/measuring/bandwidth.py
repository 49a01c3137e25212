"""Copy bandwidth of a device's memory."""

import statistics

import torch

from selfspec.timing import timed

CPU_COPY_BYTES, CUDA_COPY_BYTES = 2**28, 2**30
"""Bytes that a copy reads by default; larger than the cache of any processor."""
_COPIES = 5


def copy_bytes_per_second(device: torch.device, size: int | None = None, copies: int = _COPIES) -> float:
    """Copy bandwidth of a device's memory in bytes per second, from the median time of a copy.

    One tensor of ``size`` bytes is copied into another with as many threads as torch uses. As in the STREAM benchmark,
    bytes read and bytes written both count, so a copy moves ``2 * size`` bytes; reads for ownership of a cache line do
    not count. An untimed copy touches both tensors first.
    """
    if size is None:
        size = CUDA_COPY_BYTES if device.type == "cuda" else CPU_COPY_BYTES
    source = torch.ones(size, dtype=torch.uint8, device=device)
    destination = torch.zeros_like(source)
    destination.copy_(source)
    seconds = statistics.median(timed(lambda: destination.copy_(source), device) for _ in range(copies))
    return 2 * size / seconds
