"""Attention of a few rows to the cached keys and values of one sequence, with fixed splits of the keys.

The keys are divided among programs by position: a split has ``SPLIT`` positions, whatever number of rows there is and
wherever the text ends. Each program computes 16 queries, rows by query heads of one key head, on its split; then the
splits that a row sees are merged from the first to the last. What a row does not see adds exact zeros. So the sums of a
row, and their order, are those of the row alone, in a chain and in a tree: a row of a tree reads its own ancestors by
their positions, not by the slots where they stand.
"""

import math

import torch
import triton
import triton.language as tl

from selfspec.gpu.blocks import dot
from selfspec.gpu.launch import MOST_ROWS
from selfspec.model import transfer
from selfspec.model.forward import Rows
from selfspec.runtimes.fused import FusedAttention
from selfspec.runtimes.static_rows import Tree

SPLIT = 128
"""Positions of a split."""

_QUERIES: tl.constexpr = tl.constexpr(16)
_SPLIT: tl.constexpr = tl.constexpr(SPLIT)
_MERGED: tl.constexpr = tl.constexpr(16)
_LOG2_E = math.log2(math.e)


@triton.jit
def _capped(scores, CAP: tl.constexpr):
    """``CAP tanh(scores / CAP)``."""
    power = tl.exp2(tl.abs(scores) * (-2.8853900817779268 / CAP))
    return tl.where(scores < 0, -CAP, CAP) * ((1 - power) / (1 + power))


@triton.jit
def _shrunk(largest, base):
    """What sums relative to ``largest`` are multiplied with to be relative to ``base``; both are powers of two."""
    return tl.exp2(largest - base)


@triton.jit(do_not_specialize=["rows", "path_length"])
def attend_split(
    queries,
    keys,
    values,
    positions,
    prefix,
    paths,
    mixed,
    weights,
    rows,
    path_length,
    row_stride,
    key_stride,
    value_stride,
    scale,
    KEY_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    WINDOW: tl.constexpr,
    STEP: tl.constexpr,
    SOFTCAP: tl.constexpr,
    TREE: tl.constexpr,
):
    """Attention of 16 queries of a key head to one split, of which ``STEP`` positions are read at a time.

    ``queries`` are ``[rows, heads, DIM]``, rows ``row_stride`` apart; ``keys`` and ``values`` ``[KEY_HEADS, slots,
    DIM]``, heads ``key_stride`` and ``value_stride`` apart. ``mixed`` becomes the sums of the values, float32
    ``[splits, rows, heads, DIM]``, and ``weights`` the largest score and the sum of the exponentials relative to it,
    ``[2, splits, rows, heads]``. In a tree a program's queries are of one row, else of several.
    """
    split, head, tile = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    HEADS: tl.constexpr = KEY_HEADS * GROUP
    if TREE:
        PARTS: tl.constexpr = (GROUP + _QUERIES - 1) // _QUERIES
        path = tile // PARTS
        member = tile % PARTS * _QUERIES + tl.arange(0, _QUERIES)
        row = path + member * 0
    else:
        path = 0
        query = tile * _QUERIES + tl.arange(0, _QUERIES)
        row, member = query // GROUP, query % GROUP
    valid = (row < rows) & (member < GROUP)
    position = tl.load(positions + row, mask=valid, other=-1).to(tl.int32)
    last, begin = tl.max(position, 0), split * _SPLIT
    reached = begin <= last
    if WINDOW:
        earliest = tl.min(tl.where(valid, position, last), 0)
        reached = reached & (begin + _SPLIT > earliest - WINDOW + 1)
    if reached:
        entry = tl.arange(0, WIDTH)
        place = row.to(tl.int64) * row_stride + (head * GROUP + member) * DIM
        of_query = valid[:, None] & (entry < DIM)[None, :]
        own = tl.load(queries + place[:, None] + entry[None, :], mask=of_query, other=0)
        own_keys, own_values = keys + head.to(tl.int64) * key_stride, values + head.to(tl.int64) * value_stride
        largest = tl.full((_QUERIES,), float("-inf"), tl.float32)
        total = tl.zeros((_QUERIES,), tl.float32)
        sums = tl.zeros((_QUERIES, WIDTH), tl.float32)
        for start in range(0, _SPLIT, STEP):
            at = begin + start + tl.arange(0, STEP)
            slot = at
            if TREE:
                first = tl.load(prefix)
                after = at - first
                known = (after >= 0) & (after < path_length) & (at <= last)
                slot = tl.where(after < 0, at, first + tl.load(paths + path * path_length + after, mask=known, other=0))
            offset = slot.to(tl.int64)[:, None] * DIM + entry[None, :]
            read = (at <= last)[:, None] & (entry < DIM)[None, :]
            seen = at[None, :] <= position[:, None]
            if WINDOW:
                seen = seen & (at[None, :] > position[:, None] - WINDOW)
            block = tl.load(own_keys + offset, mask=read, other=0)
            scores = dot(own, tl.trans(block), tl.zeros((_QUERIES, STEP), tl.float32)) * scale
            if SOFTCAP > 0:
                scores = _capped(scores, SOFTCAP) * 1.4426950408889634
            scores = tl.where(seen, scores, float("-inf"))
            highest = tl.maximum(largest, tl.max(scores, 1))
            base = tl.where(highest == float("-inf"), 0.0, highest)
            shares, kept = tl.exp2(scores - base[:, None]), _shrunk(largest, base)
            total = total * kept + tl.sum(shares, 1)
            block = tl.load(own_values + offset, mask=read, other=0)
            sums = dot(shares.to(block.dtype), block, sums * kept[:, None])
            largest = highest
        at = (split * rows + row) * HEADS + head * GROUP + member
        tl.store(mixed + at.to(tl.int64)[:, None] * DIM + entry[None, :], sums, mask=of_query)
        tl.store(weights + at, largest, mask=valid)
        tl.store(weights + tl.num_programs(0) * rows * HEADS + at, total, mask=valid)


