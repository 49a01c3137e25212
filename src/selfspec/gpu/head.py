"""What is chosen from the logits of rows, where they are: the best token or a drawn one, its probability, finiteness.

The LM head is a product like the others, whatever the format of its weights, and its logits are read once more here:
they are a thousandth of the head's weights or less. Nothing goes to the host before all of it is known, so that a round
waits for the device once. Each row is computed for itself, in spans of ``SPAN`` logits that are joined in order.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from selfspec.model import transfer
from selfspec.model.forward import Drawing, Forward
from selfspec.runtimes.logits import Logits

SPAN = 2048
"""Logits of a program."""

_SPAN: tl.constexpr = tl.constexpr(SPAN)
# Of splitmix64, as in sampling.rules, whose numbers these are.
_GAMMA: tl.constexpr = tl.constexpr(0x9E3779B97F4A7C15)
_FIRST: tl.constexpr = tl.constexpr(0xBF58476D1CE4E5B9)
_SECOND: tl.constexpr = tl.constexpr(0x94D049BB133111EB)

_NO_TOKEN: tl.constexpr = tl.constexpr(2**31 - 1)


class Draws(NamedTuple):
    """How the tokens of rows are drawn, on the device (``sampling.rules``).

    Attributes:
        keys: long ``[rows]``, the bits of the keys of the seeds.
        positions: long ``[rows]``, of the token to choose.
        temperatures: float32 ``[rows]``; 0 where nothing is drawn.
    """

    keys: torch.Tensor
    positions: torch.Tensor
    temperatures: torch.Tensor

    @staticmethod
    def send(drawings: Sequence[tuple[Drawing | None, int]], device: torch.device) -> "Draws | None":
        """Those of some rows (``Rows.drawings``), without waiting; ``None`` where no row draws."""
        if all(drawing is None for drawing, _ in drawings):
            return None
        keys = [0 if drawing is None else drawing.key for drawing, _ in drawings]
        temperatures = [0.0 if drawing is None else drawing.temperature for drawing, _ in drawings]
        return Draws(
            transfer.send([key - (1 << 64) if key >> 63 else key for key in keys], device),
            transfer.send([position for _, position in drawings], device),
            transfer.send(torch.tensor(temperatures), device),
        )


@triton.jit
def _mix(value):
    """The finaliser of splitmix64."""
    value = (value ^ (value >> 30)) * _FIRST
    value = (value ^ (value >> 27)) * _SECOND
    return value ^ (value >> 31)


@triton.jit
def _gumbel(key, position, token):
    """The noise of tokens ``[n]`` at a position, as ``sampling.rules.gumbel_noise`` has it."""
    stream = _mix(key.to(tl.uint64, bitcast=True) + (position + 1).to(tl.uint64) * _GAMMA)
    bits = _mix(stream + (token + 1).to(tl.uint64) * _GAMMA) >> 12
    uniform = (bits.to(tl.float64) + 0.5) * 2.220446049250313e-16
    return (-tl.log(-tl.log(uniform))).to(tl.float32)


@triton.jit
def _first_of(values, token, highest):
    """The lowest of the tokens that have the highest value."""
    return tl.min(tl.where(values == highest, token, _NO_TOKEN), 0)


@triton.jit(do_not_specialize=["vocab", "stride"])
def choose_spans(logits, keys, positions, temperatures, numbers, tokens, finite, vocab, stride, DRAWS: tl.constexpr):
    """Chooses from one span of one row of logits ``[rows, vocab]``, rows ``stride`` apart.

    ``numbers`` becomes float32 ``[3, rows, spans]``: what the token is chosen by, the largest logit, and the sum of the
    exponentials relative to it; ``tokens`` and ``finite`` int32 ``[rows, spans]``. What is no number counts as -inf.
    """
    span, row = tl.program_id(0), tl.program_id(1)
    token = span * _SPAN + tl.arange(0, _SPAN)
    kept = token < vocab
    read = tl.load(logits + row.to(tl.int64) * stride + token, mask=kept, other=0).to(tl.float32)
    values = tl.where(kept & (read == read), read, float("-inf"))
    largest = tl.max(values, 0)
    base = tl.where(largest == float("-inf"), 0.0, largest)
    scores, highest = values, largest
    if DRAWS:
        temperature = tl.load(temperatures + row)
        if temperature > 0:
            noise = _gumbel(tl.load(keys + row), tl.load(positions + row), token)
            scores = values / temperature + noise
            highest = tl.max(scores, 0)
    at, size = row * tl.num_programs(0) + span, tl.num_programs(0) * tl.num_programs(1)
    tl.store(numbers + at, highest)
    tl.store(numbers + size + at, largest)
    tl.store(numbers + 2 * size + at, tl.sum(tl.exp(values - base), 0))
    tl.store(tokens + at, _first_of(scores, token, highest))
    tl.store(finite + at, tl.min((tl.abs(read) < float("inf")).to(tl.int32), 0))


@triton.jit
def join_spans(numbers, tokens, finite, chosen, confidence, numeric, spans, SPANS: tl.constexpr):
    """Joins the spans of a row: its token (long), the probability of its largest logit, and whether all are numbers."""
    row, span = tl.program_id(0), tl.arange(0, SPANS)
    kept, at, size = span < spans, row * spans + span, spans * tl.num_programs(0)
    scores = tl.load(numbers + at, mask=kept, other=float("-inf"))
    token = tl.load(tokens + at, mask=kept, other=_NO_TOKEN)
    tl.store(chosen + row, _first_of(scores, token, tl.max(scores, 0)).to(tl.int64))
    own = tl.load(numbers + size + at, mask=kept, other=float("-inf"))
    exponentials = tl.load(numbers + 2 * size + at, mask=kept, other=0)
    largest = tl.max(own, 0)
    base = tl.where(largest == float("-inf"), 0.0, largest)
    tl.store(confidence + row, 1 / tl.sum(exponentials * tl.exp(own - base), 0))
    tl.store(numeric + row, tl.min(tl.load(finite + at, mask=kept, other=1), 0) != 0)


def choose(logits: torch.Tensor, draws: Draws | None = None) -> Logits:
    """What is chosen from logits, without waiting for the device.

    Args:
        logits: ``[rows, vocab]``, divided and capped as the model does it; the entries of a row side by side.
        draws: how tokens are drawn; without it the tokens of the largest logits are chosen.

    Returns:
        The logits with the tokens, of equal ones the lowest, the confidences, and whether all logits are numbers.
    """
    (rows, vocab), spans = logits.shape, triton.cdiv(logits.shape[1], SPAN)
    assert logits.stride(1) == 1, "the logits of a row have to stand side by side"
    numbers = logits.new_empty(3, rows, spans, dtype=torch.float32)
    tokens, finite = (logits.new_empty(rows, spans, dtype=torch.int32) for _ in range(2))
    best, confidence = logits.new_empty(rows, dtype=torch.long), logits.new_empty(rows, dtype=torch.float32)
    numeric = logits.new_empty(rows, dtype=torch.bool)
    drawing = (tokens, tokens, numbers) if draws is None else draws
    sizes = vocab, logits.stride(0)
    choose_spans[spans, rows](
        logits, *drawing, numbers, tokens, finite, *sizes, DRAWS=draws is not None, enable_fp_fusion=True
    )
    counts = {"SPANS": triton.next_power_of_2(spans), "num_warps": 1}
    join_spans[(rows,)](numbers, tokens, finite, best, confidence, numeric, spans, **counts, enable_fp_fusion=True)
    return Logits(logits, best, confidence, numeric, drawn=draws is not None)


def choose_for(logits: torch.Tensor, forward: Forward) -> Logits:
    """What is chosen from the logits ``[rows, vocab]`` of a forward; drawn in the parts that have a drawing."""
    return choose(logits, Draws.send(forward.drawings, logits.device))
