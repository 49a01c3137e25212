"""The part of ``docs/serving.md`` that a result of ``load`` writes."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from selfspec_lab.bench.stamp import commit_text
from serving.figures import ratios_of, table

BEGIN, END = "<!-- benchmarks/serve.py page writes this -->", "<!-- up to here -->"

_TABLES = (
    ("tokens_per_second", "Tokens/s by number of clients: median (lowest-highest)", 1, 0),
    ("first_p50", "Milliseconds to the first token, median of the answers", 1000, 0),
    ("gap_p99", "Milliseconds between pieces of text, 99th percentile", 1000, 0),
)


def load_section(result: Mapping[str, Any]) -> str:
    """How a load was measured, and its tables, in Markdown.

    Args:
        result: of ``load``.
    """
    options, samples = result["options"], result["samples"]
    stamp = {**result["stamps"][-1], "dirty": any(each["dirty"] for each in result["stamps"])}
    repeats = 1 + max(sample["repeat"] for sample in samples)
    threads = len(options["server_cpus"] or ()) or stamp["threads"]
    where = "clients on other processors" if options["client_cpus"] else "clients on the same processors"
    lines = [
        f"`{options['model']}`, {repeats} repeats, {threads} threads of {_article(stamp['hardware']['processor'])}, "
        f"{where}; commit {commit_text(stamp, 9)}, load average of the machine before it {stamp['load_average']:.1f}.",
    ]
    for figure, title, scale, digits in _TABLES:
        lines += [f"{title}:", table(samples, figure, scale=scale, digits=digits)]
    lines.append("\n".join(f"- {line}." for line in ratios_of(samples)))
    lines += [f"- `{each['server']}` failed: {each['error']}" for each in result.get("failures", ())]
    return "\n\n".join(lines)


def write_section(page: Path, section: str, begin: str = BEGIN) -> None:
    """Replaces what stands between the two marks of a page.

    Args:
        page: with the marks ``begin`` and ``END``.
        section: in Markdown.
        begin: the first mark.

    Raises:
        ValueError: the page does not have the marks.
    """
    before, found, rest = page.read_text(encoding="utf-8").partition(begin)
    _, end, after = rest.partition(END)
    if not found or not end:
        raise ValueError(f"{page} does not have the marks {begin} and {END}")
    page.write_text(f"{before}{begin}\n\n{section}\n\n{END}{after}", encoding="utf-8")


def _article(name: str) -> str:
    return f"{'an' if name[0].lower() in 'aeiou' else 'a'} {name}"
