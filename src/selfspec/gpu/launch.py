"""Calls of the kernels for products, from tensors: dense weights, and tiles of weights of few bits."""

from collections.abc import Sequence
from typing import Any

import torch
import triton
from torch.nn import functional

from selfspec.gpu import blocks
from selfspec.gpu.blocks import tile_form
from selfspec.gpu.few_rows import (
    ADDED,
    LOW_BIT_STAGES,
    OUTPUTS,
    STAGES,
    WARPS,
    Shares,
    add_shares,
    dense_product,
    dense_shares,
    low_bit_product,
    shares,
    unpack_rows,
)
from selfspec.runtimes.formats import PackedFormat
from selfspec.runtimes.packed import PackedWeights

IS_INTERPRETED = bool(blocks.IS_INTERPRETED.value)
"""Whether the kernels run in Triton's interpreter."""

_OPTIONS = {"num_warps": WARPS, "num_stages": STAGES, "enable_fp_fusion": True}
"""How products are compiled; each multiply-add is rounded once."""


QUADS = torch.version.hip is not None
"""Whether matrix instructions are AMD's, of 16 rows; NVIDIA's have 8."""

ROWS_OF_PROGRAM = 32
"""Rows of a program, at most; with more of them, all weights are read again."""

MOST_ROWS = 96
"""Most rows of a sequence that the kernels multiply and attend for; with more, torch does, with what they unpack.

The largest default tree, that of ``token-recycling``, has 81 rows.
"""

_AT_ONCE = 1 << 26
"""Weights that are unpacked together for that."""


def multiply_parts(
    hidden_states: torch.Tensor,
    parts: Sequence[PackedWeights],
    bias: torch.Tensor | None = None,
    widest: int | None = None,
) -> torch.Tensor:
    """The product of rows ``[rows, inputs]`` and weights whose outputs follow each other, ``[rows, outputs]``.

    ``widest``: see ``runtimes.products.Product``.
    """
    if (order := parts[0].order) is not None:
        hidden_states = hidden_states.index_select(1, order)
    is_wide = (len(hidden_states) if widest is None else widest) > MOST_ROWS
    out = hidden_states.new_empty(len(hidden_states), sum(part.outputs for part in parts))
    sizes = [part.outputs for part in parts]
    biases = [None] * len(parts) if bias is None else bias.split(sizes)
    for part, own, own_bias in zip(parts, out.split(sizes, dim=1), biases, strict=True):
        if is_wide:
            _multiply_unpacked(hidden_states, part, own, own_bias)
        else:
            multiply_tiles(hidden_states, part.tiles, part.form, own, own_bias)
    return out


def look_up(table: PackedWeights, rows: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The values of some weight rows (long ``[n]``), rounded to a dtype, ``[n, inputs]``."""
    out = torch.empty(len(rows), table.inputs, dtype=dtype, device=rows.device)
    if len(rows):
        unpack_tiles(table.tiles, table.form, rows, out)
    return out


def _multiply_unpacked(
    hidden_states: torch.Tensor, part: PackedWeights, out: torch.Tensor, bias: torch.Tensor | None
) -> None:
    """The product of many rows, by torch, with weights that are unpacked to their dtype some at a time."""
    step = max(1, _AT_ONCE // part.inputs)
    for first in range(0, part.outputs, step):
        some = slice(first, first + step)
        weight = look_up(part, torch.arange(part.outputs, device=out.device)[some], hidden_states.dtype)
        out[:, some] = functional.linear(hidden_states, weight, None if bias is None else bias[some])


def multiply_dense(hidden_states: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """The product of rows ``[rows, inputs]`` and weights ``[outputs, inputs]`` of their dtype, ``[rows, outputs]``."""
    outputs, inputs = weight.shape
    out = hidden_states.new_empty(len(hidden_states), outputs)
    shared = dense_shares(outputs, inputs, weight.dtype.itemsize, _rows_of_program(len(out)))
    _launch(dense_product, hidden_states, weight, bias, out, shared, {"num_stages": STAGES})
    return out


def multiply_tiles(
    hidden_states: torch.Tensor,
    tiles: torch.Tensor,
    form: PackedFormat,
    out: torch.Tensor,
    bias: torch.Tensor | None = None,
) -> None:
    """The product of rows and the weights in tiles, to ``out``, ``[rows, outputs]``, whose rows may lie apart."""
    inputs, outputs = hidden_states.shape[1], out.shape[1]
    shared = shares(outputs, inputs, form.unit, _rows_of_program(len(out)), QUADS)
    own = {"FORM": tile_form(form), "num_stages": LOW_BIT_STAGES}
    _launch(low_bit_product, hidden_states, tiles, bias, out, shared, own)


def unpack_tiles(tiles: torch.Tensor, form: PackedFormat, rows: torch.Tensor, out: torch.Tensor) -> None:
    """The values of some weight rows (long ``[n]``) in tiles, to contiguous ``out``, ``[n, inputs]``."""
    count, inputs = out.shape
    grid = triton.cdiv(count, OUTPUTS), inputs // form.unit
    unpack_rows[grid](tiles, rows, out, count, INPUTS=inputs, FORM=tile_form(form), num_warps=1, enable_fp_fusion=True)


def _launch(
    kernel: Any,
    hidden_states: torch.Tensor,
    weights: torch.Tensor,
    bias: torch.Tensor | None,
    out: torch.Tensor,
    shared: Shares,
    own: dict[str, Any],
) -> None:
    """Calls a product; where the inputs are divided, what adds the shares follows it."""
    rows, outputs, splits, has_bias = len(hidden_states), out.shape[1], shared.splits, bias is not None
    assert hidden_states.is_contiguous()
    to = out if splits == 1 else torch.empty(splits, rows, outputs, dtype=torch.float32, device=out.device)
    filled = out if bias is None else bias
    grid = triton.cdiv(outputs, shared.outputs), triton.cdiv(rows, shared.rows), splits
    sizes = rows, outputs, out.stride(0)
    kernel[grid](hidden_states, weights, filled, to, *sizes, SHARES=shared, HAS_BIAS=has_bias, **(_OPTIONS | own))
    if splits > 1:
        programs = triton.cdiv(outputs, ADDED), rows
        add_shares[programs](to, filled, out, *sizes, SPLITS=splits, HAS_BIAS=has_bias, OUTPUTS=ADDED, **_OPTIONS)


def _rows_of_program(rows: int) -> int:
    """The rows of a program where there are some: those of one matrix instruction, or of a few."""
    filled: int = triton.next_power_of_2(rows)
    return min(ROWS_OF_PROGRAM, max(16 if QUADS else 8, filled))