@triton.jit(do_not_specialize=["rows", "splits"])
def merge_splits(
    mixed,
    weights,
    positions,
    sinks,
    out,
    rows,
    splits,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    WINDOW: tl.constexpr,
    SINKS: tl.constexpr,
):
    """Attention of a row and head from its splits, to ``out`` ``[rows, HEADS, DIM]``; 16 splits at a time, in order.

    A sink is a score of each head that takes part in the softmax and has no value.
    """
    row, head = tl.program_id(0), tl.program_id(1)
    position = tl.load(positions + row).to(tl.int32)
    first, last, entry = 0, position // _SPLIT, tl.arange(0, WIDTH)
    if WINDOW:
        first = tl.maximum(position - WINDOW + 1, 0) // _SPLIT
    if SINKS:
        largest, total = tl.load(sinks + head).to(tl.float32) * 1.4426950408889634, 1.0
    else:
        largest, total = float("-inf"), 0.0
    sums = tl.zeros((WIDTH,), tl.float32)
    for start in range(first // _MERGED * _MERGED, last + 1, _MERGED):
        split = start + tl.arange(0, _MERGED)
        kept = (split >= first) & (split <= last)
        at = (split * rows + row) * HEADS + head
        own = tl.load(weights + at, mask=kept, other=float("-inf"))
        exponentials = tl.load(weights + splits * rows * HEADS + at, mask=kept, other=0)
        block = mixed + at.to(tl.int64)[:, None] * DIM + entry[None, :]
        parts = tl.load(block, mask=kept[:, None] & (entry < DIM)[None, :], other=0)
        highest = tl.maximum(largest, tl.max(own, 0))
        shares, before = _shrunk(own, highest), _shrunk(largest, highest)
        total = total * before + tl.sum(exponentials * shares, 0)
        sums = sums * before + tl.sum(parts * shares[:, None], 0)
        largest = highest
    place = (row * HEADS + head) * DIM + entry
    tl.store(out + place, (sums / total).to(out.dtype.element_ty), mask=entry < DIM)


def attend(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    positions: torch.Tensor,
    end: int,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    tree: Tree | None = None,
) -> torch.Tensor:
    """Attention of some rows of one sequence, whose own keys and values are in the cache.

    Nothing is read on the host. Scratch is ``end / SPLIT`` times the output, in float32.

    Args:
        queries: ``[rows, heads, head_dim]``, heads and entries side by side in memory.
        keys: ``[key_heads, slots, head_dim]``, slots and entries side by side, of the same dtype.
        values: as ``keys``.
        positions: integers ``[rows]``; a row sees the positions up to its own.
        end: a number above all positions; how much above does not matter for the result.
        scale: of the scores.
        window: positions that a row sees at most, its own included.
        softcap: caps the scores, ``softcap tanh(score / softcap)``.
        sinks: ``[heads]``, a score of each head that only takes weight away.
        tree: where the rows' ancestors are; without it every position is in the slot of its number.

    Returns:
        ``[rows, heads * head_dim]``.
    """
    (rows, heads, dim), key_heads = queries.shape, keys.shape[0]
    assert queries.stride()[1:] == (dim, 1), "the heads of a row have to stand side by side"
    assert keys.stride()[1:] == values.stride()[1:] == (dim, 1), "the slots of a head have to stand side by side"
    group, splits, width = heads // key_heads, -(-end // SPLIT), triton.next_power_of_2(dim)
    mixed = queries.new_empty(splits, rows, heads, dim, dtype=torch.float32)
    weights = queries.new_empty(2, splits, rows, heads, dtype=torch.float32)
    out = queries.new_empty(rows, heads * dim)
    prefix, paths = (positions, positions) if tree is None else tree
    tiles = triton.cdiv(rows * group, 16) if tree is None else rows * triton.cdiv(group, 16)
    sizes = {"DIM": dim, "WIDTH": max(16, width), "WINDOW": window or 0}
    attend_split[splits, key_heads, tiles](
        *(queries, keys, values, positions, prefix, paths, mixed, weights, rows, paths.shape[-1]),
        *(queries.stride(0), keys.stride(0), values.stride(0), scale if softcap else scale * _LOG2_E),
        **sizes,
        KEY_HEADS=key_heads,
        GROUP=group,
        STEP=step_of(sizes["WIDTH"], keys.dtype),
        SOFTCAP=softcap or 0.0,
        TREE=tree is not None,
        num_warps=warps_of(width, keys.dtype),
        num_stages=2,
        enable_fp_fusion=True,
    )
    merge_splits[rows, heads](
        *(mixed, weights, positions, out if sinks is None else sinks, out, rows, splits),
        **sizes,
        HEADS=heads,
        SINKS=sinks is not None,
        num_warps=max(1, width // 128),
        enable_fp_fusion=True,
    )
    return out


def attend_few(block: FusedAttention, queries: torch.Tensor, rows: Rows) -> torch.Tensor | None:
    """Attention of up to ``MOST_ROWS`` rows of one sequence, an ``Attend``; ``None`` for more, as those of a prompt.

    A cache of 8 bits is unpacked first, to the numbers that it stands for.
    """
    if rows.count > MOST_ROWS:
        return None
    keys, values = rows.sequence.cache.seen(block.index, 0, rows.end)
    return attend(
        *(queries, keys[0], values[0], rows.positions, rows.end),
        scale=block.scale,
        window=block.window,
        softcap=block.softcap,
        sinks=block.sinks,
        tree=tree_of(rows),
    )


def step_of(width: int, dtype: torch.dtype) -> int:
    """Positions of a split that are read at a time: 16 KiB of keys, which leaves room in the smallest shared memory."""
    return min(64, max(16, 2**14 // (width * dtype.itemsize)))


def warps_of(width: int, dtype: torch.dtype) -> int:
    """Warps of a program that attends: as many as spill nothing, more for what no matrix instruction multiplies."""
    return 8 if width > 128 or dtype == torch.float32 else 4


def tree_of(rows: Rows) -> Tree | None:
    """Where the rows of a forward find their ancestors, on their device; ``None`` for a chain. Computed once.

    Of the slots after the prefix, each row has to see as many as its depth says and itself: one of each position.
    """
    if rows.is_chain:
        return None
    if "tree" not in rows.memo:
        seen = rows.visibility(None)[:, rows.prefix :]
        if transfer.is_on_host(seen):  # elsewhere it would be waited for
            depths = range(rows.count) if rows.depths is None else rows.depths
            counts: list[int] = seen.sum(-1).tolist()
            assert counts == [depth + 1 for depth in depths], "a row has to see one slot of each position"
        slots = torch.argsort(~seen, dim=-1, stable=True).int()
        prefix = transfer.send(torch.tensor([rows.prefix], dtype=torch.int32), slots.device)
        rows.memo["tree"] = Tree(prefix, slots.contiguous())
    tree: Tree = rows.memo["tree"]
    return tree
