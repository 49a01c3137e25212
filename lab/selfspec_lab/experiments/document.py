"""Renders ``docs/experiments.md``: claims, statuses, figures and pictures, from results in a folder."""

import os
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from selfspec_lab.bench.stamp import commit_text
from selfspec_lab.checks import RULE
from selfspec_lab.experiments.base import EXPERIMENTS
from selfspec_lab.papers.costs import PAPER_MACHINES


def render_document(results: Mapping[str, Mapping[str, Any]], folder: Path, page: Path) -> str:
    """Renders the page as Markdown.

    Args:
        results: by name, as ``read_results`` returns them.
        folder: the folder of the results and their pictures.
        page: path of the page; links to pictures are relative to it.
    """
    pictures = Path(os.path.relpath(folder, page.parent))
    parts = [
        "# The papers' claims, tested here",
        "Generated from the results by `selfspec experiments document`; do not edit. `selfspec experiments run NAME` "
        "tests a claim again. The status follows from the data alone. " + RULE,
        "*By the clock here* is a fact about the machine below. *On the paper's machine* is the same rounds replayed "
        "with the least times of the paper's model on the paper's GPU (roofline: "
        + ", ".join(f"{model} on {device}" for device, model in PAPER_MACHINES.values())
        + "), and the paper's share of time for selecting sublayers. A model that cannot show a claim runs it for "
        "regressions alone. These are small models; a trend can carry over, a number cannot.",
        _overview(results),
        *(_section(name, result, pictures) for name, result in results.items()),
    ]
    return "\n\n".join(parts) + "\n"


def _overview(results: Mapping[str, Mapping[str, Any]]) -> str:
    lines = ["| | claim | source | status | parts |", "| --- | --- | --- | --- | --- |"]
    for name, result in results.items():
        experiment = EXPERIMENTS[name]
        lines.append(
            f"| {experiment.number} | [{name}](#{experiment.number}-{name}) | {experiment.source} "
            f"| **{result['status']}** | {_parts(result)} |"
        )
    return "\n".join(lines)


def _parts(result: Mapping[str, Any]) -> str:
    """How many of the parts that count have each status."""
    counted = Counter(check["status"] for check in result["checks"] if check["counts"])
    return ", ".join(f"{count} {status}" for status, count in counted.items())


def _section(name: str, result: Mapping[str, Any], pictures: Path) -> str:
    experiment = EXPERIMENTS[name]
    checks = ["| part | status | measured |", "| --- | --- | --- |"]
    for check in result["checks"]:
        uncounted = not check["counts"] and check["status"] != "not applicable"
        status = check["status"] + (", not counted" if uncounted else "")
        checks.append(f"| {_cell(check['statement'])} | {status} | {_cell(check['figure'])} |")
    unfit = f" On this model the claim cannot show: {result['unfit']}." if result["unfit"] else ""
    return "\n\n".join(
        [
            f"## {experiment.number}. {name}",
            f"**Claim** ({experiment.source}): {experiment.claim}",
            f"**Here:** {experiment.method}",
            f"**Status: {result['status']}.**{unfit}",
            "\n".join(checks),
            f"![{name}: {_cell(experiment.claim)}]({(pictures / f'{name}.png').as_posix()})",
            _provenance(result),
        ]
    )


def _provenance(result: Mapping[str, Any]) -> str:
    stamp = result["stamp"]
    hardware, versions = stamp["hardware"], stamp["versions"]
    amount = "quick" if result["quick"] else "full"
    return (
        f"*{result['model']}, {amount}, seed {result['seed']}; {hardware['processor']}, {stamp['threads']} threads, "
        f"torch {versions['torch']}, transformers {versions['transformers']}, commit {commit_text(stamp)}, "
        f"{stamp['date'][:10]}.*"
    )


def _cell(text: str) -> str:
    return " ".join(text.replace("|", "\\|").split())
