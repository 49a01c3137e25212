"""Weights of few bits as Triton kernels read them: the very tiles that the kernels of the CPU read.

A tile has 16 weight rows side by side; ``formats.h`` and ``codes.h`` describe it. Its words of four bytes have the
codes of four inputs of a weight row, and those of 16 rows follow each other, so that neighbouring threads read
neighbouring words, whatever the number of bits. Codes are read by blocks, or by halves of them, in an order of inputs
in which a matrix instruction wants all four bytes of a word from one thread.

Two codes stay together in a word, 16 bits apart. Under the exponent of a power of two they are two numbers of 16 bits,
so that a matrix instruction takes them after a shift and a logical operation a pair; what the power adds to a sum of
products is that power times the sum of the entries, which is subtracted from the sum.
"""

import os
from dataclasses import dataclass

import triton
import triton.language as tl

from selfspec.errors import UnsupportedModelError
from selfspec.gpu.tables import PERMUTES, look_up, number_pairs, signed_parts
from selfspec.runtimes.formats import BLOCK, GGUF_FORMATS, TILE, PackedFormat

IS_INTERPRETED: tl.constexpr = tl.constexpr(os.environ.get("TRITON_INTERPRET", "0") == "1")
"""Whether kernels run in Triton's interpreter, on tensors of the CPU."""

