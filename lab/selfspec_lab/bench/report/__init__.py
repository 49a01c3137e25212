"""Writes the reports of a run into its folder, and holds several runs against each other."""

import json
from collections.abc import Sequence
from pathlib import Path

from selfspec.errors import InvalidParameterError
from selfspec.plots import check_drawing
from selfspec_lab.bench.report.compare import compare_summaries
from selfspec_lab.bench.report.html import to_html
from selfspec_lab.bench.report.markdown import to_markdown
from selfspec_lab.bench.report.plots import draw_pictures
from selfspec_lab.bench.report.read import read_run
from selfspec_lab.bench.report.summary import summarise
from selfspec_lab.bench.run.folder import REPORTS

_SUMMARY, _MARKDOWN, _HTML = REPORTS


def write_report(folder: Path) -> None:
    """Writes ``summary.json``, ``report.md`` and ``report.html`` from what was measured, replacing older ones.

    Args:
        folder: of the run.

    Raises:
        InvalidParameterError: it is not the folder of a run, or cannot be written to.
        SelfSpecError: matplotlib is not installed, without which there is no ``report.html``; the others are written.
    """
    run = read_run(folder)
    summary = summarise(run)
    _write(folder / _SUMMARY, json.dumps(summary, indent=1, allow_nan=False) + "\n")
    _write(folder / _MARKDOWN, to_markdown(summary))
    check_drawing()
    _write(folder / _HTML, to_html(summary, draw_pictures(run, summary)))


def compare_runs(folders: Sequence[Path]) -> str:
    """The speedups of several runs side by side.

    Args:
        folders: of the runs, in the order of the columns.

    Returns:
        Markdown: what differs between the runs, then a table of contenders and runs.

    Raises:
        InvalidParameterError: there are none, or one is not the folder of a run.
    """
    if not folders:
        raise InvalidParameterError("there is nothing to compare; name the folders of some runs")
    return compare_summaries([str(folder) for folder in folders], [summarise(read_run(folder)) for folder in folders])


def _write(path: Path, text: str) -> None:
    partial = path.with_name(f"{path.name}.part")  # so that a full disk leaves the older report whole
    try:
        partial.write_text(text, encoding="utf-8")
        partial.replace(path)
    except OSError as error:
        partial.unlink(missing_ok=True)
        raise InvalidParameterError(
            f"the report cannot be written to '{path}': {error.strerror or error}; make room or change its permissions"
        ) from error
