"""Writes the reports of a run into its folder, and compares several runs."""

import json
from collections.abc import Sequence
from pathlib import Path

from selfspec.errors import InvalidParameterError
from selfspec.files import replace_file
from selfspec_lab.bench.report.compare import compare_summaries
from selfspec_lab.bench.report.html import to_html
from selfspec_lab.bench.report.markdown import to_markdown
from selfspec_lab.bench.report.plots import draw_pictures
from selfspec_lab.bench.report.read import read_run
from selfspec_lab.bench.report.summary import summarise
from selfspec_lab.bench.run.folder import REPORTS
from selfspec_lab.plots import check_drawing

_SUMMARY, _MARKDOWN, _HTML = REPORTS


def write_report(folder: Path) -> None:
    """Writes ``summary.json``, ``report.md`` and ``report.html`` from the measurements, replacing older files.

    Args:
        folder: the run's folder.

    Raises:
        InvalidParameterError: it is not the folder of a run, or cannot be written to.
        SelfSpecError: matplotlib is not installed; ``summary.json`` and ``report.md`` have been written.
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
        folders: the runs' folders, in the order of the columns.

    Returns:
        Markdown: the differences between the runs, then a table of speedups, candidates × runs.

    Raises:
        InvalidParameterError: there are none, or one is not the folder of a run.
    """
    if not folders:
        raise InvalidParameterError("there are no runs to compare; name their folders")
    return compare_summaries([str(folder) for folder in folders], [summarise(read_run(folder)) for folder in folders])


def _write(path: Path, text: str) -> None:
    try:
        replace_file(path, text)
    except OSError as error:
        raise InvalidParameterError(
            f"the report cannot be written to '{path}': {error.strerror or error}; make room or change its permissions"
        ) from error
