"""What a unit of weights of few bits adds to the sums of a product: as floats, by blocks, or by spans.

``unit`` and ``place`` are those of ``blocks.unit_addresses``, ``own_rows`` the addresses of the entries of rows,
``[rows, inputs that are read together]``; the constants are those of ``blocks.TileForm``.
"""

import triton
import triton.language as tl

from selfspec.gpu.blocks import (
    add_products,
    add_table_products,
    dot,
    in_order,
    read_minima,
    read_numbers,
    read_part,
    read_scales,
    read_zeros,
)
from selfspec.gpu.spans import (
    SPAN,
    add_minima_span,
    add_offsets,
    add_scaled_span,
    add_span,
    read_integers,
    scaled_offset,
    span_order,
)


@triton.jit
def add_exact(unit, place, own_rows, sums, FORM: tl.constexpr):
    """``sums`` and the products of a unit as floats: of float32 rows, or of weights that are floats."""
    zeros = read_zeros(unit, place, FORM)
    for group in tl.static_range(FORM.unit // FORM.scaled):
        own = tl.zeros(sums.shape, tl.float32)
        entry_sums = tl.zeros(sums.shape, tl.float32)
        for part in tl.static_range(FORM.scaled // FORM.part):
            at = group * FORM.scaled + part * FORM.part
            entries = in_order(tl.load(own_rows + at), FORM, False)
            numbers = read_part(unit, place, zeros, at, FORM)
            own = dot(numbers, entries.to(tl.float32), own)
            if FORM.has_minima:
                entry_sums = dot(tl.full((sums.shape[0], FORM.part), 1.0, entries.dtype), entries, entry_sums)
        if FORM.kind == "real":
            sums += own
        else:
            sums += own * read_scales(unit, place, group, FORM)[:, None]
        if FORM.has_minima:
            sums -= entry_sums * read_minima(unit, place, group, FORM)[:, None]
    return sums


@triton.jit
def add_codes(unit, place, own_rows, sums, FORM: tl.constexpr, QUADS: tl.constexpr):
    """The same of codes of a unit as numbers of 16 bits, whose sums are scaled."""
    zeros = read_zeros(unit, place, FORM)
    for group in tl.static_range(FORM.unit // FORM.scaled):
        own = tl.zeros(sums.shape, tl.float32)
        entry_sums = tl.zeros(sums.shape, tl.float32)
        for part in tl.static_range(FORM.scaled // FORM.part):
            at = group * FORM.scaled + part * FORM.part
            entries = in_order(tl.load(own_rows + at), FORM, QUADS)
            if FORM.table:
                own = add_table_products(unit + FORM.head, place, entries, own, at, QUADS)
            else:
                own = add_products(unit, place, entries, own, at, FORM, QUADS)
                entry_sums = dot(tl.full((sums.shape[0], FORM.part), 1.0, entries.dtype), entries, entry_sums)
        scales = read_scales(unit, place, group, FORM)
        sums += own * scales[:, None]
        if not FORM.table:
            less = scales * (zeros + (FORM.offset + (1 << FORM.bits)))
            if FORM.has_minima:
                less += read_minima(unit, place, group, FORM)
            sums -= entry_sums * less[:, None]
    return sums


@triton.jit
def _repeated(lines, COUNT: tl.constexpr):
    """16 lines, ``[16, rows]``, again and again, ``[COUNT, rows]``."""
    ROWS: tl.constexpr = lines.shape[1]
    return tl.reshape(tl.broadcast_to(lines[None, :, :], (COUNT // 16, 16, ROWS)), (COUNT, ROWS))


@triton.jit
def add_grid_spans(unit, place, own_rows, sums, FORM: tl.constexpr, QUADS: tl.constexpr):
    """The same of a unit of a grid of two or three bits, by spans."""
    OUTPUTS: tl.constexpr = sums.shape[0]
    own = tl.zeros(sums.shape, tl.float32)
    offsets = tl.zeros((16, sums.shape[1]), tl.float32)
    entry_sums = tl.zeros((16, sums.shape[1]), tl.float32)
    for span in tl.static_range(FORM.unit // SPAN):
        entries = span_order(tl.load(own_rows + span * SPAN), QUADS)
        own = add_span(unit + FORM.head, place, entries, own, span * SPAN, FORM.bits, QUADS)
        offsets = add_offsets(entries, offsets, FORM.bits, QUADS)
        entry_sums = dot(tl.full((16, SPAN), 1.0, entries.dtype), entries, entry_sums)
    if OUTPUTS > 16:  # all lines are the same
        offsets, entry_sums = _repeated(offsets, OUTPUTS), _repeated(entry_sums, OUTPUTS)
    zeros = (read_zeros(unit, place, FORM) + FORM.offset)[:, None]
    return sums + (own - offsets - zeros * entry_sums) * read_scales(unit, place, 0, FORM)[:, None]


@triton.jit
def add_scaled_spans(unit, place, own_rows, sums, FORM: tl.constexpr, QUADS: tl.constexpr):
    """The same of a unit of Q2_K or Q3_K, whose codes are multiplied by the integers of their scales first."""
    FIRST: tl.constexpr = 64 if FORM.kind == "four" else 32
    ADDED: tl.constexpr = scaled_offset(FORM.bits, QUADS, own_rows.dtype.element_ty.is_bf16())
    own, least = tl.zeros(sums.shape, tl.float32), tl.zeros(sums.shape, tl.float32)
    entry_sums = tl.zeros((16, sums.shape[1]), tl.float32)
    for span in tl.static_range(FORM.unit // SPAN):
        entries = span_order(tl.load(own_rows + span * SPAN), QUADS)
        integers = read_integers(unit, place, FIRST + span * SPAN, QUADS)
        if FORM.kind == "four":
            least = add_minima_span(integers, entries, least, QUADS)
            integers = integers & 15
        else:
            integers = (integers << 24) >> 24
        own = add_scaled_span(unit + FORM.head, place, integers, entries, own, span * SPAN, FORM, QUADS)
        if ADDED:
            entry_sums = dot(tl.full((16, SPAN), 1.0, entries.dtype), entries, entry_sums)
    if ADDED:
        added = ADDED * _repeated(entry_sums, sums.shape[0])
        own, least = own - added, least - added
    number, other = read_numbers(unit, place, FORM)
    if not QUADS:
        other *= 0.0625
    return sums + own * number[:, None] - least * other[:, None]
