"""Look-ups by permuted bytes, interpreted or compiled: every code, and the instructions by what their manuals say."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from helpers.device import DEVICE, IS_INTERPRETED

pytest.importorskip("triton", reason="the extra triton is not installed")
import triton
import triton.language as tl

from selfspec.gpu.tables import VALUES, look_up, number_pairs, permuted_by_bytes, permuted_by_nibbles, signed_parts

IS_AMD = torch.version.hip is not None
of_amd = pytest.mark.skipif(not (IS_INTERPRETED or IS_AMD), reason="an instruction of AMD")
of_nvidia = pytest.mark.skipif(not IS_INTERPRETED and IS_AMD, reason="an instruction of NVIDIA")

WORD = st.integers(0, (1 << 32) - 1)


@triton.jit
def permute(low, high, places, out, by_bytes: tl.constexpr):
    """Four of eight bytes by either instruction."""
    if by_bytes:
        found = permuted_by_bytes(tl.load(low), tl.load(high), tl.load(places))
    else:
        found = permuted_by_nibbles(tl.load(low), tl.load(high), tl.load(places))
    tl.store(out, found)


@triton.jit
def look_up_words(words, out, pair, half, is_short: tl.constexpr, signed: tl.constexpr):
    """The numbers for two codes of 256 words, ``[2, 256]``: with signs one part of them in each row."""
    place = tl.arange(0, 256)
    loaded = tl.load(words + place)
    if signed:
        first, second = signed_parts(loaded, pair, half, is_short)
    else:
        first = number_pairs(loaded, pair, half, is_short)
        second = first * 0
    tl.store(out + place, first)
    tl.store(out + 256 + place, second)


@triton.jit
def look_up_codes(codes, out):
    """The entries of the table one by one."""
    place = tl.arange(0, 16)
    tl.store(out + place, look_up(tl.load(codes + place)))


def word(value: int) -> torch.Tensor:
    return torch.tensor([value], dtype=torch.int64).to(DEVICE, torch.int32)


def permuted(low: int, high: int, places: int, by_bytes: bool) -> int:
    out = torch.zeros(1, dtype=torch.int32, device=DEVICE)
    permute[(1,)](word(low), word(high), word(places), out, by_bytes=by_bytes)
    return int(out[0]) & 0xFFFFFFFF


def expected(low: int, high: int, places: list[int]) -> int:
    """PTX: bit 3 of a place gives the sign of a byte eight times."""
    stored = low.to_bytes(4, "little") + high.to_bytes(4, "little")
    found = [stored[place & 7] if place < 8 else 255 * (stored[place & 7] >> 7) for place in places]
    return int.from_bytes(bytes(found), "little")


@of_nvidia
@given(low=WORD, high=WORD, places=st.lists(st.integers(0, 15), min_size=4, max_size=4), rest=st.integers(0, 65535))
def test_places_of_four_bits(low: int, high: int, places: list[int], rest: int) -> None:
    packed = sum(place << (4 * i) for i, place in enumerate(places)) | rest << 16
    assert permuted(low, high, packed, False) == expected(low, high, places)


@of_amd
@given(low=WORD, high=WORD, places=st.lists(st.integers(0, 7), min_size=4, max_size=4))
def test_places_of_eight_bits(low: int, high: int, places: list[int]) -> None:
    packed = sum(place << (8 * i) for i, place in enumerate(places))
    assert permuted(low, high, packed, True) == expected(low, high, places)


def test_codes_one_by_one() -> None:
    out = torch.zeros(16, dtype=torch.int32, device=DEVICE)
    look_up_codes[(1,)](torch.arange(16, dtype=torch.int32, device=DEVICE), out)
    assert (out - 128).tolist() == list(VALUES)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("signed", [pytest.param(True, marks=of_nvidia), pytest.param(False, marks=of_amd)])
@pytest.mark.parametrize("pair", [0, 1])
@pytest.mark.parametrize("half", [0, 1])
def test_every_pair_of_codes(dtype: torch.dtype, signed: bool, pair: int, half: int) -> None:
    """All 256 codes of inputs 0 and 2, or 1 and 3, beside any other codes: the sum of both parts is the value."""
    codes = torch.randint(0, 16, (256, 4, 2), generator=torch.Generator().manual_seed(0))
    codes[:, pair, half], codes[:, pair + 2, half] = torch.arange(256) % 16, torch.arange(256) // 16
    data = (codes[..., 0] | codes[..., 1] << 4).to(DEVICE, torch.uint8)
    out = torch.zeros(2, 256, dtype=torch.int32, device=DEVICE)
    options: dict[str, Any] = {"is_short": dtype == torch.bfloat16, "signed": signed}
    look_up_words[(1,)](data.view(torch.int32).flatten(), out, pair, half, **options)
    found = out.cpu().view(dtype).view(2, 256, 2).double().sum(0)
    values = torch.tensor(VALUES, dtype=torch.float64)
    assert torch.equal(found, values[codes[:, [pair, pair + 2], half]])
