"""Weights of few bits as Triton kernels read them: the very tiles that the kernels of the CPU read.

A tile has 16 weight rows side by side; ``formats.h`` and ``codes.h`` describe it. Its words of four bytes have the
codes of four inputs of a weight row, and those of 16 rows follow each other, so that neighbouring threads read
neighbouring words, whatever the number of bits. Codes are read by halves of a block, 16 inputs, in the order in which
a matrix instruction wants them: a thread then uses all four bytes of a word.
"""

import os
from dataclasses import dataclass
from typing import Any

import triton
import triton.language as tl

from selfspec.runtimes.formats import BLOCK, GGUF_FORMATS, TILE, PackedFormat

HALF: tl.constexpr = tl.constexpr(16)
"""Inputs that are read together."""

IS_INTERPRETED: tl.constexpr = tl.constexpr(os.environ.get("TRITON_INTERPRET", "0") == "1")
"""Whether kernels run in Triton's interpreter, on tensors of the CPU."""

_ROWS: tl.constexpr = tl.constexpr(TILE)
_PLANE: tl.constexpr = tl.constexpr(TILE * BLOCK // 8)
"""Bytes of one bit of all codes of a block."""

_MAGIC: tl.constexpr = tl.constexpr(0x4B000000)
"""The bits of 2 to the 23rd as a float: an integer below that, put into them, is added to it."""


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
assert _GGUF.keys() == GGUF_FORMATS.keys()


def tile_form(form: PackedFormat) -> TileForm:
    """How the tiles of a format are read."""
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
def input_order(KIND: tl.constexpr):
    """The input of a half that each of its 16 places has."""
    place = tl.arange(0, HALF)
    if KIND == "real":
        return place
    return 4 * (place // 2 % 4) + 2 * (place // 8) + place % 2


@triton.jit
def _load(pointers, TYPE: tl.constexpr, kept):
    """Loads numbers of a type from addresses of bytes, those of rows that are ``kept``."""
    return tl.load(pointers.to(tl.pointer_type(TYPE)), mask=kept, other=0)


@triton.jit
def read_codes(block, row, kept, HALF_OF_BLOCK: tl.constexpr, BITS: tl.constexpr):
    """The codes of half a block, int32 ``[n, 16]``, by ``input_order``.

    Args:
        block: address of the block in the tile of each weight row, ``[n]``.
        row: of each within its tile, ``[n]``.
        kept: whether there is such a row, ``[n]``.
        HALF_OF_BLOCK: 0 or 1.
        BITS: of a code.
    """
    words = (block + 4 * row)[:, None, None, None]
    kept = kept[:, None, None, None]
    group = tl.arange(0, 4)[None, None, :, None]
    pair = tl.arange(0, 2)
    byte = (16 * pair)[None, :, None, None] + (8 * pair)[None, None, None, :]
    if BITS == 8:
        codes = (_load(words + 4 * HALF * (4 * HALF_OF_BLOCK + group), tl.int32, kept) >> byte) & 255
    else:
        PAIRS: tl.constexpr = BITS & 4
        SINGLE: tl.constexpr = PAIRS + (BITS & 2)
        if PAIRS:
            codes = (_load(words + 64 * group, tl.int32, kept) >> (byte + 4 * HALF_OF_BLOCK)) & 15
        if BITS & 2:
            two = _load(words + (PAIRS * _PLANE + 64 * HALF_OF_BLOCK), tl.int32, kept)
            two = ((two >> (byte + 2 * group)) & 3) << PAIRS
            codes = (codes | two) if PAIRS else two
        if BITS & 1:
            one = _load(words + SINGLE * _PLANE, tl.int32, kept)
            codes = codes | (((one >> (byte + 4 * HALF_OF_BLOCK + group)) & 1) << (BITS - 1))
    return tl.reshape(codes, (codes.shape[0], HALF))


@triton.jit
def _as_float(integers, OFFSET: tl.constexpr):
    """Integers from 0 to 2 to the 23rd, less an offset, as floats: exact, and without a conversion, which is slow."""
    return (integers | _MAGIC).to(tl.float32, bitcast=True) - (8388608.0 + OFFSET)


@triton.jit
def _look_up(codes):
    """The values of the table that IQ4_NL and IQ4_XS share: four words of four bytes, to which 128 has been added."""
    low = tl.where(codes < 4, 0x3F2D1801, 0x766A5D4F)
    high = tl.where(codes < 12, _THIRD_WORD, _LAST_WORD)
    return (tl.where(codes < 8, low, high) >> (8 * (codes & 3))) & 255


@triton.jit
def to_numbers(codes, OFFSET: tl.constexpr, TABLE: tl.constexpr):
    """What codes stand for before they are scaled, float32."""
    return _as_float(_look_up(codes) if TABLE else codes, OFFSET)


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
        return number * _as_float(_six_bits(unit, row, kept, INDEX, 0), 0)
    if KIND == "eight":
        signed = _load(unit + (32 + 16 * INDEX) + row, tl.int8, kept).to(tl.int32)
        return number * _as_float(signed + 128, 128)
    if KIND == "four":
        return number * _as_float(_load(unit + (64 + 16 * INDEX) + row, tl.uint8, kept).to(tl.int32) & 15, 0)
    return number


@triton.jit
def read_minima(unit, row, kept, INDEX: tl.constexpr, KIND: tl.constexpr):
    """What is subtracted from the scaled codes of some inputs, float32 ``[n]``."""
    other = _load(unit + 32 + 2 * row, tl.float16, kept).to(tl.float32)
    if KIND == "six":
        return other * _as_float(_six_bits(unit, row, kept, INDEX, 1), 0)
    if KIND == "four":
        return other * _as_float(_load(unit + (64 + 16 * INDEX) + row, tl.uint8, kept).to(tl.int32) >> 4, 0)
    return -other


@triton.jit
def read_floats(block, row, kept, HALF_OF_BLOCK: tl.constexpr, TYPE: tl.constexpr):
    """Half a block of floats, float32 ``[n, 16]``."""
    SIZE: tl.constexpr = TYPE.primitive_bitwidth // 8
    place = SIZE * _ROWS * (HALF * HALF_OF_BLOCK + tl.arange(0, HALF))
    return _load((block + SIZE * row)[:, None] + place[None, :], TYPE, kept[:, None]).to(tl.float32)
