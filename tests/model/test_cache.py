"""The cache against a list of rows."""

import resource

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from selfspec.model.cache import KeyValueCache, are_finite

CAPACITY = 20
CACHE_LAYERS = 2


@st.composite
def commits(draw: st.DrawFn) -> tuple[str, int, tuple[int, ...]]:
    """A verification of some rows and those of them that stay: a chain's prefix or the path of a tree."""
    rows = draw(st.integers(1, 7))
    if draw(st.booleans()):
        return "commit", rows, tuple(range(draw(st.integers(0, rows))))
    return "commit", rows, tuple(sorted(draw(st.sets(st.integers(0, rows - 1)))))


operations = st.lists(commits() | st.tuples(st.just("shorten"), st.floats(0, 1)), max_size=25)


def new_cache() -> KeyValueCache:
    return KeyValueCache(CACHE_LAYERS, 3, CAPACITY, 4, dtype=torch.float32, device=torch.device("cpu"))


def write_rows(cache: KeyValueCache, rows: int) -> list[torch.Tensor]:
    """Writes random rows after the committed ones; returns each, ``[layers, keys or values, heads, head_dim]``."""
    written = torch.randn(CACHE_LAYERS, 2, 1, 3, rows, 4)
    for layer in range(CACHE_LAYERS):
        cache.write(layer, cache.length, written[layer, 0], written[layer, 1])
    return [written[:, :, 0, :, row] for row in range(rows)]


def committed_rows(cache: KeyValueCache) -> torch.Tensor:
    layers = [torch.stack([keys[0], values[0]]) for keys, values in zip(cache.keys, cache.values, strict=True)]
    return torch.stack(layers)[:, :, :, : cache.length].permute(3, 0, 1, 2, 4)


@given(operations)
def test_any_history_leaves_the_rows_that_were_kept(history: list[tuple]) -> None:
    cache, naive = new_cache(), []
    buffers = [tensor.data_ptr() for tensor in (*cache.keys, *cache.values)]
    for kind, *details in history:
        if kind == "shorten":
            naive = naive[: int(details[0] * len(naive))]
            cache.length = len(naive)
            continue
        count, kept = details
        if len(naive) + count > CAPACITY:
            continue
        rows = write_rows(cache, count)
        cache.commit(kept)
        naive += [rows[row] for row in kept]

        assert cache.length == len(naive)
        if naive:
            assert torch.equal(committed_rows(cache), torch.stack(naive))
    assert buffers == [tensor.data_ptr() for tensor in (*cache.keys, *cache.values)], "the cache was moved"


def test_a_later_draft_overwrites_the_rejected_one() -> None:
    cache = new_cache()
    first = write_rows(cache, 3)
    cache.commit((0,))
    second = write_rows(cache, 2)
    cache.commit((0, 1))
    assert torch.equal(committed_rows(cache), torch.stack([first[0], *second]))


def test_size_counts_keys_and_values_of_every_layer() -> None:
    assert new_cache().size_in_bytes == CACHE_LAYERS * 2 * 3 * CAPACITY * 4 * 4


def test_rows_past_the_end_are_refused() -> None:
    with pytest.raises(AssertionError, match="do not fit"):
        new_cache().write(0, CAPACITY - 1, torch.zeros(1, 3, 2, 4), torch.zeros(1, 3, 2, 4))


def test_a_large_cache_takes_memory_only_where_it_is_written() -> None:
    """Or else the admission of a request with a long answer stops all others."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    cache = KeyValueCache(4, 8, 2**18, 16, dtype=torch.float32, device=torch.device("cpu"))
    assert cache.size_in_bytes == 2**30
    assert resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before < 2**30 / 2**21 / 2
    assert all(address % 64 == 0 for address in cache.addresses)
    assert not cache.keys[3][0, 7, -1].any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_single_number_that_is_not_finite_is_found(dtype: torch.dtype) -> None:
    rows = torch.full((3, 2, 2, 50, 8), torch.finfo(dtype).max, dtype=dtype)  # their sum is not finite
    assert are_finite(rows)
    assert are_finite(-rows)
    assert are_finite(rows[:0]), "a model without attention has none"
    for wrong in (float("nan"), float("inf"), -float("inf")):
        spoiled = rows.clone()
        spoiled[1, 0, 1, 33, 5] = wrong
        assert not are_finite(spoiled), wrong
