"""Peak memory of one run in a process that runs many."""

import ctypes
from pathlib import Path

import torch

from selfspec_lab.bench.resident_peak import ResidentPeak

CPU = torch.device("cpu")


def test_peak_memory_is_that_of_the_run() -> None:
    large, small = ResidentPeak(CPU), None
    block = torch.ones(2**26, dtype=torch.uint8)
    with_block = large.peak_bytes()
    del block
    small = ResidentPeak(CPU)
    assert with_block >= 2**26
    if Path("/proc/self/clear_refs").exists():
        assert small.peak_bytes() < with_block


def test_memory_that_was_freed_before_is_not_of_the_run() -> None:
    before = ResidentPeak(CPU).peak_bytes()
    blocks = [torch.ones(2**14, dtype=torch.uint8) for _ in range(2**12)]  # small enough to be kept when they are freed
    held = ResidentPeak(CPU).peak_bytes()
    del blocks
    after = ResidentPeak(CPU).peak_bytes()
    assert held > before + 2**25
    if Path("/proc/self/clear_refs").exists() and hasattr(ctypes.CDLL(None), "malloc_trim"):
        assert after < held - 2**25
