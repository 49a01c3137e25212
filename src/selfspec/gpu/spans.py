"""Codes of two and three bits, 64 inputs together.

Four threads of a matrix instruction have the codes of a weight row. Each takes a quarter of the inputs of a span:
their two bits are one word, their third bits half of another. So all threads shift and mask alike, and the integer that
scales 16 inputs of Q2_K or Q3_K belongs to one thread, which multiplies its codes by it, exactly.

Where no integer multiplies them, bits are masked where they stand, under the exponent with which their lowest counts
one. What the exponents add is a sum of the entries by constants, which is subtracted.
"""

import triton
import triton.language as tl

from selfspec.gpu.blocks import add_numbers, load_numbers, masked, moved
from selfspec.gpu.tables import PERMUTES, permuted_by_bytes, permuted_by_nibbles

SPAN: tl.constexpr = tl.constexpr(64)
"""Inputs that are read together, those of two blocks."""

_TWICE: tl.constexpr = tl.constexpr(0x10001)
_THIRDS: tl.constexpr = tl.constexpr(0xCCCCCCCC - (1 << 32))
_SIGNS: tl.constexpr = tl.constexpr(0x80008000 - (1 << 32))


@triton.jit
def span_order(entries, QUADS: tl.constexpr):
    """Entries of rows, ``[rows, SPAN]``, as what a span is multiplied with, ``[SPAN, rows]``."""
    ROWS: tl.constexpr = entries.shape[0]
    apart = tl.reshape(entries, (ROWS, 4, 4, 2, 2))
    return tl.reshape(tl.permute(apart, (2, 1, 3, 4, 0) if QUADS else (2, 3, 1, 4, 0)), (SPAN, ROWS))


@triton.jit
def _axes(QUADS: tl.constexpr):
    """The thread, the byte's field and the pair of bytes of each word of codes; see ``blocks.read_codes``."""
    two, four = tl.arange(0, 2), tl.arange(0, 4)
    thread = four[None, None, :, None, None] if QUADS else four[None, None, None, :, None]
    pair = two[None, None, None, :, None] if QUADS else two[None, None, :, None, None]
    return thread, four[None, :, None, None, None], pair


