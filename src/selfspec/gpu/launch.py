"""Calls of the kernels for products, from tensors: dense weights, and tiles of weights of few bits."""

from typing import Any

import torch
import triton

from selfspec.gpu.blocks import REAL_TYPES, tile_form
from selfspec.gpu.products import (
    OUTPUTS,
    ROWS,
    add_shares,
    dense_product,
    divisions,
    low_bit_product,
    step_of,
    unpack_rows,
)
from selfspec.runtimes.formats import PackedFormat


def multiply_dense(
    hidden_states: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """The product of rows ``[rows, inputs]`` and weights ``[outputs, inputs]`` of their dtype, ``[rows, outputs]``."""
    outputs, inputs = weight.shape
    out = hidden_states.new_empty(len(hidden_states), outputs)
    splits, step = divisions(outputs, inputs), step_of(weight.dtype)
    share = step * -(-inputs // (step * splits))
    _launch(dense_product, hidden_states, weight, bias, out, splits, {"SHARE": share, "STEP": step})
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
    units, splits = inputs // form.unit, divisions(outputs, inputs)
    share = -(-units // min(splits, units))
    constants = {"SHARE": share, **_constants(form)}
    _launch(low_bit_product, hidden_states, tiles, bias, out, -(-units // share), constants)


def unpack_tiles(tiles: torch.Tensor, form: PackedFormat, rows: torch.Tensor, out: torch.Tensor) -> None:
    """The values of some weight rows (long ``[n]``) in tiles, to contiguous ``out``, ``[n, inputs]``."""
    count, inputs = out.shape
    grid = triton.cdiv(count, ROWS), inputs // form.unit
    unpack_rows[grid](tiles, rows, out, count, INPUTS=inputs, **_constants(form), num_warps=1)


def _launch(
    kernel: Any,
    hidden_states: torch.Tensor,
    weights: torch.Tensor,
    bias: torch.Tensor | None,
    out: torch.Tensor,
    splits: int,
    constants: dict[str, Any],
) -> None:
    """Calls a product; where the inputs are divided, what adds the shares follows it."""
    (rows, inputs), outputs = hidden_states.shape, out.shape[1]
    assert hidden_states.is_contiguous()
    blocks = triton.cdiv(outputs, OUTPUTS)
    common = {"SPLITS": splits, "HAS_BIAS": bias is not None, "OUTPUTS": OUTPUTS}
    to = out if splits == 1 else torch.empty(splits, rows, outputs, dtype=torch.float32, device=out.device)
    filled = out if bias is None else bias
    grid = blocks, triton.cdiv(rows, ROWS), splits
    sizes = rows, outputs, out.stride(0)
    kernel[grid](hidden_states, weights, filled, to, *sizes, INPUTS=inputs, **common, **constants)
    if splits > 1:
        add_shares[blocks, rows](to, filled, out, *sizes, **common)


def _constants(form: PackedFormat) -> dict[str, Any]:
    return {**tile_form(form).constants, "TYPE": REAL_TYPES.get(form.name, REAL_TYPES["F32"])}
