"""Weights of few bits as Triton kernels read them: the very tiles that the kernels of the CPU read.

A tile has 16 weight rows side by side; ``formats.h`` and ``codes.h`` describe it. Its words of four bytes have the
codes of four inputs of a weight row, and those of 16 rows follow each other, so that neighbouring threads read
neighbouring words, whatever the number of bits. Codes are read by blocks, or by halves of them, in an order of inputs
in which a matrix instruction wants all four bytes of a word from one thread.
"""

import os
from dataclasses import dataclass
from typing import Any

import triton
import triton.language as tl

from selfspec.errors import UnsupportedModelError
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

_THIRD_WORD: tl.constexpr = tl.constexpr(0xA6998D81 - (1 << 32))
_LAST_WORD: tl.constexpr = tl.constexpr(0xF1D9C5B5 - (1 << 32))
"""The last eight bytes of the table of IQ4_NL and IQ4_XS."""


@dataclass(frozen=True)
class TileForm:
    """How the tiles of a format are read.

    Attributes:
        kind: of the scales, a class of ``formats.h``: ``symmetric``, ``scaled``, ``shifted``, ``grid``, ``six``,
            ``eight``, ``four``; or ``real`` for floats, which have none.
        bits: of a code, or of a float.
        unit: inputs of a unit.
        scaled: inputs that share a scale.
        offset: the code that stands for zero.
        head: bytes of the scales of a unit of a tile.
        table: codes are places in a table.
    """

    kind: str
    bits: int
    unit: int
    scaled: int
    offset: int
    head: int
    table: bool = False

    @property
    def part(self) -> int:
        """Inputs that are read together: those of a block, or of a half where that has a scale of its own."""
        return min(BLOCK, self.scaled)

    @property
    def unit_bytes(self) -> int:
        """Bytes of a unit of a tile."""
        return self.head + TILE * self.unit * self.bits // 8

    @property
    def constants(self) -> dict[str, Any]:
        """What kernels take as ``tl.constexpr``."""
        return {
            "KIND": self.kind,
            "BITS": self.bits,
            "UNIT": self.unit,
            "SCALED": self.scaled,
            "PART": self.part,
            "OFFSET": self.offset,
            "HEAD": self.head,
            "TABLE": self.table,
        }


_GGUF = {
    **{name: TileForm("scaled", bits, 32, 32, 1 << (bits - 1), 32) for name, bits in (("Q4_0", 4), ("Q5_0", 5))},
    **{name: TileForm("shifted", bits, 32, 32, 0, 64) for name, bits in (("Q4_1", 4), ("Q5_1", 5))},
    "Q8_0": TileForm("scaled", 8, 32, 32, 128, 32),
    "Q2_K": TileForm("four", 2, 256, 16, 0, 20 * TILE),
    "Q3_K": TileForm("eight", 3, 256, 16, 4, 18 * TILE),
    "Q4_K": TileForm("six", 4, 256, 32, 0, 16 * TILE),
    "Q5_K": TileForm("six", 5, 256, 32, 0, 16 * TILE),
    "Q6_K": TileForm("eight", 6, 256, 16, 32, 18 * TILE),
    "IQ4_NL": TileForm("scaled", 4, 32, 32, 128, 32, table=True),
    "IQ4_XS": TileForm("eight", 4, 256, 32, 128, 10 * TILE, table=True),
    **{name: TileForm("real", bits, 32, 32, 0, 0) for name, bits in (("F16", 16), ("BF16", 16), ("F32", 32))},
}
WITHOUT_KERNEL = frozenset({"MXFP4"})
assert _GGUF.keys() == GGUF_FORMATS.keys() - WITHOUT_KERNEL


def tile_form(form: PackedFormat) -> TileForm:
    """How the tiles of a format are read. Raises ``UnsupportedModelError`` where no kernel reads it."""
    if form.name in WITHOUT_KERNEL:
        raise UnsupportedModelError(f"Triton's kernels do not read {form.name}; load the model with unpack")
    if form.name in _GGUF:
        return _GGUF[form.name]
    kind, head = ("grid", 5 * TILE) if form.name else ("symmetric", 2 * TILE)
    return TileForm(kind, form.bits, form.unit, form.unit, 1 << (form.bits - 1), head)


