"""Runs side by side."""

from dataclasses import replace
from pathlib import Path

import pytest

from selfspec.errors import InvalidParameterError
from selfspec_lab.bench.report import compare_runs
from written_runs import failed, rows_of, three_prompts, write_run


def test_runs_side_by_side(tmp_path: Path) -> None:
    one = write_run(tmp_path / "one", three_prompts())
    faster = [
        replace(each, decode_seconds=each.decode_seconds / 2)
        for each in three_prompts()
        if each.candidate != "transformers"
    ]
    options = {"model": "tiny-early-exit", "seed": 0}
    settings = {"layerskip": {"exit_layer": 9}}
    two = write_run(tmp_path / "two", [*faster, failed("swift")], options=options, settings=settings)
    text = compare_runs([one, two])
    differences = {row[0]: row[1:] for row in rows_of(text, "What differs between the runs:")}
    assert differences["model"] == ["tiny", "tiny-early-exit"]
    assert differences["layerskip, exit\\_layer"] == ["1", "9"]
    assert differences["peers"] == ["transformers", "none"]
    assert "seed" not in differences
    assert "commit" not in differences
    rows = {row[0]: row[1:] for row in rows_of(text, "Speedup (95 % interval)")}
    assert list(rows) == ["layerskip", "autoregressive", "transformers", "swift", "plain decoding, tokens/s"]
    assert rows["layerskip"] == ["**3.00× (2.50 to 4.00); 1 of 4 outputs differ**"] * 2
    assert rows["transformers"][1] == "–"
    assert rows["swift"] == ["–", "**failed**"]
    assert rows["plain decoding, tokens/s"] == ["1.0", "2.0"]


def test_runs_that_do_not_differ(tmp_path: Path) -> None:
    one, two = (write_run(tmp_path / name / "run", three_prompts()) for name in ("one", "two"))
    text = compare_runs([one, two])
    assert "the same options, settings, software and hardware" in text
    assert f"| candidate | {Path('one', 'run')} | {Path('two', 'run')} |" in text
    assert compare_runs([one]).count("| candidate | run |") == 1


def test_nothing_cannot_be_compared(tmp_path: Path) -> None:
    with pytest.raises(InvalidParameterError, match="there are no runs to compare"):
        compare_runs([])
    with pytest.raises(InvalidParameterError, match="holds no run"):
        compare_runs([tmp_path])
