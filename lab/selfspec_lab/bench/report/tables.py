"""The tables of a report, independent of Markdown and HTML."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

NOTHING = "–"
DIFFERS = "≠"
"""Marks a candidate with outputs that differ from plain decoding."""

_POSITIONS = 6
_MIB = 2**20


@dataclass(frozen=True)
class Cell:
    """A cell of a table.

    Attributes:
        text: plain text, not yet escaped.
        marked: whether to show it as a warning.
    """

    text: str
    marked: bool = False


@dataclass(frozen=True)
class Table:
    """A table whose first column names the row.

    Attributes:
        header: names of the columns.
        rows: each with one cell per column.
    """

    header: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]


Column = Callable[[Mapping[str, Any]], Cell]
"""The cell of a column for a candidate of the summary."""


def by_speedup(summary: Mapping[str, Any]) -> list[str]:
    """Candidates by descending overall speedup; those without a speedup last."""
    candidates = summary["candidates"]

    def key(name: str) -> tuple[bool, float]:
        speedup = candidates[name]["overall"]["speedup"]
        return speedup is None, -(speedup or 0.0)

    return sorted(candidates, key=key)


def main_table(summary: Mapping[str, Any]) -> Table:
    """The main figures, one row per candidate."""
    columns: dict[str, Column] = {
        "speedup (95 % interval)": speedup_cell,
        "identical outputs": identical_cell,
        "tokens/s": _number("tokens_per_second", "{:.1f}"),
        "over transformers": _number("speedup_over_transformers", "{:.2f}×"),
        "acceptance": _number("acceptance_rate", "{:.2f}"),
        "mean length": _number("mean_generated_length", "{:.2f}"),
        "ideal speedup": _number("ideal_speedup", "{:.2f}×"),
        "efficiency": _number("efficiency", "{:.2f}"),
        "first token, ms": _number("time_to_first_token", "{:.0f}", 1000),
        "selection": _number("selection_share", "{:.1%}"),
    }
    if not _has(summary, "speedup_over_transformers"):
        del columns["over transformers"]
    return _overall_table(summary, columns)


def draft_table(summary: Mapping[str, Any]) -> Table:
    """Figures of the drafts and the papers' figures of efficiency, one row per candidate."""
    return _overall_table(
        summary,
        {
            "draft length": _number("mean_draft_length", "{:.2f}"),
            "accepted 1st, 2nd, … token": _positions,
            "eTPL": _number("etpl", "{:.4f}"),
            "TPT, measured": _number("measured_tpt", "{:.1f}"),
            "TPT, predicted": _number("predicted_tpt", "{:.1f}"),
            "rounds": _number("rounds", "{:.0f}"),
            "tokens": _number("tokens", "{:.0f}"),
            "prompts": _number("prompts", "{:.0f}"),
            "failures": _failures,
        },
    )


def cost_table(summary: Mapping[str, Any]) -> Table:
    """Time and memory, one row per candidate."""
    return _overall_table(
        summary,
        {
            "speedup with prefill": _number("speedup_with_prefill", "{:.2f}×"),
            "draft": _number("draft_share", "{:.0%}"),
            "verify": _number("verify_share", "{:.0%}"),
            "select": _number("selection_share", "{:.1%}"),
            "other": _number("other_share", "{:.0%}"),
            "peak, MiB": _number("peak_memory_bytes", "{:.0f}", 1 / _MIB),
            "memory above plain": _memory_above_plain,
        },
    )


def category_table(summary: Mapping[str, Any]) -> Table:
    """Speedups, one row per candidate, one column per category."""
    candidates, categories = summary["candidates"], list(summary["categories"])
    rows = [
        (Cell(name), *(_category_cell(candidates[name], category) for category in categories))
        for name in by_speedup(summary)
    ]
    header = [f"{category} ({count})" for category, count in summary["categories"].items()]
    return Table(("candidate", *header), tuple(rows))


def settings_table(summary: Mapping[str, Any]) -> Table:
    """Settings of the methods that have any."""
    settings = {name: candidate["settings"] for name, candidate in summary["candidates"].items()}
    rows = [
        (Cell(name), Cell(", ".join(f"{key}={value}" for key, value in values.items())))
        for name, values in settings.items()
        if values
    ]
    return Table(("method", "settings"), tuple(rows))


def speedup_cell(candidate: Mapping[str, Any]) -> Cell:
    """A candidate's overall speedup with its interval."""
    figures = candidate["overall"]
    if figures["speedup"] is None:
        return _no_speedup(candidate)
    low, high = figures["speedup_interval"]
    return Cell(f"{figures['speedup']:.2f}× ({low:.2f} to {high:.2f})")


def identical_cell(candidate: Mapping[str, Any]) -> Cell:
    """Number of outputs identical to plain decoding; marked if some differ."""
    figures = candidate["overall"]
    if not figures["compared"]:
        return Cell(NOTHING)
    text = f"{figures['identical']}/{figures['compared']}"
    return Cell(f"{text}, {figures['differing']} differ", marked=True) if figures["differing"] else Cell(text)


def _category_cell(candidate: Mapping[str, Any], category: str) -> Cell:
    figures = candidate["categories"][category]
    if figures["speedup"] is None:
        return _no_speedup(candidate)
    text = f"{figures['speedup']:.2f}×"
    return Cell(f"{text}\N{NO-BREAK SPACE}{DIFFERS}", marked=True) if figures["differing"] else Cell(text)


def _no_speedup(candidate: Mapping[str, Any]) -> Cell:
    return Cell("failed", marked=True) if candidate["errors"] else Cell(NOTHING)


def _overall_table(summary: Mapping[str, Any], columns: Mapping[str, Column]) -> Table:
    candidates = summary["candidates"]
    rows = [(Cell(name), *(column(candidates[name]) for column in columns.values())) for name in by_speedup(summary)]
    return Table(("candidate", *columns), tuple(rows))


def _number(name: str, form: str, factor: float = 1.0) -> Column:
    def cell(candidate: Mapping[str, Any]) -> Cell:
        value = candidate["overall"][name]
        return Cell(NOTHING if value is None else form.format(value * factor))

    return cell


def _positions(candidate: Mapping[str, Any]) -> Cell:
    shares: Sequence[float] = candidate["overall"]["accepted_by_position"] or ()
    text = " ".join(f"{share:.2f}" for share in shares[:_POSITIONS])
    return Cell(f"{text} …" if len(shares) > _POSITIONS else text or NOTHING)


def _memory_above_plain(candidate: Mapping[str, Any]) -> Cell:
    share = candidate["overall"]["memory_above_plain"]
    return Cell(NOTHING if share is None else f"{round(share, 3) + 0.0:+.1%}")  # + 0.0 turns -0.0 into 0.0


def _failures(candidate: Mapping[str, Any]) -> Cell:
    failures = candidate["overall"]["failures"]
    return Cell(str(failures), marked=failures > 0)


def _has(summary: Mapping[str, Any], name: str) -> bool:
    return any(candidate["overall"][name] is not None for candidate in summary["candidates"].values())
