"""Medians and spreads of repeated measurements."""

from types import SimpleNamespace

import pytest
import torch

from selfspec import timing
from selfspec_lab.bench.spread import Measured, median_seconds

CPU = torch.device("cpu")


def test_measured_figures() -> None:
    measured = Measured.of([3.0, None, 1.0, 10.0])
    assert measured.fields("x") == {"x": 3.0, "x_spread": [1.0, 10.0]}
    assert Measured.of([None]).fields("x") == {"x": None, "x_spread": None}


def test_medians_of_tasks_that_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    # The first call takes a second, the second one two, and so on.
    monkeypatch.setattr(timing, "time", SimpleNamespace(perf_counter=lambda: sum(range(len(calls) + 1))))
    tasks = {name: lambda name=name: calls.append(name) for name in "ab"}
    assert median_seconds(tasks, CPU, repeats=3, warm_up=0) == {"a": 4, "b": 3}
