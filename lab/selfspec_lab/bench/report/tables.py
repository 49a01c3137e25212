"""What the reports of a run say in tables, before it becomes Markdown or HTML."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

NOTHING = "–"
DIFFERS = "≠"
"""Stands behind a contender that wrote other tokens than plain decoding."""

_POSITIONS = 6
_MIB = 2**20


@dataclass(frozen=True)
class Cell:
    """A field of a table.

    Attributes:
        text: what it says; plain text that still has to be escaped.
        marked: to be shown as a warning.
    """

    text: str
    marked: bool = False


@dataclass(frozen=True)
class Table:
    """A table whose first column names the row.

    Attributes:
        header: over the columns.
        rows: as many cells each.
    """

    header: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]


Column = Callable[[Mapping[str, Any]], Cell]
"""What a column says of a contender of the summary."""


def by_speedup(summary: Mapping[str, Any]) -> list[str]:
    """The contenders, the one with the highest overall speedup first, those without one last."""
    contenders = summary["contenders"]

    def key(name: str) -> tuple[bool, float]:
        speedup = contenders[name]["overall"]["speedup"]
        return speedup is None, -(speedup or 0.0)

    return sorted(contenders, key=key)


def main_table(summary: Mapping[str, Any]) -> Table:
    """One row a contender with the figures that matter most."""
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
    """One row a contender: how its drafts fared, and the papers' figures of efficiency."""
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
    """One row a contender: time and memory."""
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
    """Speedups, one row a contender, one column a category."""
    contenders, categories = summary["contenders"], list(summary["categories"])
    rows = [
        (Cell(name), *(_category_cell(contenders[name], category) for category in categories))
        for name in by_speedup(summary)
    ]
    header = [f"{category} ({count})" for category, count in summary["categories"].items()]
    return Table(("contender", *header), tuple(rows))


def settings_table(summary: Mapping[str, Any]) -> Table:
    """The settings of every method that has any."""
    settings = {name: contender["settings"] for name, contender in summary["contenders"].items()}
    rows = [
        (Cell(name), Cell(", ".join(f"{key}={value}" for key, value in values.items())))
        for name, values in settings.items()
        if values
    ]
    return Table(("method", "settings"), tuple(rows))


def speedup_cell(contender: Mapping[str, Any]) -> Cell:
    """Its overall speedup with the interval."""
    figures = contender["overall"]
    if figures["speedup"] is None:
        return _no_speedup(contender)
    low, high = figures["speedup_interval"]
    return Cell(f"{figures['speedup']:.2f}× ({low:.2f} to {high:.2f})")


def identical_cell(contender: Mapping[str, Any]) -> Cell:
    """How many outputs have the tokens of plain decoding, as a warning where not all have."""
    figures = contender["overall"]
    if not figures["compared"]:
        return Cell(NOTHING)
    text = f"{figures['identical']}/{figures['compared']}"
    return Cell(f"{text}, {figures['differing']} differ", marked=True) if figures["differing"] else Cell(text)


def _category_cell(contender: Mapping[str, Any], category: str) -> Cell:
    figures = contender["categories"][category]
    if figures["speedup"] is None:
        return _no_speedup(contender)
    text = f"{figures['speedup']:.2f}×"
    return Cell(f"{text}\N{NO-BREAK SPACE}{DIFFERS}", marked=True) if figures["differing"] else Cell(text)


def _no_speedup(contender: Mapping[str, Any]) -> Cell:
    return Cell("failed", marked=True) if contender["errors"] else Cell(NOTHING)


def _overall_table(summary: Mapping[str, Any], columns: Mapping[str, Column]) -> Table:
    contenders = summary["contenders"]
    rows = [(Cell(name), *(column(contenders[name]) for column in columns.values())) for name in by_speedup(summary)]
    return Table(("contender", *columns), tuple(rows))


def _number(name: str, form: str, factor: float = 1.0) -> Column:
    def cell(contender: Mapping[str, Any]) -> Cell:
        value = contender["overall"][name]
        return Cell(NOTHING if value is None else form.format(value * factor))

    return cell


def _positions(contender: Mapping[str, Any]) -> Cell:
    shares: Sequence[float] = contender["overall"]["accepted_by_position"] or ()
    text = " ".join(f"{share:.2f}" for share in shares[:_POSITIONS])
    return Cell(f"{text} …" if len(shares) > _POSITIONS else text or NOTHING)


def _memory_above_plain(contender: Mapping[str, Any]) -> Cell:
    share = contender["overall"]["memory_above_plain"]
    return Cell(NOTHING if share is None else f"{round(share, 3) + 0.0:+.1%}")  # which makes a zero of -0.0


def _failures(contender: Mapping[str, Any]) -> Cell:
    failures = contender["overall"]["failures"]
    return Cell(str(failures), marked=failures > 0)


def _has(summary: Mapping[str, Any], name: str) -> bool:
    return any(contender["overall"][name] is not None for contender in summary["contenders"].values())
