"""The cost model of one model on one device, in one dtype and runtime: what ``selfspec profile`` measures and saves."""

import statistics
from collections.abc import Callable, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch

import selfspec
from selfspec import Engine
from selfspec.methods import make_method
from selfspec.runtimes.costs.parts import PartSeconds, latency_profile, measure_parts
from selfspec.runtimes.costs.store import LATENCIES, PROFILES, kept_file
from selfspec.runtimes.target import Target
from selfspec_lab.measuring.bandwidth import copy_bytes_per_second
from selfspec_lab.measuring.step_bytes import StepBytes

ROW_COUNTS = (1, 2, 4, 8, 16, 32, 64)
"""Rows of the forwards that are measured."""

_REPEATS = 3
_PLAIN_TOKENS = 48
_PROMPT_TOKENS = 64


def measure_profile(target: Target, progress: Callable[[str], None] = lambda _: None) -> dict[str, Any]:
    """Measures the cost model.

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
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "versions": {"selfspec": selfspec.__version__, "torch": torch.__version__},
        "dtype": target.weights,
        "device": str(target.device),
        "runtime": target.runtime,
        "layers": target.layer_count,
        "bytes": part_bytes(target, costs),
        "rows": {count: _row_figures(parts) for count, parts in rows.items()},
        "latencies": latency_profile(target, rows["1"]).to_dict(),
        **_with_spread("copy_bytes_per_second", copies),
        "plain": _plain(target, costs, copies),
    }


def profile_path(target: Target) -> Path:
    """The file of a model's profile, whether it exists or not."""
    return kept_file(target, PROFILES).path


def read_profile(target: Target) -> dict[str, Any] | None:
    """The kept profile of a model, if there is one that can be read; what ``selfspec profile`` prints."""
    return kept_file(target, PROFILES).read()


def keep_profile(target: Target, profile: dict[str, Any]) -> Path | None:
    """Writes a model's profile, replacing an older one and kept latencies; its path, or ``None`` if that failed."""
    path = kept_file(target, PROFILES).write(profile)
    if path is not None:
        kept_file(target, LATENCIES).remove()
    return path


def kept_profile(target: Target, progress: Callable[[str], None] = lambda _: None) -> dict[str, Any]:
    """Reads the saved profile of this model; without one, measures and saves it."""
    profile = read_profile(target)
    if profile is None:
        profile = measure_profile(target, progress)
        keep_profile(target, profile)
    return profile


def part_bytes(target: Target, costs: StepBytes) -> dict[str, int]:
    """The bytes that a forward reads of each part, all layers together.

    ``slot`` is one token's keys and values. ``embedding`` is the whole table, of which a forward reads single rows; a
    tied head is the same table.
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
    """The speed of plain decoding, and the share of the copy bandwidth that its bytes are."""
    engine = Engine(target.model, None, make_method("autoregressive", target))
    tokens = max(2, min(_PLAIN_TOKENS, target.context_limit // 2))
    generator = torch.Generator().manual_seed(0)
    length = min(_PROMPT_TOKENS, target.context_limit - tokens)
    prompt = torch.randint(target.vocab_size, (length,), generator=generator).tolist()
    # The first token comes from the prefill; each step sees the tokens before it and its own.
    steps = range(length + 1, length + tokens)
    step_bytes = sum(costs.target_step(context) for context in steps) / len(steps)
    speeds = []
    for _ in range(1 + len(copies)):
        result = engine.generate(prompt, max_new_tokens=tokens, ignore_eos=True)
        speeds.append(len(steps) / (result.seconds - result.prefill_seconds))
    speeds = speeds[1:]  # the first one warms up
    fractions = [step_bytes * speed / copy for speed, copy in zip(speeds, copies, strict=True)]
    return {
        **_with_spread("tokens_per_second", speeds),
        **_with_spread("bandwidth_fraction", fractions),
        "step_bytes": step_bytes,
    }


def _with_spread(name: str, samples: Sequence[float]) -> dict[str, Any]:
    """The median by its name, and the lowest and highest sample as ``…_spread``."""
    return {name: statistics.median(samples), f"{name}_spread": [min(samples), max(samples)]}
