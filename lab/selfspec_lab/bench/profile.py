"""``selfspec profile``: the cost model of one model on one device, in one dtype and runtime."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from transformers import PreTrainedModel

from selfspec.engine import Engine
from selfspec.methods import make_method
from selfspec.runtimes.latency import PartSeconds, latency_profile, measure_parts
from selfspec.runtimes.latency_store import keep_profile, read_profile
from selfspec.runtimes.target import Target
from selfspec_lab.bench.contest import Sample
from selfspec_lab.bench.cost import StepBytes
from selfspec_lab.bench.memory import copy_bytes_per_second
from selfspec_lab.bench.overhead_figures import over_repeats, plain_figures
from selfspec_lab.bench.stamp import make_stamp
from selfspec_lab.bench.timing import Measured
from selfspec_lab.bench.verify_rows import ROW_COUNTS

_REPEATS = 3
_PLAIN_TOKENS = 48
_PROMPT_TOKENS = 64


def measure_profile(target: Target, progress: Callable[[str], None] = lambda _: None) -> dict[str, Any]:
    """Measures the cost model.

    Args:
        target: the model.
        progress: is told what goes on.

    Returns:
        ``bytes`` of each part; by number of ``rows`` the seconds of one attention branch at several ``contexts`` with
        the line through them, of one MLP branch, of the head, and of the rest (layout and embedding); ``latencies``,
        the ``LatencyProfile`` of one row; ``copy_bytes_per_second``; ``plain.{tokens_per_second,
        bandwidth_fraction}``. Ready for JSON.
    """
    costs = StepBytes(target)
    rows: dict[str, PartSeconds] = {}
    for count in _fitting_rows(target):
        progress(f"parts of a forward of {count} rows")
        rows[str(count)] = measure_parts(target, rows=count)
    progress("copy bandwidth and plain decoding")
    copies = [copy_bytes_per_second(target.device) for _ in range(_REPEATS)]
    return {
        "benchmark": "profile",
        "stamp": make_stamp(target.device),
        "dtype": str(target.dtype).removeprefix("torch."),
        "device": str(target.device),
        "runtime": target.runtime,
        "layers": target.layer_count,
        "bytes": part_bytes(target, costs),
        "rows": {count: _row_figures(parts) for count, parts in rows.items()},
        "latencies": latency_profile(target, rows["1"]).to_dict(),
        **Measured.of(copies).fields("copy_bytes_per_second"),
        "plain": _plain(target, costs, copies),
    }


def kept_profile(target: Target, progress: Callable[[str], None] = lambda _: None) -> dict[str, Any]:
    """The profile that is kept for this model, or else a new one, which is then kept.

    Args:
        target: the model.
        progress: is told what goes on.
    """
    profile = read_profile(target)
    if profile is None:
        profile = measure_profile(target, progress)
        keep_profile(target, profile)
    return profile


def part_bytes(target: Target, costs: StepBytes) -> dict[str, int]:
    """Bytes that a forward reads of each part, all layers together; ``slot`` is one token's keys and values.

    ``embedding`` is what the table holds, of which a forward reads single rows; a tied head is the same table again.
    """
    model: Any = target.model
    return {
        "attention": sum(costs.sublayers[::2]),
        "mlp": sum(costs.sublayers[1::2]),
        "head": costs.outside,
        "embedding": sum(weight.nbytes for weight in model.get_input_embeddings().parameters()),
        "slot": costs.slot,
    }


def _fitting_rows(target: Target) -> list[int]:
    return [count for count in ROW_COUNTS if 4 * count <= target.context_limit] or [1]


def _row_figures(parts: PartSeconds) -> dict[str, Any]:
    slope, base = parts.attention_line
    return {
        "contexts": list(parts.contexts),
        "attention": list(parts.attention),
        "attention_per_token": slope,
        "attention_base": base,
        "mlp": parts.mlp,
        "head": parts.head,
        "rest": parts.embedding,
    }


def _plain(target: Target, costs: StepBytes, copies: Sequence[float]) -> dict[str, Any]:
    model: PreTrainedModel = target.model
    engine = Engine(model, None, make_method("autoregressive", target))
    tokens = max(2, min(_PLAIN_TOKENS, target.context_limit // 2))
    generator = torch.Generator().manual_seed(0)
    length = min(_PROMPT_TOKENS, target.context_limit - tokens)
    prompt = torch.randint(target.vocab_size, (length,), generator=generator).tolist()
    figures = []
    for repeat, copy in enumerate([copies[0], *copies]):
        result = engine.generate(prompt, max_new_tokens=tokens, ignore_eos=True)
        sample = Sample(result.token_ids, result.seconds - result.prefill_seconds, result.peak_memory_bytes, result)
        if repeat:  # the first one warms up
            figures.append(plain_figures([sample], costs, copy))
    return over_repeats(figures)