REAL_TYPES = {"F16": tl.float16, "BF16": tl.bfloat16, "F32": tl.float32}
"""The types of floats in tiles."""


@triton.jit
def dot(left, right, sums):
    """``sums`` and the product of matrices of one dtype, in float32.

    Triton's interpreter multiplies the bits of bfloat16 numbers as if they were integers, so it gets them as float32,
    in which their products are the same.
    """
    if IS_INTERPRETED:
        left, right = left.to(tl.float32), right.to(tl.float32)
    return tl.dot(left, right, sums, input_precision="ieee")


@triton.jit
def input_order(PART: tl.constexpr, KIND: tl.constexpr):
    """The input that each place of a part has: 16 inputs, half a block, or 32."""
    place = tl.arange(0, PART)
    if KIND == "real":
        return place
    half, of_half = place // 16, place % 16
    return 16 * half + 4 * (of_half // 2 % 4) + 2 * (of_half // 8) + of_half % 2


@triton.jit
def in_order(entries, PART: tl.constexpr, KIND: tl.constexpr):
    """Entries of rows, ``[rows, PART]``, as what a part is multiplied with, ``[PART, rows]`` by ``input_order``."""
    if KIND == "real":
        return tl.trans(entries)
    ROWS: tl.constexpr = entries.shape[0]
    by_place = tl.permute(tl.reshape(entries, (ROWS, PART // 16, 4, 2, 2)), (1, 3, 2, 4, 0))
    return tl.reshape(by_place, (PART, ROWS))


@triton.jit
def _load(pointers, TYPE: tl.constexpr, kept):
    """Loads numbers of a type from addresses of bytes, those of rows that are ``kept``."""
    return tl.load(pointers.to(tl.pointer_type(TYPE)), mask=kept, other=0)


@triton.jit
def read_numbers(
    block,
    row,
    kept,
    PART: tl.constexpr,
    HALF: tl.constexpr,
    BITS: tl.constexpr,
    OFFSET: tl.constexpr,
    TABLE: tl.constexpr,
):
    """What codes of a block stand for before they are scaled, float32 ``[n, PART]``, by ``input_order``.

    A code stays where it is in its word, at one of the low bits of a float, of which a multiply-add makes the number:
    there is a shift for a word, not for a code.

    Args:
        block: address of the block in the tile of each weight row, ``[n]``.
        row: of each within its tile, ``[n]``.
        kept: whether there is such a row, ``[n]``.
        PART: 32 for the block, 16 for a half of it.
        HALF: which half; 0 for the block.
        BITS: of a code.
        OFFSET: the code that stands for zero.
        TABLE: codes are places in a table.
    """
    words = (block + 4 * row)[:, None, None, None, None]
    kept = kept[:, None, None, None, None]
    half = (HALF + tl.arange(0, PART // 16))[None, :, None, None, None]
    pair = tl.arange(0, 2)[None, None, :, None, None]
    group = tl.arange(0, 4)[None, None, None, :, None]
    one = tl.arange(0, 2)[None, None, None, None, :]
    # The last two bytes of a word are moved by 12 bits, so that all codes are below the 24th bit.
    place = 8 * one + 4 * pair
    if BITS == 8:
        codes = (_load(words + 64 * (4 * half + group), tl.int32, kept) >> (12 * pair)) & (255 << place)
    else:
        PAIRS: tl.constexpr = BITS & 4
        SINGLE: tl.constexpr = PAIRS + (BITS & 2)
        if PAIRS:
            place += 4 * half
            codes = (_load(words + 64 * group, tl.int32, kept) >> (12 * pair)) & (15 << place)
        if BITS & 2:
            two = _load(words + (PAIRS * _PLANE + 64 * half), tl.int32, kept) >> (2 * group)
            two = ((two >> (16 * pair + 8 * one)) & 3) << (place + PAIRS)
            codes = (codes | two) if PAIRS else two
        if BITS & 1:
            single = _load(words + SINGLE * _PLANE, tl.int32, kept) >> (4 * half + group)
            codes = codes | (((single >> (16 * pair + 8 * one)) & 1) << (place + (BITS - 1)))
    if TABLE:
        numbers = _as_float(_look_up(codes >> place), OFFSET)
    else:
        unit = ((127 - place) << 23).to(tl.float32, bitcast=True)
        numbers = tl.fma((codes | _MAGIC).to(tl.float32, bitcast=True), unit, -8388608.0 * unit - OFFSET)
    return tl.reshape(numbers, (numbers.shape[0], PART))


@triton.jit
def _as_float(integers, OFFSET: tl.constexpr):
    """Integers from 0 to 2 to the 23rd, less an offset, as floats: exact, and without a conversion, which is slow."""
    return (integers | _MAGIC).to(tl.float32, bitcast=True) - (8388608.0 + OFFSET)


@triton.jit
def _scaled(number, integers):
    """A number of 16 bits times integers, which may be negative, rounded once, in one multiply-add."""
    return tl.fma(number, (integers + _SIGNED_MAGIC).to(tl.float32, bitcast=True), -12582912.0 * number)


@triton.jit
def _look_up(codes):
    """The values of the table that IQ4_NL and IQ4_XS share: four words of four bytes, to which 128 has been added."""
    low = tl.where(codes < 4, 0x3F2D1801, 0x766A5D4F)
    high = tl.where(codes < 12, _THIRD_WORD, _LAST_WORD)
    return (tl.where(codes < 8, low, high) >> (8 * (codes & 3))) & 255


@triton.jit
def read_zeros(unit, row, kept, KIND: tl.constexpr):
    """The zero points of a unit of a grid, less the offset, float32 ``[n]``; zeros for what is no grid."""
    if KIND != "grid":
        return row.to(tl.float32) * 0.0
    return _load(unit + 64 + row, tl.int8, kept).to(tl.float32)


@triton.jit
def _six_bits(unit, row, kept, INDEX: tl.constexpr, MINIMUM: tl.constexpr):
    """One of the integers of six bits of Q4_K and Q5_K, int32 ``[n]``."""
    PLACE: tl.constexpr = INDEX % 4
    own = _load(unit + (64 + 64 * MINIMUM + 16 * PLACE) + row, tl.uint8, kept).to(tl.int32)
    if INDEX < 4:
        return own & 63
    both = _load(unit + (192 + 16 * PLACE) + row, tl.uint8, kept).to(tl.int32)
    return ((both >> (4 * MINIMUM)) & 15) | ((own >> 2) & 48)


@triton.jit
def read_scales(unit, row, kept, INDEX: tl.constexpr, KIND: tl.constexpr):
    """The scales of some inputs of a unit, float32 ``[n]``; ``unit`` has the address of each row's unit."""
    if KIND == "grid":
        return _load(unit + 4 * row, tl.float32, kept)
    if KIND == "symmetric":
        return _load(unit + 2 * row, tl.bfloat16, kept).to(tl.float32)
    number = _load(unit + 2 * row, tl.float16, kept).to(tl.float32)
    if KIND == "six":
        return _scaled(number, _six_bits(unit, row, kept, INDEX, 0))
    if KIND == "eight":
        signed = _load(unit + (32 + 16 * INDEX) + row, tl.int8, kept).to(tl.int32)
        return _scaled(number, signed)
    if KIND == "four":
        return _scaled(number, _load(unit + (64 + 16 * INDEX) + row, tl.uint8, kept).to(tl.int32) & 15)
    return number


@triton.jit
def read_minima(unit, row, kept, INDEX: tl.constexpr, KIND: tl.constexpr):
    """What is subtracted from the scaled codes of some inputs, float32 ``[n]``."""
    other = _load(unit + 32 + 2 * row, tl.float16, kept).to(tl.float32)
    if KIND == "six":
        return _scaled(other, _six_bits(unit, row, kept, INDEX, 1))
    if KIND == "four":
        return _scaled(other, _load(unit + (64 + 16 * INDEX) + row, tl.uint8, kept).to(tl.int32) >> 4)
    return -other


@triton.jit
def read_floats(block, row, kept, PART: tl.constexpr, HALF: tl.constexpr, TYPE: tl.constexpr):
    """Floats of a block, or of a half, float32 ``[n, PART]``."""
    SIZE: tl.constexpr = TYPE.primitive_bitwidth // 8
    place = SIZE * _ROWS * (16 * HALF + tl.arange(0, PART))
    return _load((block + SIZE * row)[:, None] + place[None, :], TYPE, kept[:, None]).to(tl.float32)
