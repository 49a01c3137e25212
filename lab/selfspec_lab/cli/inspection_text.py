"""An inspection as text, fitted to the terminal's width and readable without colours."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from statistics import fmean

from rich.console import Console
from rich.table import Table
from rich.text import Text

from selfspec.cli.api import draft_table, plain_reasons
from selfspec.types import Round
from selfspec_lab.inspection import PHASES, Inspection, Stretch, condense, draft_kind, merge_equal, shares

ATTENTION, MLP = "color(214)", "color(33)"
"""Orange and blue, distinguishable with any colour vision."""

MOST_LINES = 24
"""Number of lines of the table of kept sublayers above which short neighbours are joined."""

_LEVELS, _ASCII_LEVELS = " ▁▂▃▄▅▆▇█", " .:-=+*#@"
_LABEL, _RANGE, _FIGURES = 12, 22, 50
"""Columns for the name of a curve, for its range, and for the figures beside the layers."""


Glyph = tuple[str, str]
"""A character and its style."""


def print_inspection(console: Console, inspection: Inspection) -> None:
    """Prints kept sublayers, acceptance and times, fitted to the console's width, colours and encoding."""
    records = inspection.generation.rounds
    if not records:
        console.print("no rounds: the output ended with its first token, which comes from the prefill")
        return
    console.print()
    console.print(_layers_table(console, inspection))
    if any(draft_kind(record) == "layers" for record in records):
        console.print(_legend(console, inspection))
    if parts := draft_table(records):
        console.print()
        console.print(_parts_table(parts))
        if reasons := plain_reasons(records):
            console.print(reasons, style="dim")
    console.print()
    console.print(_curves(console, records))
    console.print()
    console.print(_time_table(inspection))
    if inspection.device != "cpu":
        console.print(
            "A phase ends when its work is queued; the device may finish that work in a later phase.", style="dim"
        )


def _glyphs(console: Console) -> tuple[Glyph, Glyph, Glyph, Glyph]:
    """The glyphs of a layer that keeps neither sublayer, only the attention, only the MLP, or both."""
    if console.options.ascii_only:
        return (".", "dim"), ("A", ATTENTION), ("M", MLP), ("#", "")
    both = ("█", "") if console.color_system is None else ("▀", f"{ATTENTION} on {MLP}")
    return ("·", "dim"), ("▀", ATTENTION), ("▄", MLP), both


def _layers_table(console: Console, inspection: Inspection) -> Table:
    records, layers = inspection.generation.rounds, inspection.sublayers // 2
    with_threshold = any(record.threshold is not None for record in records)
    table = _table("rounds", f"layers 0-{layers - 1}", "drafted", "accepted", "tokens", *["threshold"] * with_threshold)
    table.columns[0].justify, table.columns[1].justify = "right", "left"
    each, glyphs = _layers_a_column(console, inspection), _glyphs(console)
    for stretch in condense(merge_equal(records), MOST_LINES):
        table.add_row(_rounds(stretch), _drafting(stretch, each, glyphs), *_figures(stretch, with_threshold))
    whole = Stretch(1, records)
    kept = "" if whole.attention_share is None else f"{whole.attention_share:.0%}/{whole.mlp_share:.0%} kept"
    table.add_row("all", kept, *_figures(whole, with_threshold), style="bold")
    return table


def _parts_table(parts: Sequence[tuple[str, ...]]) -> Table:
    """What each part of the method drafted."""
    header, *rows = parts
    table = _table(*header)
    for row in rows:
        table.add_row(*row)
    return table


def _table(*headers: str) -> Table:
    """A table without lines; the first column has names, the others have figures."""
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="dim")
    for header in headers:
        table.add_column(header, justify="right" if table.columns else "left", no_wrap=True)
    return table


