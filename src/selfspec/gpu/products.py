"""Products of a few rows by weights, with one order of sums for any number of rows.

A program computes up to 16 rows of some outputs. Fewer rows leave places of its matrix instructions empty, which costs
little where memory is the limit, and so the same program, with the same sums in the same order, runs for any number
of rows: a row of a verification is bit for bit that of a single step. How the inputs are divided among programs, whose
sums are added one after the other, follows from the shape of the weights alone.

Sums are float32. Weights of few bits enter as the integers that they are, which every dtype holds exactly; a group's
sum is scaled, not its weights.
"""

import torch
import triton
import triton.language as tl

from selfspec.gpu.blocks import (
    HALF,
    dot,
    input_order,
    read_codes,
    read_floats,
    read_minima,
    read_scales,
    read_zeros,
    to_numbers,
)

ROWS = 16
"""Rows of a program."""

OUTPUTS, WARPS = 32, 2
"""Outputs of a program, 16 for each warp: a matrix instruction has 16 of them and 8 rows."""

STAGES = 3
"""Steps whose loads are under way at a time."""

_PROGRAMS = 1024
"""How many programs the largest devices take at a time; the inputs are divided until there are as many."""

_FEWEST_INPUTS = 512
"""Inputs of a program, at least, where they are divided."""

_ROW_COUNT: tl.constexpr = tl.constexpr(ROWS)


