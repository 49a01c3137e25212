"""The leaderboard."""

import shutil
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from measured_runs import METHODS_TRIED, PEERS
from selfspec.cli.command_line import app
from selfspec.errors import InvalidParameterError
from selfspec_lab.bench.report import write_report
from selfspec_lab.bench.report.leaderboard import read_summaries, render_leaderboard


def test_the_leaderboard_is_made_of_the_summaries_of_runs(run_folder: Path, tmp_path: Path) -> None:
    shutil.copytree(run_folder, tmp_path / "runs" / "one")
    write_report(tmp_path / "runs" / "one")
    page = tmp_path / "docs" / "leaderboard.md"
    page.parent.mkdir()
    result: Any = CliRunner().invoke(app, ["bench", "leaderboard", str(tmp_path / "runs"), str(page)])
    assert result.exit_code == 0, result.output
    text = page.read_text(encoding="utf-8")
    assert "## tiny, float32: mini" in text
    assert "(../runs/one/report.md)" in text
    assert "`layerskip.exit_layer=4`" in text
    for name in (*METHODS_TRIED, *PEERS, "autoregressive"):
        assert text.count(f"| `{name}`") == 1
    assert "| 6/6 |" in text


def test_it_says_why_a_candidate_has_no_figures(run_folder: Path, tmp_path: Path) -> None:
    write_report(shutil.copytree(run_folder, tmp_path / "one"))
    (summary,) = read_summaries(tmp_path).values()
    summary["candidates"]["uniform"]["overall"]["speedup"] = None
    summary["failures"] = {"uniform": "ValueError: it does not fit"}
    text = render_leaderboard({tmp_path / "one": summary}, tmp_path / "page.md")
    assert "| `uniform` | failed |" in text
    assert "`uniform` failed: it does not fit." in text


@pytest.mark.parametrize("content", ["", "{}", "[]", '{"options": {}}'])
def test_what_is_no_summary_is_refused(tmp_path: Path, content: str) -> None:
    with pytest.raises(InvalidParameterError, match="there are no runs"):
        read_summaries(tmp_path)
    (tmp_path / "one").mkdir()
    (tmp_path / "one" / "summary.json").write_text(content)
    with pytest.raises(InvalidParameterError, match=r"summary\.json' is not the summary of a run"):
        read_summaries(tmp_path)
