"""Memory for weights asks Linux for large pages."""

import sys
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from selfspec.memory import _LargePages, empty_in_large_pages

_BLOCK, _PAGE = _LargePages._BLOCK, _LargePages._PAGE

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
@pytest.mark.parametrize("size", [100 << 10, 4 << 20, 70 << 20])
def test_all_of_it_may_have_large_pages(size: int) -> None:
    memory = empty_in_large_pages((3, size), torch.uint8)
    for place in (0, memory.numel() // 2, memory.numel() - 1):
        assert "hg" in flags(memory.data_ptr() + place)
    if size >= _BLOCK:
        assert memory.data_ptr() % _PAGE == 0


@needs_linux
def test_small_matrices_share_large_pages() -> None:
    pages = _LargePages()
    memory = [pages.take(100_001).fill_(number) for number in range(12)]
    assert memory[0].data_ptr() % _PAGE == 0
    for before, after in pairwise(memory):
        assert 0 <= after.data_ptr() - before.data_ptr() - before.nbytes < 64
        assert after.data_ptr() % 64 == 0
    assert [int(piece.unique()) for piece in memory] == list(range(12))


@needs_linux
def test_memory_goes_back_with_the_last_tensor_in_it() -> None:
    pages = _LargePages()
    first, second = (pages.take(_BLOCK // 3).fill_(1) for _ in range(2))
    address, view = first.data_ptr(), first[5:9]
    other = pages.take(_BLOCK)  # of another block
    del first, second
    assert "hg" in flags(address)
    assert view.tolist() == [1, 1, 1, 1]
    del view
    with pytest.raises(AssertionError, match="no area"):
        flags(address)
    assert "hg" in flags(other.data_ptr())


@needs_linux
def test_threads_get_memory_of_their_own() -> None:
    def take(number: int) -> torch.Tensor:
        return empty_in_large_pages((40_000 + number,), torch.int32).fill_(number)

    with ThreadPoolExecutor(8) as executor:
        taken = list(executor.map(take, range(400)))
    assert all(bool((memory == number).all()) for number, memory in enumerate(taken))


@pytest.mark.parametrize("shape", [(0, 8), (5, 8), (300, 1024), (9, 70, 333)])
def test_it_is_memory_like_any_other(shape: tuple[int, int]) -> None:
    memory = empty_in_large_pages(shape, torch.bfloat16).fill_(2)
    assert memory.shape == shape
    assert memory.dtype == torch.bfloat16
    assert memory.is_contiguous()
    assert bool((memory == 2).all())