_ROWS: tl.constexpr = tl.constexpr(TILE)
_PLANE: tl.constexpr = tl.constexpr(TILE * BLOCK // 8)
"""Bytes of one bit of all codes of a block."""

_MAGIC: tl.constexpr = tl.constexpr(0x4B000000)
"""The bits of 2 to the 23rd as a float: an integer below that, put into them, is added to it."""

_SIGNED_MAGIC: tl.constexpr = tl.constexpr(0x4B400000)
"""The bits of 1.5 times that, to which a negative integer can be added, too."""


@dataclass(frozen=True)
class TileForm:
    """How the tiles of a format are read: a constant of the kernels.

    Attributes:
        kind: of the scales, a class of ``formats.h``: ``symmetric``, ``scaled``, ``shifted``, ``grid``, ``six``,
            ``eight``, ``four``; or ``real`` for floats, which have none.
        bits: of a code, or of a float.
        unit: inputs of a unit.
        scaled: inputs that share a scale.
        offset: the code that stands for zero.
        head: bytes of the scales of a unit of a tile.
        table: codes are places in a table.
        numbers: the type of floats.
    """

    kind: str
    bits: int
    unit: int
    scaled: int
    offset: int
    head: int
    table: bool
    numbers: tl.dtype

    @property
    def part(self) -> int:
        """Inputs that are read together: those of a block, or of a half where that has a scale of its own."""
        return min(BLOCK, self.scaled)

    @property
    def unit_bytes(self) -> int:
        """Bytes of a unit of a tile."""
        return self.head + TILE * self.unit * self.bits // 8

    @property
    def has_minima(self) -> bool:
        """Something is subtracted from the scaled codes."""
        return self.kind in ("shifted", "six", "four")


_GGUF: dict[str, tuple[str, int, int, bool]] = {
    "Q4_0": ("scaled", 32, 8, False),
    "Q5_0": ("scaled", 32, 16, False),
    **dict.fromkeys(("Q4_1", "Q5_1"), ("shifted", 32, 0, False)),
    "Q8_0": ("scaled", 32, 128, False),
    "Q2_K": ("four", 16, 0, False),
    "Q3_K": ("eight", 16, 4, False),
    **dict.fromkeys(("Q4_K", "Q5_K"), ("six", 32, 0, False)),
    "Q6_K": ("eight", 16, 32, False),
    "IQ4_NL": ("scaled", 32, 128, True),
    "IQ4_XS": ("eight", 32, 128, True),
    **dict.fromkeys(("F16", "BF16", "F32"), ("real", 32, 0, False)),
}
"""The kind, the inputs that share a scale, the code that stands for zero, and whether there is a table, by name."""

_REAL_TYPES = {"F16": tl.float16, "BF16": tl.bfloat16, "F32": tl.float32}
"""The types of floats in tiles."""

WITHOUT_KERNEL = frozenset({"MXFP4"})
assert _GGUF.keys() == GGUF_FORMATS.keys() - WITHOUT_KERNEL


def tile_form(form: PackedFormat) -> TileForm:
    """How the tiles of a format are read. Raises ``UnsupportedModelError`` where no kernel reads it."""
    if form.name in WITHOUT_KERNEL:
        raise UnsupportedModelError(f"Triton's kernels do not read {form.name}; load the model with unpack")
    others = "grid" if form.name else "symmetric", form.unit, 1 << (form.bits - 1), False
    kind, scaled, offset, table = _GGUF.get(form.name, others)
    head = form.unit_bytes - TILE * form.unit * form.bits // 8
    return TileForm(kind, form.bits, form.unit, scaled, offset, head, table, _REAL_TYPES.get(form.name, tl.float32))


@triton.jit
def dot(left, right, sums):
    """``sums`` and the product of matrices of one dtype, in float32.

    Triton's interpreter leaves the order of the sums to a library, which chooses it by their number, and does not know
    bfloat16; so there float32 products, which are the same, are added in order.
    """
    if IS_INTERPRETED:
        return sums + tl.sum(left.to(tl.float32)[:, :, None] * right.to(tl.float32)[None, :, :], 1)
    return tl.dot(left, right, sums, input_precision="ieee")


@triton.jit
def input_order(FORM: tl.constexpr):
    """The input that each place of a part has, without ``QUADS``: 16 inputs, half a block, or 32."""
    place = tl.arange(0, FORM.part)
    if FORM.kind == "real":
        return place
    half, of_half = place // 16, place % 16
    return 16 * half + 4 * (of_half // 2 % 4) + 2 * (of_half % 2) + of_half // 8


@triton.jit
def in_order(entries, FORM: tl.constexpr, QUADS: tl.constexpr):
    """Entries of rows, ``[rows, part]``, as what a part is multiplied with, ``[part, rows]``; see ``read_codes``."""
    if FORM.kind == "real":
        return tl.trans(entries)
    ROWS: tl.constexpr = entries.shape[0]
    apart = tl.reshape(entries, (ROWS, FORM.part // 16, 4, 2, 2))
    return tl.reshape(tl.permute(apart, (1, 2, 4, 3, 0) if QUADS else (1, 4, 2, 3, 0)), (FORM.part, ROWS))


@triton.jit
def load_numbers(pointers, TYPE: tl.constexpr):
    """Loads numbers of a type from addresses of bytes. Tiles are whole, so that every address is in one."""
    return tl.load(pointers.to(tl.pointer_type(TYPE)))


@triton.jit
def unit_addresses(tiles, weight_row, index, INPUTS: tl.constexpr, FORM: tl.constexpr):
    """The address of a unit of some weight rows, and the place of each row in its tile, ``[n]`` both."""
    tile = tiles + (weight_row // _ROWS).to(tl.int64) * (INPUTS // FORM.unit * FORM.unit_bytes)
    return tile + index * FORM.unit_bytes, weight_row % _ROWS


@triton.jit
def moved(words, right):
    """Words moved right by some bits, or left where they are below zero."""
    return (words << tl.maximum(-right, 0)) >> tl.maximum(right, 0)


@triton.jit
def _turned(words, right):
    """Words rotated right by some bits, or left by bits below zero: one instruction."""
    words = words.to(tl.uint32, bitcast=True)
    return ((words >> (right & 31)) | (words << (-right & 31))).to(tl.int32, bitcast=True)


@triton.jit
def masked(words, mask, power, QUADS: tl.constexpr):
    """The bits of a mask, and those of a power, by an instruction that compilers do not take for two constants."""
    if not PERMUTES:
        return (words & mask) | power
    ASM: tl.constexpr = "v_and_or_b32 $0, $1, $2, $3" if QUADS else "lop3.b32 $0, $1, $2, $3, 0xEA;"
    KINDS: tl.constexpr = "=v,v,s,v" if QUADS else "=r,r,r,r"
    return tl.inline_asm_elementwise(ASM, KINDS, [words, mask, power], dtype=tl.int32, is_pure=True, pack=1)


@triton.jit
def _field(words, right, MASK: tl.constexpr, POWER: tl.constexpr, QUADS: tl.constexpr):
    """Words that are moved, of each half the bits of a mask, and those of a power."""
    words = moved(words, right)
    if POWER == 0:
        return words & (MASK | MASK << 16)
    return masked(words, MASK | MASK << 16, POWER, QUADS)


@triton.jit
def read_codes(
    unit, row, AT: tl.constexpr, FORM: tl.constexpr, PLACE: tl.constexpr, POWER: tl.constexpr, QUADS: tl.constexpr
):
    """Codes of a part, int32 ``[n, part / 16, 2, 4, 1]``: two in a word, 16 bits apart; ``input_order`` says which.

    Args:
        unit: address of the unit of each weight row, ``[n]``.
        row: of each within its tile, ``[n]``.
        AT: the first input of the part, of those of the unit.
        FORM: a part is a block of 32 inputs or a half of it; where codes are places in a table, its entry of 8 bits is
            read instead.
        PLACE: of the lowest bit of a code in its half of a word.
        POWER: bits of the words besides the codes.
        QUADS: a thread of a matrix instruction has four places that follow each other, as on ROCm, and not two; then
            the codes of a word follow each other, ``[n, part / 16, 4, 2, 1]``.
    """
    PART: tl.constexpr = FORM.part
    BITS: tl.constexpr = FORM.bits
    words = (unit + FORM.head + (AT // 32 * (64 * BITS)) + 4 * row)[:, None, None, None, None]
    half = (AT // 16 % 2 + tl.arange(0, PART // 16))[None, :, None, None, None]
    pair = 8 * (tl.arange(0, 2)[None, None, None, :, None] if QUADS else tl.arange(0, 2)[None, None, :, None, None])
    group = tl.arange(0, 4)[None, None, :, None, None] if QUADS else tl.arange(0, 4)[None, None, None, :, None]
    LOW: tl.constexpr = 0 if FORM.table else PLACE
    PAIRS: tl.constexpr = BITS & 4
    SINGLE: tl.constexpr = PAIRS + (BITS & 2)
    # Addresses with the groups' axis are loaded by the threads whose matrix instructions take the codes. The others,
    # of 32 inputs, the compiler moves with fewer instructions.
    of_two = 0 * group if PART == 16 else 0
    of_single = 0 * group if PART == 16 or PAIRS else 0
    if BITS == 8:
        eight = load_numbers(words + 64 * (4 * half + group), tl.int32)
        found = _field(eight, pair - LOW, 255 << LOW, POWER, QUADS)
    if PAIRS:
        four = load_numbers(words + 64 * group, tl.int32)
        found = _field(four, pair + 4 * half - LOW, 15 << LOW, POWER, QUADS)
    if BITS & 2:
        two = load_numbers(words + (PAIRS * _PLANE + 64 * half) + of_two, tl.int32) >> (2 * group)
        two = _field(two, pair - (LOW + PAIRS), 3 << (LOW + PAIRS), 0 if PAIRS else POWER, QUADS)
        found = (found | two) if PAIRS else two
    if BITS & 1:
        HIGH: tl.constexpr = LOW + BITS - 1
        single = _turned(load_numbers(words + SINGLE * _PLANE + of_single, tl.int32), group - HIGH)
        found = found | (_turned(single, 4 * half + pair) & (0x10001 << HIGH))
    if FORM.table:
        found = (look_up(found & 15) | look_up(found >> 16) << 16) << PLACE
    return found


@triton.jit
def _halves(words, PART: tl.constexpr):
    """The halves of words of ``read_codes``, ``[n, PART]``; their upper bits are any."""
    halves = words >> (16 * tl.arange(0, 2)[None, None, None, None, :])
    return tl.reshape(halves, (halves.shape[0], PART))


@triton.jit
def read_part(unit, row, zeros, AT: tl.constexpr, FORM: tl.constexpr):
    """What a part of a unit stands for before it is scaled, float32 ``[n, part]``; see ``read_codes``.

    ``zeros`` are those of ``read_zeros``, and ``offset`` is the code that stands for zero. Codes become floats without
    a conversion, which is slow.
    """
    PART: tl.constexpr = FORM.part
    if FORM.kind == "real":
        SIZE: tl.constexpr = FORM.numbers.primitive_bitwidth // 8
        place = SIZE * _ROWS * (AT + tl.arange(0, PART))
        numbers = load_numbers((unit + SIZE * row)[:, None] + place[None, :], FORM.numbers).to(tl.float32)
    else:
        codes = _halves(read_codes(unit, row, AT, FORM, 0, 0, False), PART) & 0xFFFF
        numbers = (codes | _MAGIC).to(tl.float32, bitcast=True) - (8388608.0 + FORM.offset + zeros[:, None])
    return numbers


@triton.jit
def add_products(unit, row, entries, sums, AT: tl.constexpr, FORM: tl.constexpr, QUADS: tl.constexpr):
    """``sums`` and the product of entries of 16 bits, ``[part, rows]``, with the codes of a part; see ``read_codes``.

    2 to the number of bits is added to every code. In bfloat16, which has one bit too few for codes of eight, these
    are two numbers: one of the low seven bits, one of the highest.
    """
    BITS: tl.constexpr = FORM.bits
    TYPE: tl.constexpr = entries.dtype
    IS_SHORT: tl.constexpr = TYPE.is_bf16()
    FRACTION: tl.constexpr = 7 if IS_SHORT else 10
    EXPONENT: tl.constexpr = (127 + min(BITS, 7) if IS_SHORT else 15 + BITS) << FRACTION
    POWER: tl.constexpr = EXPONENT | EXPONENT << 16
    if BITS <= FRACTION:
        words = read_codes(unit, row, AT, FORM, FRACTION - BITS, POWER, QUADS)
        return add_numbers(words, entries, sums, FORM.part)
    words = read_codes(unit, row, AT, FORM, 0, 0, QUADS)
    sums = add_numbers(masked(words, 0x00800080, POWER, QUADS), entries, sums, FORM.part)
    return add_numbers(masked(words, 0x007F007F, POWER, QUADS), entries, sums, FORM.part)


@triton.jit
def add_table_products(codes, row, entries, sums, AT: tl.constexpr, QUADS: tl.constexpr):
    """The same for a block of codes of four bits that stand for the values of a table; nothing is added to these."""
    IS_SHORT: tl.constexpr = entries.dtype.is_bf16()
    two, four, places = tl.arange(0, 2), tl.arange(0, 4), (codes + (AT * 8) + 4 * row)[:, None, None, None, None]
    half = two[None, :, None, None, None]
    if QUADS:
        words = load_numbers(places + 64 * four[None, None, :, None, None], tl.int32)
        return add_numbers(number_pairs(words, two[None, None, None, :, None], half, IS_SHORT), entries, sums, 32)
    words = load_numbers(places + 64 * four[None, None, None, :, None], tl.int32)
    positive, negative = signed_parts(words, two[None, None, :, None, None], half, IS_SHORT)
    return add_numbers(negative, entries, add_numbers(positive, entries, sums, 32), 32)


@triton.jit
def add_numbers(words, entries, sums, PART: tl.constexpr):
    """``sums`` and the product of entries with numbers of their type, two in a word."""
    return dot(_halves(words, PART).to(tl.int16).to(entries.dtype, bitcast=True), entries, sums)


@triton.jit
def _scaled(number, integers):
    """A number of 16 bits times integers, which may be negative, rounded once, in one multiply-add."""
    return tl.fma(number, (integers + _SIGNED_MAGIC).to(tl.float32, bitcast=True), -12582912.0 * number)


@triton.jit
def read_zeros(unit, row, FORM: tl.constexpr):
    """The zero points of a unit of a grid, less the offset, float32 ``[n]``; zeros for what is no grid."""
    if FORM.kind != "grid":
        return tl.zeros(row.shape, tl.float32)
    return load_numbers(unit + 64 + row, tl.int8).to(tl.float32)


@triton.jit
def _six_bits(unit, row, INDEX: tl.constexpr, MINIMUM: tl.constexpr):
    """One of the integers of six bits of Q4_K and Q5_K, int32 ``[n]``."""
    PLACE: tl.constexpr = INDEX % 4
    own = load_numbers(unit + (64 + 64 * MINIMUM + 16 * PLACE) + row, tl.uint8).to(tl.int32)
    if INDEX < 4:
        return own & 63
    both = load_numbers(unit + (192 + 16 * PLACE) + row, tl.uint8).to(tl.int32)
    return ((both >> (4 * MINIMUM)) & 15) | ((own >> 2) & 48)


@triton.jit
def _read_fours(unit, row, INDEX: tl.constexpr):
    """The integers of four bits of Q2_K, int32 ``[n]``: that of the scale and, above it, that of the minimum."""
    return load_numbers(unit + (64 + 16 * INDEX) + row, tl.uint8).to(tl.int32)


@triton.jit
def read_numbers(unit, row, FORM: tl.constexpr):
    """What the integers of the scales and those of the minima are multiplied with, float32 ``[n]`` both."""
    number = load_numbers(unit + 2 * row, tl.float16).to(tl.float32)
    if FORM.kind == "four":
        return number, load_numbers(unit + 32 + 2 * row, tl.float16).to(tl.float32)
    return number, 0 * number


@triton.jit
def read_scales(unit, row, INDEX: tl.constexpr, FORM: tl.constexpr):
    """The scales of some inputs of a unit, float32 ``[n]``; ``unit`` has the address of each row's unit."""
    if FORM.kind == "grid":
        return load_numbers(unit + 4 * row, tl.float32)
    if FORM.kind == "symmetric":
        return load_numbers(unit + 2 * row, tl.bfloat16).to(tl.float32)
    number = load_numbers(unit + 2 * row, tl.float16).to(tl.float32)
    if FORM.kind == "six":
        return _scaled(number, _six_bits(unit, row, INDEX, 0))
    if FORM.kind == "eight":
        signed = load_numbers(unit + (32 + 16 * INDEX) + row, tl.int8).to(tl.int32)
        return _scaled(number, signed)
    if FORM.kind == "four":
        return _scaled(number, _read_fours(unit, row, INDEX) & 15)
    return number


@triton.jit
def read_minima(unit, row, INDEX: tl.constexpr, FORM: tl.constexpr):
    """What is subtracted from the scaled codes of some inputs, float32 ``[n]``."""
    other = load_numbers(unit + 32 + 2 * row, tl.float16).to(tl.float32)
    if FORM.kind == "six":
        return _scaled(other, _six_bits(unit, row, INDEX, 1))
    if FORM.kind == "four":
        return _scaled(other, _read_fours(unit, row, INDEX) >> 4)
    return -other
