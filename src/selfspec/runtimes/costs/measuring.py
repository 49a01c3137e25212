"""Measures what forwards cost by their number of rows, or estimates it by the bytes of the weights."""

import math
import time
from collections.abc import Callable, Sequence

import torch

from selfspec.model.identity import stored_bytes
from selfspec.runtimes.costs.rows import ROW_COUNTS, RowCosts
from selfspec.runtimes.mixtures import CompiledMixture
from selfspec.runtimes.native import AttentionShape
from selfspec.runtimes.precision import Precision
from selfspec.runtimes.target import Target
from selfspec.timing import in_turn, timed

_CONTEXT = 128
"""Tokens in the cache before the rows that are measured."""

_LEAST_PASSES, _PASSES = 2, 5
"""Fewest and most passes over all numbers of rows."""

_SETTLED, _MOST_SETTLING = 0.8, 4
"""A forward is warm when it takes more than this share of the last one's time; most forwards until then."""

_BYTES_A_SECOND = 2e10
_PRODUCTS_A_BYTE = 10
"""Products that a processor makes in the time in which it reads a byte of weights."""
_ATTENTION_PRODUCTS_A_BYTE = 5
"""The same of products with keys and values, exponentials included."""


def measure_row_costs(
    target: Target,
    sublayers: Sequence[int],
    precision: Precision | None = None,
    *,
    row_counts: Sequence[int] = ROW_COUNTS,
    most_seconds: float = 1.0,
) -> RowCosts:
    """Measures forwards of some sublayers, whose weights have a precision; see ``measure_together``.

    Costs that other processes have disturbed are measured once more.
    """
    which = [(tuple(sublayers), precision)]
    for _ in range(2):
        costs = measure_together(target, which, row_counts=row_counts, most_seconds=most_seconds)[0]
        if not costs.disturbed:
            break
    return costs


@torch.inference_mode()
def measure_together(
    target: Target,
    assignments: Sequence[tuple[tuple[int, ...], Precision | None]],
    *,
    row_counts: Sequence[int],
    most_seconds: float,
) -> list[RowCosts]:
    """Measures forwards over a short context, for pairs of sublayers and precision.

    They are measured in turns, so that a drift of the speed favours none. No third pass begins after ``most_seconds``,
    and no more than 1 to 4 rows are measured if those take it: more rows are then taken to cost what an estimate says
    beside these. The minimum of repeated passes counts: other load on the machine makes a forward slower, never faster.
    Costs are taken as measured: where more rows take less time, they do.
    """
    context = min(_CONTEXT, max(0, target.context_limit - row_counts[-1]))
    counts = [rows for rows in row_counts if rows + context <= target.context_limit] or [1]
    forwards = [_forwards(target, *each, context, counts) for each in assignments]
    clock = target.ranks.clock
    for forward in forwards:
        forward[1]()  # makes low-bit weights, builds kernels, touches the weights
        _settle(lambda forward=forward: timed(forward[1], target.device, clock))  # type: ignore[misc]
    samples: list[dict[int, list[float]]] = [{rows: [] for rows in counts} for _ in forwards]
    started, computed = time.perf_counter(), time.thread_time()
    began = clock()
    for turn in range(_PASSES):
        for rows in counts:
            if rows <= 4 or clock() - began < most_seconds or samples[0][rows]:
                for index in in_turn(range(len(forwards)), turn):
                    samples[index][rows].append(timed(forwards[index][rows], target.device, clock))
        if turn + 1 >= _LEAST_PASSES and clock() - began > most_seconds:
            break
    seconds = time.perf_counter() - started
    alone = (time.thread_time() - computed) / seconds if target.device.type == "cpu" else 1.0
    fastest = [{rows: max(min(taken), 1e-9) for rows, taken in each.items() if taken} for each in samples]
    return [
        _with_the_rest(measured, counts, estimate_row_costs(target, precision), alone)
        for measured, (_, precision) in zip(fastest, assignments, strict=True)
    ]


def _settle(seconds: Callable[[], float]) -> None:
    """Plays forwards, each of which gives its ``seconds``, until they no longer become faster: weights become warm."""
    last = math.inf
    for _ in range(_MOST_SETTLING):
        taken = seconds()
        if taken > _SETTLED * last:
            return
        last = taken


