"""Products of a few rows by weights, with one order of sums for any number of rows.

A program computes 8 rows of some outputs, or 16, as many as a matrix instruction of the device has, or twice or four
times as many. Fewer rows leave places of it empty, which costs little where memory is the limit. Its sums are those of
its instructions, in the same order for any number of rows: a row of a verification is bit for bit that of a single
step. How the inputs are divided among programs, whose sums are added one after the other, follows from the shape of the
weights alone.

Sums are float32. Weights of few bits enter as integers, which every dtype holds exactly; a group's sum is scaled, not
its weights, and what stands for zero is subtracted from it, times the sum of the entries.
"""

from dataclasses import dataclass
from math import gcd

import triton
import triton.language as tl

from selfspec.gpu.blocks import dot, input_order, read_minima, read_part, read_scales, read_zeros, unit_addresses
from selfspec.gpu.spans import SPAN
from selfspec.gpu.units import add_codes, add_exact, add_grid_spans, add_scaled_spans

OUTPUTS, WARPS = 16, 1
"""Outputs of a program, those of a matrix instruction, and its warps."""

ADDED = 256
"""Outputs of a program that adds shares."""

STAGES = 3
"""Steps whose loads are under way at a time."""

_STEP_BYTES = 256
"""Bytes of a weight row that a program reads in a step."""

LOW_BIT_OUTPUTS = {False: 16, True: 64}
"""``OUTPUTS`` for weights of few bits; on ROCm (true) more outputs share the work for the entries."""

LOW_BIT_STAGES = 1
"""``STAGES`` for them: a second step costs moves between registers; other warps fill the time of loads."""

_PROGRAMS, _LOW_BIT_PROGRAMS = 1024, 4096
"""The inputs are divided until there are as many programs; codes of few bits keep a program busy for longer."""

_FEWEST_INPUTS = 512
"""Inputs of a program, at least, where they are divided."""


