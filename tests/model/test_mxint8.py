"""Rounding to 8 bits, against fractions; and the cache that does it, against rounded rows."""

import math
from fractions import Fraction

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from selfspec.model.cache import KeyValueCache, are_finite
from selfspec.model.mxint8 import SHARED, pack, packed_size, unpack

numbers = st.floats(width=32, allow_nan=False, allow_infinity=False) | st.floats(-4, 4, width=32)
blocks = st.lists(numbers, min_size=SHARED, max_size=SHARED)


def rounded(block: list[float]) -> list[float]:
    """What the numbers of a block become."""
    largest = max(abs(number) for number in block)
    if largest < 2.0**-120:
        return [0.0] * SHARED
    unit = Fraction(2) ** (math.frexp(largest)[1] - 1 - 6)
    codes = [max(-127, min(127, round(Fraction(number) / unit))) for number in block]
    assert all(abs(code * unit - Fraction(number)) * 127 <= largest for code, number in zip(codes, block, strict=True))
    return [float(code * unit) for code in codes]


@given(st.lists(blocks, min_size=1, max_size=3))
def test_each_block_is_rounded_with_a_power_of_two_of_its_own(row: list[list[float]]) -> None:
    packed = pack(torch.tensor(row).flatten())
    assert packed.nbytes == packed_size(SHARED * len(row)) == 33 * len(row)
    expected = torch.tensor([number for block in row for number in rounded(block)])
    assert torch.equal(unpack(packed, torch.float32), expected)
    assert torch.equal(unpack(packed, torch.bfloat16).float(), expected), "bfloat16 has every number"
    assert torch.equal(pack(expected), packed), "what is rounded is not rounded again"
    assert are_finite(packed)


@pytest.mark.parametrize("wrong", [math.nan, math.inf, -math.inf])
def test_a_block_with_something_else_than_a_number_has_none(wrong: float) -> None:
    row = torch.ones(2 * SHARED)
    row[40] = wrong
    packed = pack(row)
    found = unpack(packed, torch.float32)
    assert torch.equal(found[:SHARED], row[:SHARED])
    assert found[SHARED:].isnan().all()
    assert not are_finite(packed)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_packed_cache_has_the_rounded_rows(dtype: torch.dtype) -> None:
    cache = KeyValueCache(2, 3, 20, 64, dtype=dtype, device=torch.device("cpu"), packed=True)
    assert cache.size_in_bytes == 2 * 2 * 3 * 20 * 66
    written = torch.randn(2, 2, 1, 3, 7, 64).to(dtype)
    cache.write(0, 0, *written[0])
    cache.write_pairs(1, 0, written[1].flatten(0, 2).transpose(0, 1))
    cache.commit((0, 2, 5))
    other = KeyValueCache(2, 3, 20, 64, dtype=dtype, device=torch.device("cpu"), packed=True)
    other.append(cache.rows(0, 3))
    for each in (cache, other):
        assert (each.length, each.dtype, each.head_dim) == (3, dtype, 64)
        for layer in range(2):
            for seen, rows in zip(each.seen(layer, 0, 3), written[layer], strict=True):
                assert torch.equal(seen, unpack(pack(rows), dtype)[:, :, [0, 2, 5]])
                assert 0 < (seen - rows[:, :, [0, 2, 5]]).float().norm() < 0.02 * rows.float().norm()