def _with_the_rest(measured: dict[int, float], counts: Sequence[int], estimate: RowCosts, alone: float) -> RowCosts:
    """Costs of all ``counts``: those that were not measured have the shape of an estimate."""
    last = max(measured)
    scale = measured[last] / estimate(last)
    seconds = {rows: measured[rows] if rows in measured else scale * estimate(rows) for rows in counts}
    return RowCosts(tuple(seconds), tuple(seconds.values()), alone)


def estimate_row_costs(target: Target, precision: Precision | None = None) -> RowCosts:
    """What forwards may cost before any was timed, by the bytes of the weights and the products of a row.

    A forward reads all weights once, and each row multiplies all of them; of experts, those that any of the rows is
    expected to choose, and its own. The ratio of both to each other is that of ordinary processors; live rounds correct
    it (``LiveCosts``).
    """
    bytes_read = weight_bytes(target) if precision is None else target.low_bit_bytes(precision)
    step = max(1, bytes_read) / _BYTES_A_SECOND
    read = _shares_read(target)
    row = read[0] * target.parameter_count / (_PRODUCTS_A_BYTE * _BYTES_A_SECOND)
    return RowCosts(
        ROW_COUNTS, tuple(step * share + (rows - 1) * row for rows, share in zip(ROW_COUNTS, read, strict=True))
    )


def attention_share(target: Target, slots: int) -> float:
    """Bytes of keys and values that a row reads of some slots ÷ those of the weights; layers with a window read few.

    Here and in ``add_attention`` attention of the target is native (``Target.attention_shares``).
    """
    read = slots * target.slot_bytes * _attention(target).unbounded / target.decoder.slot_layers
    return read / max(1, weight_bytes(target))


def add_attention(target: Target, costs: RowCosts, slots: int, own: RowCosts) -> RowCosts:
    """Costs of forwards over a short text as those over one of ``slots``; ``own`` are the target's, over a short one.

    Keys and values are read once, in which time the products of a few rows with them are made.
    """
    heads, _, unbounded = _attention(target)
    products = 2 * heads * target.decoder.slot_shape[1] * unbounded * slots
    row = products / (_ATTENTION_PRODUCTS_A_BYTE * _BYTES_A_SECOND)
    read = attention_share(target, slots) * weight_bytes(target) / _BYTES_A_SECOND
    scale = own(1) / estimate_row_costs(target)(1)
    seconds = (short + scale * max(read, rows * row) for rows, short in zip(costs.rows, costs.seconds, strict=True))
    return RowCosts(costs.rows, tuple(seconds))


def _attention(target: Target) -> AttentionShape:
    native = target.at(None).native
    assert native is not None
    assert native.attention is not None
    return native.attention


def _shares_read(target: Target) -> list[float]:
    """For each number of rows the share of the weights that they read, each row choosing its experts at random."""
    shares = [1.0] * len(ROW_COUNTS)
    for block in target.sublayers:
        if isinstance(block, CompiledMixture):
            experts = block.expert_weights / target.parameter_count
            for place, rows in enumerate(ROW_COUNTS):
                shares[place] -= experts * (1 - block.top / block.count) ** rows
    return shares


def weight_bytes(target: Target) -> int:
    """What the weights of a model take, low-bit ones too."""
    held = [*target.model.parameters(), *target.model.buffers()]
    return sum({id(tensor): stored_bytes(tensor) for tensor in held}.values())


def _forwards(
    target: Target, sublayers: tuple[int, ...], precision: Precision | None, context: int, counts: Sequence[int]
) -> dict[int, Callable[[], object]]:
    sequence = target.new_sequence(max(1, context), context + counts[-1], context + counts[-1])
    model = target.at(precision)

    def forward(rows: int) -> None:
        """One forward, up to the choice of a token for each row."""
        tokens = torch.arange(rows, device=target.device) * target.vocab_size // rows  # rows with experts of their own
        layout = target.lay_out(sequence, rows, start=context)
        output = model.run(
            target.embed(tokens, layout), sublayers, layout, logits=True, confidence=model is not target.at(None)
        )
        assert output.logits is not None
        _ = output.logits.best

    return {rows: lambda rows=rows: forward(rows) for rows in counts}  # type: ignore[misc]