def divisions(outputs: int, inputs: int) -> int:
    """How many programs share the inputs of the same outputs: a power of two that follows from the shape."""
    programs, count = -(-outputs // OUTPUTS), 1
    while programs * count < _PROGRAMS and inputs // (2 * count) >= _FEWEST_INPUTS:
        count *= 2
    return count


def step_of(dtype: torch.dtype) -> int:
    """Inputs of dense weights that a program reads at a time: 128 bytes of each weight row."""
    return 128 // dtype.itemsize


@triton.jit
def _store(sums, out, bias, row, column, rows, outputs, stride, SPLITS: tl.constexpr, HAS_BIAS: tl.constexpr):
    """Stores the sums of a program, ``[outputs, 16]``: those of all inputs with the bias, or those of its share."""
    kept = (row < rows)[None, :] & (column < outputs)[:, None]
    if SPLITS > 1:
        own = out + (tl.program_id(2) * rows + row)[None, :] * outputs + column[:, None]
        tl.store(own, sums, mask=kept)
    else:
        if HAS_BIAS:
            sums += tl.load(bias + column, mask=column < outputs, other=0).to(tl.float32)[:, None]
        own = out + row[None, :] * stride + column[:, None]
        tl.store(own, sums.to(out.dtype.element_ty), mask=kept)


@triton.jit(do_not_specialize=["rows"])
def dense_product(
    x,
    weights,
    bias,
    out,
    rows,
    outputs,
    stride,
    INPUTS: tl.constexpr,
    SHARE: tl.constexpr,
    SPLITS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    STEP: tl.constexpr,
):
    """Rows ``x`` ``[rows, inputs]`` times weights ``[outputs, inputs]``, to ``out`` ``[rows, outputs]``.

    Programs have 16 rows, ``OUTPUTS`` outputs, and of the inputs a share of ``SHARE``, of which they read ``STEP`` at a
    time. With several shares ``out`` is float32 ``[SPLITS, rows, outputs]``, else its rows are ``stride`` apart.
    """
    row = tl.program_id(1) * _ROW_COUNT + tl.arange(0, _ROW_COUNT)
    column = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    first = tl.program_id(2) * SHARE
    of_row, of_column = (row < rows)[None, :], (column < outputs)[:, None]
    own_rows, own_weights = x + row[None, :] * INPUTS, weights + column[:, None].to(tl.int64) * INPUTS
    sums = tl.zeros((OUTPUTS, _ROW_COUNT), tl.float32)
    for start in range(0, SHARE, STEP):
        place = first + start + tl.arange(0, STEP)
        inside = place < INPUTS
        entries = tl.load(own_rows + place[:, None], mask=of_row & inside[:, None], other=0)
        numbers = tl.load(own_weights + place[None, :], mask=of_column & inside[None, :], other=0)
        sums = dot(numbers, entries, sums)
    _store(sums, out, bias, row, column, rows, outputs, stride, SPLITS, HAS_BIAS)


@triton.jit
def _read_half(
    unit,
    place,
    kept,
    zeros,
    INDEX: tl.constexpr,
    KIND: tl.constexpr,
    BITS: tl.constexpr,
    OFFSET: tl.constexpr,
    HEAD: tl.constexpr,
    TABLE: tl.constexpr,
    TYPE: tl.constexpr,
):
    """What 16 inputs of a unit are multiplied with before they are scaled, float32 ``[n, 16]``; see ``read_codes``."""
    block = unit + (HEAD + INDEX // 2 * (64 * BITS))
    if KIND == "real":
        numbers = read_floats(block, place, kept, INDEX % 2, TYPE)
    else:
        numbers = to_numbers(read_codes(block, place, kept, INDEX % 2, BITS), OFFSET, TABLE)
        if KIND == "grid":
            numbers -= zeros[:, None]
    return numbers


@triton.jit(do_not_specialize=["rows"])
def low_bit_product(
    x,
    tiles,
    bias,
    out,
    rows,
    outputs,
    stride,
    INPUTS: tl.constexpr,
    SHARE: tl.constexpr,
    SPLITS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    KIND: tl.constexpr,
    BITS: tl.constexpr,
    UNIT: tl.constexpr,
    SCALED: tl.constexpr,
    OFFSET: tl.constexpr,
    HEAD: tl.constexpr,
    TABLE: tl.constexpr,
    TYPE: tl.constexpr,
):
    """The same for tiles of weights of few bits; see ``blocks.TileForm``. ``SHARE`` counts units."""
    UNIT_BYTES: tl.constexpr = HEAD + UNIT * BITS * 2
    UNITS: tl.constexpr = INPUTS // UNIT
    MINIMA: tl.constexpr = KIND == "shifted" or KIND == "six" or KIND == "four"
    row = tl.program_id(1) * _ROW_COUNT + tl.arange(0, _ROW_COUNT)
    column = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    place, kept = column % 16, column < outputs
    tile = tiles + (column // 16).to(tl.int64) * (UNITS * UNIT_BYTES)
    first = tl.program_id(2) * SHARE
    own_rows = x + row[None, :] * INPUTS + input_order(KIND)[:, None]
    of_row = (row < rows)[None, :]
    sums = tl.zeros((OUTPUTS, _ROW_COUNT), tl.float32)
    for index in range(first, tl.minimum(first + SHARE, UNITS)):
        unit = tile + index * UNIT_BYTES
        zeros = read_zeros(unit, place, kept, KIND)
        for group in tl.static_range(UNIT // SCALED):
            own, ones_sums = tl.zeros((OUTPUTS, _ROW_COUNT), tl.float32), tl.zeros((OUTPUTS, _ROW_COUNT), tl.float32)
            for part in tl.static_range(SCALED // HALF):
                entries = tl.load(own_rows + (index * UNIT + group * SCALED + part * HALF), mask=of_row, other=0)
                if KIND == "real":
                    entries = entries.to(tl.float32)
                numbers = _read_half(
                    unit, place, kept, zeros, group * (SCALED // HALF) + part, KIND, BITS, OFFSET, HEAD, TABLE, TYPE
                )
                own = dot(numbers.to(entries.dtype), entries, own)
                if MINIMA:
                    ones_sums = dot(tl.full((OUTPUTS, HALF), 1.0, entries.dtype), entries, ones_sums)
            if KIND == "real":
                sums += own
            else:
                sums += own * read_scales(unit, place, kept, group, KIND)[:, None]
            if MINIMA:
                sums -= ones_sums * read_minima(unit, place, kept, group, KIND)[:, None]
    _store(sums, out, bias, row, column, rows, outputs, stride, SPLITS, HAS_BIAS)


@triton.jit(do_not_specialize=["rows"])
def add_shares(
    shares,
    bias,
    out,
    rows,
    outputs,
    stride,
    SPLITS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    OUTPUTS: tl.constexpr,
):
    """Adds the sums of the shares of the inputs, ``[SPLITS, rows, outputs]``, one after the other."""
    row, column = tl.program_id(1), tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    kept = column < outputs
    sums = tl.load(shares + row * outputs + column, mask=kept, other=0)
    for split in tl.static_range(1, SPLITS):
        sums += tl.load(shares + (split * rows + row) * outputs + column, mask=kept, other=0)
    if HAS_BIAS:
        sums += tl.load(bias + column, mask=kept, other=0).to(tl.float32)
    tl.store(out + row * stride + column, sums.to(out.dtype.element_ty), mask=kept)


@triton.jit
def unpack_rows(
    tiles,
    chosen,
    out,
    count,
    INPUTS: tl.constexpr,
    KIND: tl.constexpr,
    BITS: tl.constexpr,
    UNIT: tl.constexpr,
    SCALED: tl.constexpr,
    OFFSET: tl.constexpr,
    HEAD: tl.constexpr,
    TABLE: tl.constexpr,
    TYPE: tl.constexpr,
):
    """The values of ``count`` weight rows, ``[count, inputs]``, of which a program has 16 and a unit of inputs."""
    UNIT_BYTES: tl.constexpr = HEAD + UNIT * BITS * 2
    MINIMA: tl.constexpr = KIND == "shifted" or KIND == "six" or KIND == "four"
    at, index = tl.program_id(0) * 16 + tl.arange(0, 16), tl.program_id(1)
    kept = at < count
    weight_row = tl.load(chosen + at, mask=kept, other=0)
    place = weight_row % 16
    unit = tiles + weight_row // 16 * (INPUTS // UNIT * UNIT_BYTES) + index * UNIT_BYTES
    zeros = read_zeros(unit, place, kept, KIND)
    own = out + at[:, None].to(tl.int64) * INPUTS + input_order(KIND)[None, :] + index * UNIT
    for half in tl.static_range(UNIT // HALF):
        values = _read_half(unit, place, kept, zeros, half, KIND, BITS, OFFSET, HEAD, TABLE, TYPE)
        if KIND != "real":
            values *= read_scales(unit, place, kept, half * HALF // SCALED, KIND)[:, None]
            if MINIMA:
                values -= read_minima(unit, place, kept, half * HALF // SCALED, KIND)[:, None]
        tl.store(own + half * HALF, values.to(out.dtype.element_ty), mask=kept[:, None])
