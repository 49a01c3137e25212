"""The table that IQ4_NL and IQ4_XS share: 16 values of eight bits, by which each code of four bits stands for one.

Instructions that permute bytes look up four codes at once. NVIDIA's takes places of four bits, as codes are: a place of
eight or more gives the sign of a byte four times, which is nothing for bytes below 128. So the positive values and the
negated negative ones are looked up by the same codes. They follow the exponent of 128 (of 1024 in float16), once with a
sign, and the sum of products by both is that of the values. AMD's takes places of eight bits; there the low and the
high bytes of the values as numbers of 16 bits are looked up.
"""

import os
import struct
from collections.abc import Sequence

import torch
import triton
import triton.language as tl

VALUES = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
"""What the codes stand for."""

PERMUTES: tl.constexpr = tl.constexpr(os.environ.get("TRITON_INTERPRET", "0") != "1" and not torch.xpu.is_available())
"""Whether the instructions are used. Triton's interpreter and XPU have functions that do what the manuals say."""


def _words(entries: Sequence[int]) -> tuple[tl.constexpr, ...]:
    """Bytes as signed words of four."""
    return tuple(tl.constexpr(word) for word in struct.unpack(f"<{len(entries) // 4}i", bytes(entries)))


def _halves(numbers: Sequence[bytes]) -> tuple[tl.constexpr, ...]:
    """The low bytes of numbers of 16 bits, and then the high ones."""
    return _words([number[place] for place in (0, 1) for number in numbers])


_ADDED_0, _ADDED_1, _ADDED_2, _ADDED_3 = _words([value + 128 for value in VALUES])
_POSITIVE_0, _POSITIVE_1 = _words(VALUES[8:])
_NEGATIVE_0, _NEGATIVE_1 = _words([-value for value in VALUES[:8]])
_B0, _B1, _B2, _B3, _B4, _B5, _B6, _B7 = _halves([struct.pack("<f", value)[2:] for value in VALUES])
_F0, _F1, _F2, _F3, _F4, _F5, _F6, _F7 = _halves([struct.pack("<e", value) for value in VALUES])


@triton.jit
def look_up(codes):
    """The values for codes one by one, with 128 added."""
    low = tl.where(codes < 4, _ADDED_0, _ADDED_1)
    high = tl.where(codes < 12, _ADDED_2, _ADDED_3)
    return (tl.where(codes < 8, low, high) >> (8 * (codes & 3))) & 255


@triton.jit
def permuted_by_nibbles(low, high, places):
    """Four of eight bytes, by the low four places of four bits; with 8 added the sign of a byte (``prmt`` of PTX)."""
    if PERMUTES:
        return tl.inline_asm_elementwise(
            "prmt.b32 $0, $1, $2, $3;", "=r,r,r,r", [low, high, places], dtype=tl.int32, is_pure=True, pack=1
        )
    found = places & 0
    for byte in tl.static_range(4):
        place = (places >> (4 * byte)) & 15
        own = (tl.where((place & 4) != 0, high, low) >> (8 * (place & 3))) & 255
        found |= tl.where(place < 8, own, (own >> 7) * 255) << (8 * byte)
    return found


@triton.jit
def permuted_by_bytes(low, high, places):
    """Four of eight bytes, by places of eight bits that are below 8 (``v_perm_b32`` of AMD)."""
    if PERMUTES:
        return tl.inline_asm_elementwise(
            "v_perm_b32 $0, $1, $2, $3", "=v,v,v,v", [high, low, places], dtype=tl.int32, is_pure=True, pack=1
        )
    found = places & 0
    for byte in tl.static_range(4):
        place = (places >> (8 * byte)) & 255
        found |= ((tl.where(place >= 4, high, low) >> (8 * (place & 3))) & 255) << (8 * byte)
    return found


@triton.jit
def signed_parts(words, pair, half, IS_SHORT: tl.constexpr):
    """Positive and negative parts of the values of two codes of each word, two numbers of 16 bits; see the module.

    ``words`` have codes of four inputs of two halves, ``pair`` is 0 for inputs 0 and 2, 1 for the others.
    """
    EXPONENT: tl.constexpr = 0x43434343 if IS_SHORT else 0x64646464
    SIGNED: tl.constexpr = EXPONENT + 0x80808080 - (1 << 32)
    codes = permuted_by_nibbles(words, words, 0x20 + 0x11 * pair)
    positive = permuted_by_nibbles(_POSITIVE_0, _POSITIVE_1, codes ^ 0x8888)
    negative = permuted_by_nibbles(_NEGATIVE_0, _NEGATIVE_1, codes)
    places = 0x4240 + 0x0101 * half
    return permuted_by_nibbles(positive, EXPONENT, places), permuted_by_nibbles(negative, SIGNED, places)


@triton.jit
def number_pairs(words, pair, half, IS_SHORT: tl.constexpr):
    """The values of the same codes as two numbers of 16 bits, from tables of their bytes."""
    shifted = words >> (4 * half)
    place, upper = shifted & 0x07070707, ((shifted >> 1) & 0x04040404) | 0x03020100
    if IS_SHORT:
        low = _of_sixteen(place, upper, _B0, _B1, _B2, _B3)
        high = _of_sixteen(place, upper, _B4, _B5, _B6, _B7)
    else:
        low = _of_sixteen(place, upper, _F0, _F1, _F2, _F3)
        high = _of_sixteen(place, upper, _F4, _F5, _F6, _F7)
    return permuted_by_bytes(low, high, 0x06020400 + 0x01010101 * pair)


@triton.jit
def _of_sixteen(place, upper, W0: tl.constexpr, W1: tl.constexpr, W2: tl.constexpr, W3: tl.constexpr):
    """Four bytes of a table of 16: by places in both halves of it, and by which half each is of."""
    return permuted_by_bytes(permuted_by_bytes(W0, W1, place), permuted_by_bytes(W2, W3, place), upper)
