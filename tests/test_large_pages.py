"""Memory for weights asks Linux for large pages."""

import sys
from pathlib import Path

import pytest
import torch

from selfspec.memory import empty_in_large_pages

needs_linux = pytest.mark.skipif(
    sys.platform != "linux" or not Path("/sys/kernel/mm/transparent_hugepage").exists(),
    reason="this system has no transparent huge pages",
)


def flags(address: int) -> list[str]:
    """Those of the mapped area that has an address, as Linux names them."""
    inside = False
    for line in Path("/proc/self/smaps").read_text(encoding="ascii", errors="replace").splitlines():
        name, _, rest = line.partition(" ")
        if not name.endswith(":"):
            first, last = (int(end, 16) for end in name.split("-"))
            inside = first <= address < last
        elif inside and name == "VmFlags:":
            return rest.split()
    raise AssertionError("no area has the address")


@needs_linux
def test_all_of_it_may_have_large_pages() -> None:
    memory = empty_in_large_pages((3, 4 << 20), torch.uint8)
    for place in (0, memory.numel() // 2, memory.numel() - 1):
        assert "hg" in flags(memory.data_ptr() + place)


@pytest.mark.parametrize("shape", [(0, 8), (5, 8), (300, 1024)])
def test_it_is_memory_like_any_other(shape: tuple[int, int]) -> None:
    memory = empty_in_large_pages(shape, torch.bfloat16).fill_(2)
    assert memory.shape == shape
    assert memory.dtype == torch.bfloat16
    assert memory.is_contiguous()
    assert bool((memory == 2).all())
