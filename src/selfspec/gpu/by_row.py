"""What a block computes of each row by itself, as one kernel each: RMS norms, rope, and a gate's activation.

They take the place of three or four operations of torch, and round where these do. On few rows a launch takes longer
than its work, in a CUDA graph, too. A program has one row, or a head of it, so rows do not depend on each other.
"""

from typing import Any

import torch
import triton
import triton.language as tl

from selfspec.runtimes.activations import GatedActivation
from selfspec.runtimes.fused import RmsNorm

SPAN = 1024
"""Entries of a program that activates."""

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@triton.jit
def norm_rows(
    rows,
    weight,
    out,
    row_stride,
    head_stride,
    epsilon,
    added,
    SIZE: tl.constexpr,
    WIDTH: tl.constexpr,
    ROUNDS: tl.constexpr,
):
    """Divides ``SIZE`` entries of a row, or of a head, by their root mean square and multiplies them by the weight.

    ``added`` is added to the weight. With ``ROUNDS`` entries are rounded to their dtype before they are multiplied.
    """
    row, head, entry = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.arange(0, WIDTH)
    inside = entry < SIZE
    entries = tl.load(rows + row * row_stride + head * head_stride + entry, mask=inside, other=0).to(tl.float32)
    normed = entries * tl.rsqrt(tl.sum(entries * entries, 0) / SIZE + epsilon)
    if ROUNDS:
        normed = normed.to(out.dtype.element_ty).to(tl.float32)
    scaled = normed * (tl.load(weight + entry, mask=inside, other=0).to(tl.float32) + added)
    own = out + (row * tl.num_programs(1) + head) * SIZE + entry
    tl.store(own, scaled.to(out.dtype.element_ty), mask=inside)


@triton.jit
def turn_rows(
    heads,
    cosine,
    sine,
    row_stride,
    turn_stride,
    DIM: tl.constexpr,
    HEAD: tl.constexpr,
    WIDTH: tl.constexpr,
    NEIGHBOURS: tl.constexpr,
):
    """Rope in place on the first ``DIM`` entries of a head of ``HEAD``; see ``fused.turn_heads``.

    A thread has both entries of a pair, so that none is read after another thread has written it.
    """
    row, half = tl.program_id(0).to(tl.int64), tl.arange(0, WIDTH)
    inside = half < DIM // 2
    one = half * 2 if NEIGHBOURS else half
    other = one + 1 if NEIGHBOURS else half + DIM // 2
    own, turn = heads + row * row_stride + tl.program_id(1) * HEAD, row * turn_stride
    first = tl.load(own + one, mask=inside, other=0).to(tl.float32)
    second = tl.load(own + other, mask=inside, other=0).to(tl.float32)
    _store_turned(own + one, first, second, cosine + turn + one, sine + turn + one, inside)
    _store_turned(own + other, second, first, cosine + turn + other, sine + turn + other, inside)


@triton.jit
def _store_turned(place, entry, other, cosine, sine, inside):
    """Stores an entry of a pair, turned. Products round to the dtype of cosine and sine."""
    TYPE: tl.constexpr = cosine.dtype.element_ty
    along = (entry * tl.load(cosine, mask=inside, other=0).to(tl.float32)).to(TYPE)
    across = (other * tl.load(sine, mask=inside, other=0).to(tl.float32)).to(TYPE)
    turned = along.to(tl.float32) + across.to(tl.float32)
    tl.store(place, turned.to(place.dtype.element_ty), mask=inside)


@triton.jit
def gate_rows(entered, out, size, SPAN: tl.constexpr):
    """SiLU of gates times what follows them: rows ``[2 * size]`` to ``[size]``."""
    row, entry = tl.program_id(0).to(tl.int64), tl.program_id(1) * SPAN + tl.arange(0, SPAN)
    inside = entry < size
    gate = tl.load(entered + 2 * row * size + entry, mask=inside, other=0).to(tl.float32)
    other = tl.load(entered + (2 * row + 1) * size + entry, mask=inside, other=0).to(tl.float32)
    activated = (gate / (1 + tl.exp(-gate))).to(out.dtype.element_ty).to(tl.float32)
    tl.store(out + row * size + entry, (activated * other).to(out.dtype.element_ty), mask=inside)


class KernelNorm(RmsNorm):
    """An RMS norm as one kernel, over the same weight."""

    def __init__(self, norm: RmsNorm) -> None:
        vars(self).update(vars(norm))

    def __call__(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Norms the last dimension of ``[rows, size]``, or of ``[rows, heads, size]`` with heads side by side."""
        (rows, *heads, size), dtype = hidden_states.shape, hidden_states.dtype
        assert hidden_states.stride(-1) == 1, "the entries of a row have to stand side by side"
        out = torch.empty(hidden_states.shape, dtype=dtype, device=hidden_states.device)
        strides = hidden_states.stride(0), hidden_states.stride(1) if heads else 0
        width = triton.next_power_of_2(size)
        norm_rows[rows, heads[0] if heads else 1](
            *(hidden_states, self.weight, out, *strides, self.epsilon, self.added),
            SIZE=size,
            WIDTH=width,
            ROUNDS=self.rounds and not self.added,
            num_warps=warps_of(width),
        )
        return out


class GatedSilu(GatedActivation):
    """SiLU of the gate times the other half."""

    def __call__(self, entered: torch.Tensor) -> torch.Tensor:
        """``[rows, 2 * inner]`` to ``[rows, inner]``."""
        entered, size = entered.contiguous(), entered.shape[1] // 2
        out = entered.new_empty(len(entered), size)
        gate_rows[len(entered), triton.cdiv(size, SPAN)](entered, out, size, SPAN=SPAN)
        return out


def norm_of(norm: Any) -> Any:
    """The kernel of a norm where there is one, else the norm itself."""
    if type(norm) is not RmsNorm or norm.bias is not None or norm.weight.dtype not in _DTYPES:
        return norm
    return KernelNorm(norm)


def turn_heads(heads: torch.Tensor, cosine: torch.Tensor, sine: torch.Tensor, *, neighbours: bool) -> None:
    """Rope in place, as ``fused.turn_heads`` has it."""
    (rows, count, size), dim = heads.shape, cosine.shape[-1]
    assert heads.stride()[1:] == (size, 1), "heads have to stand side by side"
    assert cosine.stride(0) == sine.stride(0), "cosine and sine are laid out alike"
    turn_rows[rows, count](
        *(heads, cosine, sine, heads.stride(0), cosine.stride(0)),
        DIM=dim,
        HEAD=size,
        WIDTH=triton.next_power_of_2(dim // 2),
        NEIGHBOURS=neighbours,
        num_warps=1,
        enable_fp_fusion=False,
    )


def warps_of(width: int) -> int:
    """Warps of a program that norms: 16 entries of a thread, or fewer where there are not more warps."""
    return min(16, max(1, width // 512))
