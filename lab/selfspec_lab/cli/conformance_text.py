"""A conformance report as text."""

from collections.abc import Iterator

from rich.console import Console
from rich.table import Table
from rich.text import Text

from selfspec_lab.conformance.divergence import Divergence
from selfspec_lab.conformance.report import CheckResult, Report
from selfspec_lab.conformance.server_info import ServerInfo

MOST_SHOWN = 3
"""Divergences of a check that are printed; the JSON has all."""

_STYLES = {"passed": "green", "diverged": "red", "failed": "red", "not supported": "dim"}


def print_report(console: Console, report: Report) -> None:
    """Prints what was asked, a table of the checks, and the first divergences of each."""
    settings = report.settings
    console.print(f"server: {_described(report.server)}; {report.date}", markup=False)
    if report.reference is not None:
        console.print(f"reference: {_described(report.reference)}", markup=False)
    console.print(f"asked: {settings.prompts} prompts by each interface, answers of at most {settings.tokens} tokens")
    for interface, reason in report.not_asked.items():
        console.print(f"{interface}: not asked: {reason}", markup=False)
    table = Table("interface", "check", "result", "what was done")
    for result in report.results:
        outcome = result.outcome
        table.add_row(
            *(result.interface, result.check, Text(short_result(result), _STYLES[outcome.status])), Text(outcome.detail)
        )
    console.print(table)
    for line in _divergence_lines(report):
        console.print(line, markup=False)


def short_result(result: CheckResult) -> str:
    """The status of a check with its numbers."""
    outcome = result.outcome
    if outcome.status == "diverged":
        return f"diverged: {len(outcome.divergences)} of {outcome.compared}"
    return f"passed: {outcome.compared}" if outcome.status == "passed" else outcome.status


def _divergence_lines(report: Report) -> Iterator[str]:
    for result in report.results:
        found = result.outcome.divergences
        if found:
            yield f"\n{result.interface}, {result.check}:"
        yield from (f"  {_line(divergence)}" for divergence in found[:MOST_SHOWN])
        if len(found) > MOST_SHOWN:
            yield f"  and {len(found) - MOST_SHOWN} more"


def _line(divergence: Divergence) -> str:
    last = divergence.prompt if isinstance(divergence.prompt, str) else divergence.prompt[-1]["content"]
    prompt = " ".join(last.split())
    place = f"character {divergence.place}" if divergence.token is None else f"token {divergence.token}"
    margin = "not known" if divergence.margin is None else f"{divergence.margin:.4f}"
    pair = f"{_quoted(divergence.expected_token)} became {_quoted(divergence.found_token)}"
    return f"{place}: {pair}, margin {margin}; prompt {prompt[:60]!r}"


def _quoted(text: str) -> str:
    return repr(text) if text else "the end"


def _described(server: ServerInfo) -> str:
    engine = " ".join(part for part in (server.engine, server.version) if part)
    return f"{engine or 'an engine that does not name itself'}, model {server.model}"