@triton.jit
def _read_span(codes, row, AT: tl.constexpr, BITS: tl.constexpr, QUADS: tl.constexpr):
    """Words of codes of a span, and where in its halves each code begins.

    A byte has two bits of four inputs. With third bits it has whole codes of two inputs, of even fields or of odd ones.
    """
    thread, field, pair = _axes(QUADS)
    block = (codes + (AT * 2 * BITS) + 4 * row)[:, None, None, None, None] + 64 * BITS * (thread // 2)
    words = load_numbers(block + 64 * (thread % 2), tl.int32)
    at = 2 * field + 8 * pair
    if BITS == 3:
        singles = load_numbers(block + 128 + 0 * thread, tl.int32) >> (4 * (thread % 2))
        odd = field % 2
        # Two bits of each byte that are two apart get four apart; what is between them is masked.
        apart = (singles & (0x05050505 << odd)) * (20 >> odd)
        words, at = ((words >> (2 * odd)) & 0x33333333) | (apart & _THIRDS), 4 * (field // 2) + 8 * pair
    return words, at


@triton.jit
def _permuted(words, A, B, C, D, QUADS: tl.constexpr):
    """The bytes of words in another order, from the lowest on; a place is that of a byte, or four more."""
    if QUADS:
        return permuted_by_bytes(words, words, A | (B << 8) | (C << 16) | (D << 24))
    return permuted_by_nibbles(words, words, A | (B << 4) | (C << 8) | (D << 12))


@triton.jit
def _power(place, ADDED: tl.constexpr, IS_SHORT: tl.constexpr):
    """2 to the power of seven less ``place``, with a code added, as a number of 16 bits, twice in a word.

    The bit of a fraction of seven bits at that place counts one; the fraction of float16 has three bits more.
    """
    if IS_SHORT:
        return (((134 - place) << 7) | (ADDED << place)) * _TWICE
    return (((22 - place) << 10) | (ADDED << place + 3)) * _TWICE


@triton.jit
def _numbers(words, at, place, BITS: tl.constexpr, IS_SHORT: tl.constexpr, QUADS: tl.constexpr):
    """Codes that begin at some bit of two bytes of words, as two numbers of 16 bits: ``_power`` is added to each.

    The bytes in the middle are exchanged first, so that halves of words have inputs that follow each other.
    """
    words = _permuted(words, 0, 2, 1, 3, QUADS)
    to = place if IS_SHORT else place + 3
    mask = ((1 << BITS) - 1) * _TWICE << to
    return masked(moved(words, at - to), mask, _power(place, 0, IS_SHORT), QUADS)


@triton.jit
def _places(at, BITS: tl.constexpr):
    """Where codes stand in a fraction of seven bits; most words need not be moved for it."""
    return at % (6 if BITS == 2 else 8)


@triton.jit
def add_span(codes, row, entries, sums, AT: tl.constexpr, BITS: tl.constexpr, QUADS: tl.constexpr):
    """``sums`` and the product of entries of 16 bits, ``[SPAN, rows]``, with codes; see ``add_offsets``."""
    words, at = _read_span(codes, row, AT, BITS, QUADS)
    numbers = _numbers(words, at, _places(at, BITS), BITS, entries.dtype.is_bf16(), QUADS)
    return add_numbers(numbers, entries, sums, SPAN)


@triton.jit
def add_offsets(entries, sums, BITS: tl.constexpr, QUADS: tl.constexpr):
    """``sums`` ``[16, rows]`` and the product with what ``add_span`` adds to the codes, the same in all 16 lines."""
    thread, field, pair = _axes(QUADS)
    at = (2 * field if BITS == 2 else 4 * (field // 2)) + 8 * pair
    words = _power(_places(at, BITS), 0, entries.dtype.is_bf16())
    return add_numbers(words + 0 * (tl.arange(0, 16)[:, None, None, None, None] + thread), entries, sums, SPAN)


@triton.jit
def _doubled(integers, IS_SHORT: tl.constexpr, QUADS: tl.constexpr):
    """Integers of at most seven digits and zeros after them as a number of 16 bits, twice in a word."""
    return _permuted(_upper(integers.to(tl.float32), IS_SHORT), 2, 3, 2, 3, QUADS)


@triton.jit
def _one_of_two(words, UPPER: tl.constexpr, IS_SHORT: tl.constexpr):
    half = (words >> (16 if UPPER else 0)).to(tl.int16)
    return half.to(tl.bfloat16 if IS_SHORT else tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def multiply_add(words, factors, added, IS_SHORT: tl.constexpr):
    """Pairs of numbers of 16 bits times others, and others added, rounded once (``fma`` of PTX).

    Where the instruction is not used, results that a number of 16 bits does not hold are cut.
    """
    if PERMUTES:
        ASM: tl.constexpr = "fma.rn.bf16x2 $0, $1, $2, $3;" if IS_SHORT else "fma.rn.f16x2 $0, $1, $2, $3;"
        return tl.inline_asm_elementwise(ASM, "=r,r,r,r", [words, factors, added], tl.int32, is_pure=True, pack=1)
    low = _one_of_two(words, False, IS_SHORT) * _one_of_two(factors, False, IS_SHORT)
    high = _one_of_two(words, True, IS_SHORT) * _one_of_two(factors, True, IS_SHORT)
    low += _one_of_two(added, False, IS_SHORT)
    high += _one_of_two(added, True, IS_SHORT)
    if IS_SHORT:
        low_bits, high_bits = low.to(tl.int32, bitcast=True) >> 16, high.to(tl.int32, bitcast=True) >> 16
    else:
        low_bits = low.to(tl.float16).to(tl.int16, bitcast=True).to(tl.int32)
        high_bits = high.to(tl.float16).to(tl.int16, bitcast=True).to(tl.int32)
    return (low_bits & 0xFFFF) | (high_bits << 16)


@triton.jit
def add_scaled_span(codes, row, integers, entries, sums, AT: tl.constexpr, FORM: tl.constexpr, QUADS: tl.constexpr):
    """``sums`` and the product of entries with codes, less ``offset``, times the integers of ``read_integers``.

    These products have at most seven bits and a sign. AMD has no instruction for them in bfloat16; there each thread
    looks them up. To each ``scaled_offset`` is added.
    """
    BITS: tl.constexpr = FORM.bits
    IS_SHORT: tl.constexpr = entries.dtype.is_bf16()
    words, at = _read_span(codes, row, AT, BITS, QUADS)
    _, field, pair = _axes(QUADS)
    if QUADS:
        places = (words >> (2 * field if BITS == 2 else 4 * (field // 2))) & (0x01010101 * ((1 << BITS) - 1))
        return add_numbers(_looked_up(places, pair, integers, BITS, IS_SHORT), entries, sums, SPAN)
    # Where Q3_K's codes begin at another place, what is subtracted has more bits than a number.
    place = _places(at, BITS) if BITS == 2 else 4 + 0 * at
    scales = _doubled(integers, IS_SHORT, QUADS)
    less = multiply_add(scales, _power(place, FORM.offset, IS_SHORT) | _SIGNS, 0 * scales, IS_SHORT)
    numbers = _numbers(words, at, place, BITS, IS_SHORT, QUADS)
    return add_numbers(multiply_add(numbers, scales, less, IS_SHORT), entries, sums, SPAN)


@triton.jit
def _looked_up(places, pair, integers, BITS: tl.constexpr, IS_SHORT: tl.constexpr):
    """Products of four codes, those in the bytes of words, and integers, of which each thread makes a table.

    Those of Q2_K are bytes, under the exponent of ``scaled_offset``. Those of Q3_K are numbers, by low and high bytes.
    """
    if BITS == 2:
        multiples = (integers * 0x030201) << 8
        found = permuted_by_bytes(multiples, multiples, places)
        numbers = permuted_by_bytes(found, 0x43434343 if IS_SHORT else 0x64646464, 0x04010400 + 0x00020002 * pair)
    else:
        one = integers.to(tl.float32)
        both = permuted_by_bytes(0 * integers, _upper(one, IS_SHORT), 0x07060302)
        more = permuted_by_bytes(_upper(2 * one, IS_SHORT), _upper(3 * one, IS_SHORT), 0x07060302)
        low, high = permuted_by_bytes(both, more, 0x06040200), permuted_by_bytes(both, more, 0x07050301)
        four = _upper(4 * one, IS_SHORT)  # below four codes stand for the negative ones, the largest first
        less_low = permuted_by_bytes(low, four, 0x01020306)
        less_high = permuted_by_bytes(high, four, 0x01020307) ^ (0x80808080 - (1 << 32))
        low, high = permuted_by_bytes(less_low, low, places), permuted_by_bytes(less_high, high, places)
        numbers = permuted_by_bytes(low, high, 0x05010400 + 0x02020202 * pair)
    return numbers


@triton.constexpr_function
def scaled_offset(BITS: tl.constexpr, QUADS: tl.constexpr, IS_SHORT: tl.constexpr):
    """What ``add_scaled_span`` adds to the products of codes and integers."""
    return (128 if IS_SHORT else 1024) if BITS == 2 and QUADS else 0


@triton.jit
def _upper(numbers, IS_SHORT: tl.constexpr):
    """The bits of numbers of 16 bits in the upper half of words."""
    if IS_SHORT:
        return numbers.to(tl.int32, bitcast=True)
    return numbers.to(tl.float16).to(tl.int16, bitcast=True).to(tl.int32) << 16


@triton.jit
def read_integers(unit, row, FIRST: tl.constexpr, QUADS: tl.constexpr):
    """Bytes of the scales of the quarters of a span, by thread; ``FIRST`` is where that of the first quarter begins.

    They are the lowest bytes of int32. NVIDIA's programs load words, since no fewer bytes are copied to shared memory.
    """
    thread, _, _ = _axes(QUADS)
    if QUADS:
        integers = load_numbers((unit + FIRST + row)[:, None, None, None, None] + 16 * thread, tl.uint8).to(tl.int32)
    else:
        words = load_numbers((unit + FIRST + row // 4 * 4)[:, None, None, None, None] + 16 * thread, tl.int32)
        integers = words >> (8 * (row % 4))[:, None, None, None, None]
    return integers


@triton.jit
def add_minima_span(integers, entries, sums, QUADS: tl.constexpr):
    """``sums`` and the product of entries with the upper four bits of the bytes of ``read_integers``, times 16.

    On AMD they are not multiplied, and ``scaled_offset`` is added.
    """
    IS_SHORT: tl.constexpr = entries.dtype.is_bf16()
    _, field, pair = _axes(QUADS)
    if QUADS:
        words = permuted_by_bytes(integers >> 4, 0x43434343 if IS_SHORT else 0x64646464, 0x04000400)
    else:
        # One word for both pairs would be copied between registers before each matrix instruction.
        low, high = 2 + 4 * pair, 3 + 4 * pair
        words = _permuted(_upper((integers & 240).to(tl.float32), IS_SHORT), low, high, low, high, QUADS)
    return add_numbers(words + 0 * (field + pair), entries, sums, SPAN)
