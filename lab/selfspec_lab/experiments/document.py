"""Renders ``docs/experiments.md``: claims, statuses, figures and pictures, from results in a folder."""

import os
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from selfspec_lab.bench.stamp import commit_text
from selfspec_lab.checks import RULE, tally
from selfspec_lab.experiments.base import EXPERIMENTS
from selfspec_lab.papers.costs import PAPER_MACHINES

Results = Mapping[str, Mapping[str, Any]]
"""By name of the experiment, as ``read_results`` returns them."""


def render_document(folders: Mapping[Path, Results], page: Path) -> str:
    """Renders the page as Markdown.

    Args:
        folders: the results by their folders, where their pictures are, as ``read_folders`` returns them.
        page: path of the page; links to pictures are relative to it.
    """
    names = [name for name in EXPERIMENTS if any(name in results for results in folders.values())]
    parts = [
        "# The papers' claims, tested here",
        "Generated from the results by `selfspec experiments document`; do not edit. `selfspec experiments run NAME` "
        "tests a claim again, with `--model` on another model. The status follows from the data alone. " + RULE,
        "*By the clock here* is a fact about the machine that a table names. *On the paper's machine* is the same "
        "rounds replayed with the least times of the paper's model on the paper's GPU (roofline: "
        + ", ".join(f"{model} on {device}" for device, model in PAPER_MACHINES.values())
        + "), and the paper's share of time for selecting sublayers. A model that cannot show a claim runs it for "
        "regressions alone. These are small models; a trend can carry over, a number cannot. *Here* describes the "
        "bundled checkpoints. A model that is given takes the place of the first one named, in the numbers of its file "
        "and never widened.",
        _overview(names, folders.values()),
        *(part for name in names for part in _section(name, folders, page)),
    ]
    return "\n\n".join(parts) + "\n"


def _overview(names: Sequence[str], folders: Collection[Results]) -> str:
    """A row for each claim, a column for each folder of results."""
    models = ["; ".join(dict.fromkeys(_model(result) for result in results.values())) for results in folders]
    lines = [f"| | claim | source | {' | '.join(models)} |", "| --- | --- | --- |" + " --- |" * len(models)]
    for name in names:
        experiment = EXPERIMENTS[name]
        cells = [_status(results[name]) if name in results else "–" for results in folders]
        lines.append(
            f"| {experiment.number} | [{name}](#{experiment.number}-{name}) | {experiment.source} "
            f"| {' | '.join(cells)} |"
        )
    if any(times := [_hours(results.values()) for results in folders]):
        lines.append(f"| | time of all | | {' | '.join(time or '–' for time in times)} |")
    return "\n".join(lines)


def _hours(results: Collection[Mapping[str, Any]]) -> str:
    """How long the experiments took together; empty if of one it is not known."""
    seconds = [result.get("seconds") for result in results]
    return "" if None in seconds else f"{sum(filter(None, seconds)) / 3600:.1f} hours"


def _model(result: Mapping[str, Any]) -> str:
    return Path(result["model"]).name


def _status(result: Mapping[str, Any]) -> str:
    """The status, and how many of the parts that count have each."""
    parts = tally(result["checks"])
    return f"**{result['status']}**" + (f" ({parts})" if parts else "")


def _section(name: str, folders: Mapping[Path, Results], page: Path) -> list[str]:
    experiment = EXPERIMENTS[name]
    measured = [
        part
        for folder, results in folders.items()
        if name in results
        for part in _measured(results[name], folder, page)
    ]
    return [
        f"## {experiment.number}. {name}",
        f"**Claim** ({experiment.source}): {experiment.claim}",
        f"**Here:** {experiment.method}",
        *measured,
    ]


def _measured(result: Mapping[str, Any], folder: Path, page: Path) -> list[str]:
    """What was measured with one model."""
    name, pictures = result["experiment"], Path(os.path.relpath(folder, page.parent))
    checks = ["| part | status | measured |", "| --- | --- | --- |"]
    for check in result["checks"]:
        uncounted = not check["counts"] and check["status"] != "not applicable"
        status = check["status"] + (", not counted" if uncounted else "")
        checks.append(f"| {_cell(check['statement'])} | {status} | {_cell(check['figure'])} |")
    unfit = f" On this model the claim cannot show: {result['unfit']}." if result["unfit"] else ""
    return [
        f"**{_model(result)}: {result['status']}.**{unfit}",
        "\n".join(checks),
        f"![{name}: {_cell(EXPERIMENTS[name].claim)}]({(pictures / f'{name}.png').as_posix()})",
        _provenance(result),
    ]


def _provenance(result: Mapping[str, Any]) -> str:
    stamp = result["stamp"]
    hardware, versions = stamp["hardware"], stamp["versions"]
    amount = "quick" if result["quick"] else "full"
    minutes = max(1, round(result.get("seconds", 0) / 60))
    took = f", {minutes} minute{'s' if minutes > 1 else ''}" if "seconds" in result else ""
    return (
        f"*{_model(result)}, {amount}, seed {result['seed']}; {hardware['processor']}, {stamp['threads']} threads, "
        f"torch {versions['torch']}, transformers {versions['transformers']}, commit {commit_text(stamp)}, "
        f"{stamp['date'][:10]}{took}.*"
    )


def _cell(text: str) -> str:
    return " ".join(text.replace("|", "\\|").split())