def divisions(outputs: int, inputs: int, together: int = OUTPUTS) -> int:
    """How many programs of some outputs ``together`` share the inputs: a power of two that follows from the shape."""
    programs, count = -(-outputs // together), 1
    while programs * count < _PROGRAMS and inputs // (2 * count) >= _FEWEST_INPUTS:
        count *= 2
    return count


def low_bit_divisions(outputs: int, inputs: int, together: int) -> int:
    """The same for weights of few bits: more programs, as long as each has inputs enough."""
    programs, count = -(-outputs // together), divisions(outputs, inputs, together)
    while programs * count < _LOW_BIT_PROGRAMS and inputs // (2 * count) >= 2 * _FEWEST_INPUTS:
        count *= 2
    return count


@dataclass(frozen=True)
class Shares:
    """How a product is divided among programs: a constant of the kernels.

    Attributes:
        inputs: of the weights.
        share: those of a program, in units where weights are in tiles.
        splits: shares that there are.
        step: what a program reads at a time, in the same count.
        outputs: of a program.
        rows: of a program.
        quads: how its matrix instructions are laid out (``blocks.read_codes``).
    """

    inputs: int
    share: int
    splits: int
    step: int
    outputs: int
    rows: int
    quads: bool = False


def shares(outputs: int, inputs: int, unit: int, rows: int, quads: bool) -> Shares:
    """How outputs and units of inputs of tiles are divided.

    A program reads the units of up to 256 inputs at a time, as many as divide its share. ``rows`` are those of it.
    """
    units, of_program = inputs // unit, LOW_BIT_OUTPUTS[quads]
    share = -(-units // min(low_bit_divisions(outputs, inputs, of_program), units))
    together = gcd(max(1, 256 // unit), units, share)
    return Shares(inputs, share, -(-units // share), together, of_program, rows, quads)


def dense_shares(outputs: int, inputs: int, size: int, rows: int) -> Shares:
    """The same for dense weights of ``size`` bytes."""
    splits, step = divisions(outputs, inputs), _STEP_BYTES // size
    return Shares(inputs, step * -(-inputs // (step * splits)), splits, step, OUTPUTS, rows)


@triton.jit
def _store(sums, out, bias, row, column, rows, outputs, stride, SPLITS: tl.constexpr, HAS_BIAS: tl.constexpr):
    """Stores the sums of a program, ``[outputs, rows]``: those of all inputs with the bias, or those of its share."""
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
def dense_product(x, weights, bias, out, rows, outputs, stride, SHARES: tl.constexpr, HAS_BIAS: tl.constexpr):
    """Rows ``x`` ``[rows, inputs]`` times weights ``[outputs, inputs]``, to ``out`` ``[rows, outputs]``.

    With several shares ``out`` is float32 ``[splits, rows, outputs]``, else its rows are ``stride`` apart.
    """
    row = tl.program_id(1) * SHARES.rows + tl.arange(0, SHARES.rows)
    column = tl.program_id(0) * SHARES.outputs + tl.arange(0, SHARES.outputs)
    first = tl.program_id(2) * SHARES.share
    of_row, of_column = (row < rows)[None, :], (column < outputs)[:, None]
    own_rows, own_weights = x + row[None, :] * SHARES.inputs, weights + column[:, None].to(tl.int64) * SHARES.inputs
    sums = tl.zeros((SHARES.outputs, SHARES.rows), tl.float32)
    for start in range(0, SHARES.share, SHARES.step):
        place = first + start + tl.arange(0, SHARES.step)
        inside = place < SHARES.inputs
        entries = tl.load(own_rows + place[:, None], mask=of_row & inside[:, None], other=0)
        numbers = tl.load(own_weights + place[None, :], mask=of_column & inside[None, :], other=0)
        sums = dot(numbers, entries, sums)
    _store(sums, out, bias, row, column, rows, outputs, stride, SHARES.splits, HAS_BIAS)


@triton.jit(do_not_specialize=["rows"])
def low_bit_product(
    x, tiles, bias, out, rows, outputs, stride, SHARES: tl.constexpr, FORM: tl.constexpr, HAS_BIAS: tl.constexpr
):
    """The same for tiles of weights of few bits; see ``blocks.TileForm``.

    Places without a row compute the last row again.
    """
    STEP: tl.constexpr = SHARES.step
    EXACT: tl.constexpr = FORM.kind == "real" or x.dtype.element_ty.is_fp32()
    SPANS: tl.constexpr = FORM.bits < 4 and FORM.unit >= SPAN and not EXACT
    row = tl.program_id(1) * SHARES.rows + tl.arange(0, SHARES.rows)
    column = tl.program_id(0) * SHARES.outputs + tl.arange(0, SHARES.outputs)
    first = tl.program_id(2) * SHARES.share
    entry = tl.arange(0, SPAN if SPANS else FORM.part)
    rows_of_x = x + tl.minimum(row, rows - 1)[:, None] * SHARES.inputs + entry[None, :]
    weight_row = column
    if SHARES.outputs > 16:  # tiles of 16 rows are whole
        weight_row = tl.minimum(column, (outputs + 15) // 16 * 16 - 1)
    sums = tl.zeros((SHARES.outputs, SHARES.rows), tl.float32)
    for start in range(first, tl.minimum(first + SHARES.share, SHARES.inputs // FORM.unit), STEP):
        for one in tl.static_range(STEP):
            unit, place = unit_addresses(tiles, weight_row, start + one, SHARES.inputs, FORM)
            own = rows_of_x + (start + one) * FORM.unit
            if EXACT:
                sums = add_exact(unit, place, own, sums, FORM)
            elif SPANS and FORM.kind == "grid":
                sums = add_grid_spans(unit, place, own, sums, FORM, SHARES.quads)
            elif SPANS:
                sums = add_scaled_spans(unit, place, own, sums, FORM, SHARES.quads)
            else:
                sums = add_codes(unit, place, own, sums, FORM, SHARES.quads)
    _store(sums, out, bias, row, column, rows, outputs, stride, SHARES.splits, HAS_BIAS)


@triton.jit(do_not_specialize=["rows"])
def add_shares(
    shares, bias, out, rows, outputs, stride, SPLITS: tl.constexpr, HAS_BIAS: tl.constexpr, OUTPUTS: tl.constexpr
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
def unpack_rows(tiles, chosen, out, count, INPUTS: tl.constexpr, FORM: tl.constexpr):
    """The values of ``count`` weight rows, ``[count, inputs]``, of which a program has 16 and a unit of inputs."""
    at, index = tl.program_id(0) * 16 + tl.arange(0, 16), tl.program_id(1)
    kept = at < count
    weight_row = tl.load(chosen + at, mask=kept, other=0)
    unit, place = unit_addresses(tiles, weight_row, index, INPUTS, FORM)
    zeros = read_zeros(unit, place, FORM)
    own = out + at[:, None].to(tl.int64) * INPUTS + input_order(FORM)[None, :] + index * FORM.unit
    for part in tl.static_range(FORM.unit // FORM.part):
        values = read_part(unit, place, zeros, part * FORM.part, FORM)
        if FORM.kind != "real":
            values *= read_scales(unit, place, part * FORM.part // FORM.scaled, FORM)[:, None]
            if FORM.has_minima:
                values -= read_minima(unit, place, part * FORM.part // FORM.scaled, FORM)[:, None]
        tl.store(own + part * FORM.part, values.to(out.dtype.element_ty), mask=kept[:, None])
