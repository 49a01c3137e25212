"""``docs/experiments.md``: claims, verdicts, figures and pictures, from results in a folder."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from selfspec_lab.experiments.base import EXPERIMENTS


def render_document(results: Mapping[str, Mapping[str, Any]], folder: Path, page: Path) -> str:
    """The page as Markdown.

    Args:
        results: by name, as ``read_results`` gives them.
        folder: where they and their pictures are.
        page: where the page will be, which pictures are named from.
    """
    pictures = Path(os.path.relpath(folder, page.parent))
    parts = [
        "# The papers' claims, tried here",
        "Generated from the results by `selfspec experiments document`; do not edit. `selfspec experiments run NAME` "
        "tries a claim again. A verdict is computed from the data alone: *holds* if every part does, *holds in part* "
        "if some do. These are small models on the hardware named below; a trend can carry over, a number cannot.",
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
        checks.append(
            f"| {_cell(check['statement'])} | {'yes' if check['holds'] else 'no'} | {_cell(check['figure'])} |"
        )
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
    commit = (stamp["commit"] or "no checkout")[:12] + (" with changes" if stamp["dirty"] else "")
    return (
        f"*{result['model']}, {amount}, seed {result['seed']}; {hardware['processor']}, {stamp['threads']} threads, "
        f"torch {versions['torch']}, transformers {versions['transformers']}, commit {commit}, {stamp['date'][:10]}.*"
    )


def _cell(text: str) -> str:
    return " ".join(text.replace("|", "\\|").split())
