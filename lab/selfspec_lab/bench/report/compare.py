"""Compares several runs, in Markdown."""

from collections.abc import Container, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from selfspec_lab.bench.options import PLAIN
from selfspec_lab.bench.report.markdown import bullets, escape, table_text
from selfspec_lab.bench.report.tables import NOTHING, Cell, Table, by_speedup, speedup_cell
from selfspec_lab.bench.report.words import counted, device_text, notes
from selfspec_lab.bench.stamp import commit_text

Summary = Mapping[str, Any]

_TOLD_OTHERWISE = ("settings", "chat")
"""Options that the comparison describes by their effect."""


def compare_summaries(names: Sequence[str], summaries: Sequence[Summary]) -> str:
    """Renders the differences between runs and their speedups.

    Args:
        names: names of the runs, for instance their folders.
        summaries: one per run, as ``summarise`` returns them.
    """
    labels = _labels(names)
    different = difference_table(labels, summaries)
    intro = (
        "What differs between the runs:"
        if different.rows
        else "The runs have the same options, settings, software and hardware."
    )
    said = [
        f"{escape(label)}: {escape(note)}"
        for label, each in zip(labels, summaries, strict=True)
        for note in notes(each)
    ]
    parts = [
        "# Runs compared",
        f"Each speedup is over plain decoding of its own run. {intro}",
        *([table_text(different)] if different.rows else []),
        "## Speedup (95 % interval)",
        table_text(speedup_table(labels, summaries)),
        *(["## Notes", bullets(said)] if said else []),
    ]
    return "\n\n".join(parts) + "\n"


def difference_table(labels: Sequence[str], summaries: Sequence[Summary]) -> Table:
    """The options, settings, software and hardware that are not the same in all runs, one row each."""
    in_all = set.intersection(*({*summary["candidates"]} for summary in summaries))
    described = [_described(summary, in_all) for summary in summaries]
    rows = []
    for name in dict.fromkeys(name for each in described for name in each):
        values = [each.get(name, NOTHING) for each in described]
        if len(set(values)) > 1:
            rows.append((Cell(name), *map(Cell, values)))
    return Table(("", *labels), tuple(rows))


def speedup_table(labels: Sequence[str], summaries: Sequence[Summary]) -> Table:
    """Speedups, one row per candidate, the fastest of the first run first; one column per run."""
    names = dict.fromkeys(name for summary in summaries for name in by_speedup(summary))
    rows = [(Cell(name), *(_speedup(summary["candidates"].get(name)) for summary in summaries)) for name in names]
    plain = Cell("plain decoding, tokens/s"), *(_plain_speed(summary) for summary in summaries)
    return Table(("candidate", *labels), (*rows, plain))


def _labels(names: Sequence[str]) -> list[str]:
    """The shortest endings of the folders' paths that are unique."""
    split = [Path(name).parts for name in names]
    for count in range(1, max(map(len, split)) + 1):
        labels = [str(Path(*parts[-count:])) for parts in split]
        if len(set(labels)) == len(set(names)):
            return labels
    return list(names)


def _speedup(candidate: Mapping[str, Any] | None) -> Cell:
    if candidate is None:
        return Cell(NOTHING)
    speedup, figures = speedup_cell(candidate), candidate["overall"]
    if not figures["differing"]:
        return speedup
    return Cell(f"{speedup.text}; {figures['differing']} of {figures['compared']} outputs differ", marked=True)


def _plain_speed(summary: Summary) -> Cell:
    speed = summary["candidates"][PLAIN]["overall"]["tokens_per_second"]
    return Cell(NOTHING if speed is None else f"{speed:.1f}")


def _described(summary: Summary, candidates: Container[str]) -> dict[str, str]:
    """Options, settings of the given candidates, software and hardware of a run, as text by name."""
    stamp = summary["stamp"]
    settings = {name: each["settings"] or {} for name, each in summary["candidates"].items() if name in candidates}
    own = {
        "hardware": device_text(stamp),
        "commit": commit_text(stamp),
        **{f"version of {name}": str(version) for name, version in stamp["versions"].items()},
        "questions": {None: NOTHING, True: "chat messages", False: "texts to continue"}[summary["chat"]],
        "prompts": f"{summary['prompts']} in {counted(len(summary['categories']), 'category', 'categories')}",
    }
    options = {name: _text(value) for name, value in summary["options"].items() if name not in _TOLD_OTHERWISE}
    each_setting = {
        f"{method}, {key}": _text(value) for method, values in settings.items() for key, value in values.items()
    }
    return {**options, **own, **each_setting}


def _text(value: Any) -> str:
    if isinstance(value, Iterable) and not isinstance(value, str):
        return ", ".join(map(str, value)) or "none"
    return str(value)
