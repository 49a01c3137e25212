"""Medians, spreads and ratios of what was measured, and the table of them."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

PLAIN, AUTO, LLAMA = "plain", "auto", "llama.cpp"
LABELS = {
    "tokens_per_second": "chat answers, tokens/s",
    "sampled_tokens_per_second": "the same sampled, tokens/s",
    "edit_tokens_per_second": "edits and extraction, tokens/s",
    "call_tokens_per_second": "calls of tools by a schema, tokens/s",
    "busy_tokens_per_second": "beside one busy process, tokens/s",
    "prompt_tokens_per_second": "prompt of 512 tokens, tokens/s",
    "long_prompt_tokens_per_second": "text of 4,096 tokens, tokens/s",
    "after_long_tokens_per_second": "after that text, tokens/s",
    **{f"rows_{rows}": f"{rows} rows ÷ 1" for rows in (2, 4, 8, 16)},
    "loaded_bytes": "resident after load, MiB",
    "peak_bytes": "resident at the peak, MiB",
    "first_token_seconds": "load to first token, seconds",
    "perplexity": "perplexity",
}
_MEBIBYTE = 2**20

Samples = Mapping[str, Mapping[str, Sequence[float]]]
"""By figure and candidate, one number a repeat."""


def spread(samples: Sequence[float]) -> dict[str, float]:
    """Median, lowest and highest."""
    return {"median": statistics.median(samples), "lowest": min(samples), "highest": max(samples)}


def figures(samples: Samples) -> dict[str, dict[str, Any]]:
    """By figure and candidate the spread, and that of the ratios to llama.cpp and to plain of the same repeat."""
    found: dict[str, dict[str, Any]] = {}
    for figure, by_name in samples.items():
        found[figure] = {name: spread(values) for name, values in by_name.items()}
        for to, other in (("to_llama_cpp", LLAMA), ("to_plain", PLAIN)):
            base = by_name.get(other, ())
            for name, values in by_name.items():
                if name != other and len(base) == len(values):
                    ratios = [value / each for value, each in zip(values, base, strict=True)]
                    found[figure][name][to] = spread(ratios)
    return found


def perplexity(windows: Mapping[str, Sequence[float]], predicted: int, reference: str) -> dict[str, dict[str, float]]:
    """Perplexities, and their ratio to a reference with the standard error of its logarithm over the windows.

    Args:
        windows: by candidate the negative log-likelihood of each window.
        predicted: tokens of a window that are predicted.
        reference: a candidate.
    """
    found = {}
    for name, values in windows.items():
        found[name] = {"perplexity": math.exp(statistics.fmean(values) / predicted)}
        if reference in windows and name != reference:
            gaps = [(own - other) / predicted for own, other in zip(values, windows[reference], strict=True)]
            error = statistics.stdev(gaps) / len(gaps) ** 0.5 if len(gaps) > 1 else math.nan
            found[name] |= {"ratio": math.exp(statistics.fmean(gaps)), "standard_error": error}
    return found


def table(result: Mapping[str, Any]) -> str:
    """The figures of a result as a table in Markdown: medians, lowest and highest, and the ratio to llama.cpp."""
    names = result["candidates"]
    lines = ["| | " + " | ".join(names) + " |", "| --- " * (1 + len(names)) + "|"]
    found = result["figures"]
    for figure, label in LABELS.items():
        if figure in found:
            cells = (_cell(found[figure].get(name), figure) for name in names)
            lines.append(f"| {label} | " + " | ".join(cells) + " |")
    for figure, label in LABELS.items():
        ratio = found.get(figure, {}).get(AUTO, {}).get("to_plain") if figure.endswith("tokens_per_second") else None
        if ratio is not None:
            what = label.removesuffix(", tokens/s")
            lines.append(
                f"| {what}, ÷ plain | "
                + " | ".join(_range(ratio, 1, 2) if name == AUTO else "" for name in names)
                + " |"
            )
    bandwidth = found.get("read_bytes_per_second")
    if bandwidth and "tokens_per_second" in found:
        read = bandwidth["machine"]["median"]
        shares = (result["file"]["step_bytes"] * found["tokens_per_second"][name]["median"] / read for name in names)
        lines.append(
            "| bytes of a step × tokens/s ÷ read bandwidth | " + " | ".join(f"{each:.2f}" for each in shares) + " |"
        )
        lines += ["", f"Read bandwidth: {_range(bandwidth['machine'], 1e-9, 1)} GB/s."]
    return "\n".join(lines)


def _cell(found: Mapping[str, Any] | None, figure: str) -> str:
    if found is None:
        return ""
    if figure == "perplexity":
        ratio = f"; {found['ratio']:.4f} ± {found['standard_error']:.4f}" if "ratio" in found else ""
        return f"{found['perplexity']:.3f}{ratio}"
    scale, digits = (1 / _MEBIBYTE, 0) if figure.endswith("bytes") else (1.0, 2 if "rows" in figure else 1)
    ratio = f"; **{found['to_llama_cpp']['median']:.2f}**" if "to_llama_cpp" in found else ""
    return _range(found, scale, digits) + ratio


def _range(found: Mapping[str, float], scale: float, digits: int) -> str:
    median, lowest, highest = (f"{found[name] * scale:,.{digits}f}" for name in ("median", "lowest", "highest"))
    return median if lowest == highest else f"{median} ({lowest} to {highest})"
