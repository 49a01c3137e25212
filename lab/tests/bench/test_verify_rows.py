"""Timing forwards of several rows."""

from typing import Any

import pytest

from helpers.models import build, prompt
from selfspec.runtimes.target import Target
from selfspec_lab.bench.verify_rows import verify_rows_seconds


def test_rows_are_run_over_a_committed_context(monkeypatch: pytest.MonkeyPatch) -> None:
    target = Target(build("llama"))
    layouts: list[tuple[int, int]] = []
    lay_out = Target.lay_out

    def noted(self: Target, sequence: Any, rows: int, **options: Any) -> Any:
        layouts.append((sequence.cache.length, rows))
        return lay_out(self, sequence, rows, **options)

    monkeypatch.setattr(Target, "lay_out", noted)
    seconds = verify_rows_seconds(target, prompt(5), context=20, row_counts=(1, 4, 16))
    assert seconds.keys() == {1, 4, 16}
    assert layouts[0] == (0, 20)
    assert set(layouts[1:]) == {(20, 1), (20, 4), (20, 16)}
    assert verify_rows_seconds(target, prompt(5), context=1020, row_counts=(4, 8)).keys() == {4}