def _layers_a_column(console: Console, inspection: Inspection) -> int:
    """Number of layers per column of text, so that all layers fit beside the figures."""
    return -(-(inspection.sublayers // 2) // max(8, console.width - _FIGURES))


def _rounds(stretch: Stretch) -> str:
    return f"{stretch.first}" if stretch.first == stretch.last else f"{stretch.first}-{stretch.last}"


def _figures(stretch: Stretch, with_threshold: bool) -> list[str]:
    rate, threshold = stretch.acceptance_rate, stretch.threshold
    figures = [
        f"{stretch.drafted:.2f}",
        "-" if rate is None else f"{rate:.0%}",
        f"{stretch.mean_generated_length:.2f}",
    ]
    if with_threshold:
        figures.append("-" if threshold is None else f"{threshold:.3f}")
    return figures


def _drafting(stretch: Stretch, each: int, glyphs: Sequence[Glyph]) -> Text:
    """One glyph per ``each`` layers, or words if no layers drafted."""
    if stretch.kind != "layers":
        return Text("token lookup" if stretch.kind == "tokens" else "no draft", style="italic dim")
    text = Text()
    for first in range(0, len(stretch.kept_shares), 2 * each):
        part = stretch.kept_shares[first : first + 2 * each]
        attention, mlp = fmean(part[::2]) >= 0.5, fmean(part[1::2]) >= 0.5
        text.append(*glyphs[attention + 2 * mlp])
    return text


def _legend(console: Console, inspection: Inspection) -> Text:
    text = Text("kept:", style="dim")
    for glyph, meaning in zip(_glyphs(console), ("neither", "attention", "MLP", "both"), strict=True):
        text.append("  ").append(*glyph).append(f" {meaning}")
    each = _layers_a_column(console, inspection)
    return text if each == 1 else text.append(f"\none column is {each} layers")


def _curves(console: Console, records: Sequence[Round]) -> Table:
    """Draft length, acceptance, threshold and times over the rounds, with one or more rounds per column."""
    each = -(-len(records) // max(8, console.width - _LABEL - _RANGE))
    levels = _ASCII_LEVELS if console.options.ascii_only else _LEVELS
    table = Table.grid(padding=(0, 2, 0, 0))
    for _ in range(3):
        table.add_column(no_wrap=True)
    table.add_row("", f"one column is {'one round' if each == 1 else f'{each} rounds'}", style="dim")
    for label, values, low, high, form in _series(records):
        bars = [_bar(values[at : at + each], low, high, levels) for at in range(0, len(values), each)]
        known = [value for value in values if value is not None]
        table.add_row(label, "".join(bars), f"{min(known):{form}} to {max(known):{form}}")
    return table


def _series(records: Sequence[Round]) -> Iterator[tuple[str, Sequence[float | None], float, float, str]]:
    """Yields for each curve its name, values, lower and upper limit of its axis, and format of a value."""
    drafted = [record.drafted for record in records]
    if any(drafted):
        yield "drafted", drafted, 0, max(drafted), ".0f"
        yield "accepted", [record.accepted for record in records], 0, max(drafted), ".0f"
    candidates = [record.candidates for record in records]
    if candidates != drafted:
        yield "candidates", candidates, 0, max(candidates), ".0f"
    thresholds = [record.threshold for record in records]
    known = [threshold for threshold in thresholds if threshold is not None]
    if known:
        yield "threshold", thresholds, min(known), max(known), ".3f"
    times = {phase: [1000 * float(getattr(record.seconds, phase)) for record in records] for phase in PHASES}
    slowest = max(max(milliseconds) for milliseconds in times.values())
    for phase, milliseconds in times.items():
        yield f"{phase} ms", milliseconds, 0, slowest, ".1f"


def _bar(values: Sequence[float | None], low: float, high: float, levels: str) -> str:
    """A bar glyph for the mean of the values between two limits; blank if all are 0 or missing."""
    known = [value for value in values if value is not None]
    if not any(known):
        return levels[0]
    share = (fmean(known) - low) / (high - low) if high > low else 0.5
    return levels[1 + round(share * (len(levels) - 2))]


def _time_table(inspection: Inspection) -> Table:
    records, seconds = inspection.generation.rounds, inspection.seconds
    table = _table("time", "seconds", "share", "ms per round")
    for phase, share in shares(seconds).items():
        spent = getattr(seconds, phase)
        table.add_row(phase, *_time(spent, len(records), share))
    table.add_row("all rounds", *_time(sum(asdict(seconds).values()), len(records), 1.0), style="bold")
    table.add_row("prefill", f"{inspection.generation.prefill_seconds:.3f}")
    return table


def _time(seconds: float, rounds: int, share: float) -> tuple[str, str, str]:
    return f"{seconds:.3f}", f"{share:.1%}", f"{1000 * seconds / rounds:.2f}"
