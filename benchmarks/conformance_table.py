"""Writes the table of ``docs/conformance.md``: the committed reports of ``selfspec conformance``, side by side.

python benchmarks/conformance_table.py
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

from serving.page import write_section

ROOT = Path(__file__).parents[1]
REPORTS = ROOT / "benchmarks" / "results" / "conformance"
PAGE = ROOT / "docs" / "conformance.md"
BEGIN = "<!-- benchmarks/conformance_table.py writes this -->"

Report = Mapping[str, Any]


def read_reports(folder: Path) -> dict[str, Report]:
    """The reports of a folder by the names of their files."""
    paths = sorted(folder.glob("*.json"), key=lambda path: path.stem)
    return {path.stem: json.loads(path.read_text(encoding="utf-8")) for path in paths}


def section(reports: Mapping[str, Report]) -> str:
    """The table of checks by server, and what was asked of each, in Markdown.

    Args:
        reports: of ``selfspec conformance``, by name.
    """
    asked = sorted(
        ([each["check"] for each in report["results"]] for report in reports.values()), key=len, reverse=True
    )
    checks = list(dict.fromkeys(chain.from_iterable(asked)))  # in the order of the report that has most
    lines = [_row("check", [f"`{name}`" for name in reports]), _row("---", ["---"] * len(reports))]
    lines += [_row(check, [_cell(report, check) for report in reports.values()]) for check in checks]
    lines.append(_row("divergences: median margin; largest", [_margins(report) for report in reports.values()]))
    described = [f"- `{name}`: {_described(report)}" for name, report in reports.items()]
    return "\n".join([*lines, "", *described])


def _row(name: str, cells: Sequence[str]) -> str:
    return f"| {name} | {' | '.join(cells)} |"


def _cell(report: Report, check: str) -> str:
    """What came of a check by both interfaces."""
    results = [each for each in report["results"] if each["check"] == check]
    compared, diverged = sum(each["compared"] for each in results), sum(len(each["divergences"]) for each in results)
    if diverged:
        return f"**{diverged} of {compared} differ**"
    if any(each["status"] == "failed" for each in results):
        return "failed"
    return f"{compared} same" if any(each["status"] == "passed" for each in results) else "-"


def _margins(report: Report) -> str:
    known = sorted(abs(margin) for margin in _all_margins(report) if margin is not None)
    unknown = sum(margin is None for margin in _all_margins(report))
    if not known:
        return f"{unknown} not known" if unknown else "-"
    median = known[len(known) // 2]
    return f"{median:.3f}; {known[-1]:.3f}" + (f" ({unknown} not known)" if unknown else "")


def _all_margins(report: Report) -> Iterator[float | None]:
    """Of greedy texts; of sampled ones a margin says nothing."""
    for result in report["results"]:
        if result["check"] != "seed":
            yield from (divergence["margin"] for divergence in result["divergences"])


def _described(report: Report) -> str:
    server, reference, asked = report["server"], report["reference"], report["settings"]
    engine = " ".join(part for part in (server["engine"], server["version"]) if part)
    against = "" if reference is None else "; `speculation` against the same engine without it"
    return (
        f"{engine}, {report['date'][:10]}, {asked['prompts']} prompts by each interface, answers of at most "
        f"{asked['tokens']} tokens{against}"
    )


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__).parse_args()
    write_section(PAGE, section(read_reports(REPORTS)), BEGIN)
    print(f"{PAGE.relative_to(ROOT)} written")
