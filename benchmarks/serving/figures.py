"""Figures of a load: pure functions of the answers that came."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from serving.chat import Answer


def percentile(values: Sequence[float], percent: float) -> float:
    """A percentile by nearest rank: the smallest value that ``percent`` of the values do not exceed.

    Args:
        values: at least one.
        percent: above 0, up to 100.
    """
    ordered = sorted(values)
    place = -(-len(ordered) * percent // 100)  # rounded up
    return ordered[max(1, int(place)) - 1]


def figures_of(answers: Sequence[Answer]) -> dict[str, float]:
    """The figures of the answers of one level of load.

    Args:
        answers: all of them, at least one.

    Returns:
        ``tokens_per_second`` from the first request to the last end, ``tokens`` in all, and in seconds the median and
        99th percentile of the time to the first token (``first_p50``, ``first_p99``), of the time between pieces of
        text as they arrive (``gap_p50``, ``gap_p99``), and of each answer's mean time per token after the first
        (``token_p50``, ``token_p99``).
    """
    tokens = sum(answer.tokens for answer in answers)
    seconds = max(answer.ended for answer in answers) - min(answer.began for answer in answers)
    found = {"tokens_per_second": tokens / seconds, "tokens": tokens, "seconds": seconds}
    series = {
        "first": [answer.first_seconds for answer in answers],
        "gap": [gap for answer in answers for gap in answer.gaps] or [0.0],
        "token": [answer.seconds_per_token for answer in answers],
    }
    for name, values in series.items():
        found[f"{name}_p50"], found[f"{name}_p99"] = percentile(values, 50), percentile(values, 99)
    return found


def summarise(samples: Sequence[dict[str, Any]], figure: str) -> dict[tuple[str, int], tuple[float, float, float]]:
    """Median, lowest and highest of a figure over the repeats.

    Args:
        samples: with ``server``, ``clients`` and the figure.
        figure: its name.

    Returns:
        The three by server and number of clients, in the order of the samples.
    """
    found: dict[tuple[str, int], list[float]] = {}
    for sample in samples:
        found.setdefault((sample["server"], sample["clients"]), []).append(sample[figure])
    return {key: (statistics.median(values), min(values), max(values)) for key, values in found.items()}


def table(samples: Sequence[dict[str, Any]], figure: str, *, scale: float = 1.0, digits: int = 0) -> str:
    """A figure as a table in Markdown: a row for each server, a column for each number of clients.

    Args:
        samples: with ``server``, ``clients`` and the figure.
        figure: its name.
        scale: to multiply with.
        digits: after the point.
    """
    medians = summarise(samples, figure)
    clients = sorted({count for _, count in medians})
    lines = [
        "| server | " + " | ".join(str(count) for count in clients) + " |",
        "| --- |" + " --- |" * len(clients),
    ]
    for server in dict.fromkeys(name for name, _ in medians):
        cells = [_cell(medians.get((server, count)), scale, digits) for count in clients]
        lines.append(f"| `{server}` | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def ratios_of(samples: Sequence[dict[str, Any]]) -> list[str]:
    """Our server with 16 clients ÷ with one, and ÷ other servers, as lines of text.

    Args:
        samples: with ``server``, ``clients`` and ``tokens_per_second``; what was not measured has no line.
    """
    speed = {key: median for key, (median, _, _) in summarise(samples, "tokens_per_second").items()}
    lines = []
    for name in dict.fromkeys(name for name, _ in speed if name.startswith("selfspec:")):
        if {(name, 1), (name, 16)} <= speed.keys():
            lines.append(f"`{name}`, 16 clients ÷ one: {speed[name, 16] / speed[name, 1]:.2f}")
        ratios = [
            f"{speed[name, clients] / other:.2f} at {clients} (`{best}`)"
            for clients in sorted({count for _, count in speed})
            for other, best in [max(_others(speed, clients), default=(0.0, ""))]
            if other and (name, clients) in speed
        ]
        if ratios:
            lines.append(f"`{name}` ÷ the best other server, by number of clients: {', '.join(ratios)}")
    return lines


def _others(speed: dict[tuple[str, int], float], clients: int) -> list[tuple[float, str]]:
    """The speeds of other servers at a number of clients, with their names."""
    return [
        (value, name)
        for (name, count), value in speed.items()
        if count == clients and not name.startswith(("selfspec:", "engine:"))
    ]


def _cell(values: tuple[float, float, float] | None, scale: float, digits: int) -> str:
    if values is None:
        return "-"
    median, low, high = (f"{scale * value:.{digits}f}" for value in values)
    return median if low == high else f"{median} ({low}-{high})"
