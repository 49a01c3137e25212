"""Renders ``docs/experiments.md``: claims, verdicts, figures and pictures, from results in a folder."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from selfspec_lab.bench.stamp import commit_text
from selfspec_lab.experiments.base import EXPERIMENTS


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
        "tests a claim again. A verdict is computed from the data alone: *holds* if every part of the claim holds, "
        "*fails* if none does, *mixed* otherwise. A part marked *not counted* is a theorem or could not have failed; "
        "it is shown and does not affect the verdict. These are small models on the hardware named below; a trend can "
        "carry over, a number cannot.",
        _overview(results),
        *(_section(name, result, pictures) for name, result in results.items()),
    ]
    return "\n\n".join(parts) + "\n"


def _overview(results: Mapping[str, Mapping[str, Any]]) -> str:
    lines = ["| | claim | source | verdict |", "| --- | --- | --- | --- |"]
    for name, result in results.items():
        experiment = EXPERIMENTS[name]
        lines.append(
            f"| {experiment.number} | [{name}](#{experiment.number}-{name}) | {experiment.source} "
            f"| **{result['verdict']}** |"
        )
    return "\n".join(lines)


def _section(name: str, result: Mapping[str, Any], pictures: Path) -> str:
    experiment = EXPERIMENTS[name]
    checks = ["| part | holds | measured |", "| --- | --- | --- |"]
    for check in result["checks"]:
        holds = ("yes" if check["holds"] else "no") + ("" if check["counts"] else ", not counted")
        checks.append(f"| {_cell(check['statement'])} | {holds} | {_cell(check['figure'])} |")
    return "\n\n".join(
        [
            f"## {experiment.number}. {name}",
            f"**Claim** ({experiment.source}): {experiment.claim}",
            f"**Here:** {experiment.method}",
            f"**Verdict: {result['verdict']}.**",
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
