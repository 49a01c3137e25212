"""Tasks take turns when they are timed."""

from types import SimpleNamespace

import pytest
import torch

from selfspec import timing
from selfspec.timing import in_turn, interleaved_samples

CPU = torch.device("cpu")


def test_everybody_begins_once(monkeypatch: pytest.MonkeyPatch) -> None:
    assert [in_turn("abc", turn) for turn in range(4)] == [
        ["a", "b", "c"],
        ["b", "c", "a"],
        ["c", "a", "b"],
        list("abc"),
    ]
    calls: list[str] = []
    # The first call takes a second, the second one two, and so on.
    monkeypatch.setattr(timing, "time", SimpleNamespace(perf_counter=lambda: sum(range(len(calls) + 1))))
    tasks = {name: lambda name=name: calls.append(name) for name in "ab"}
    assert interleaved_samples(tasks, CPU, repeats=2, warm_up=1) == {"a": [4, 5], "b": [3, 6]}
    assert calls == ["a", "b", "b", "a", "a", "b"]
