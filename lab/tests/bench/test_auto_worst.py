"""What ``benchmarks/auto_table.py --worst`` measures: adversarial texts, and first requests."""

import json
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

from helpers.kernels import needs_kernels


@pytest.fixture
def script(benchmarks: Callable[[str], ModuleType]) -> ModuleType:
    return benchmarks("auto_table")


@needs_kernels
def test_adversaries_are_right_and_wrong_as_they_say(
    script: ModuleType, checkpoint: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    module, chosen = script.adversaries, ("never right", "32 are right, then 32 wrong", "never right, a busy core")
    monkeypatch.setattr(module, "ADVERSARIES", {name: module.ADVERSARIES[name] for name in chosen})
    monkeypatch.setattr(module, "CHAT_PROMPTS", {"question": module.CHAT_PROMPTS["question"]})
    lookup, out = module.known.Lookup, tmp_path / "found.json"
    options = [
        "--worst",
        "adversaries",
        "--model",
        checkpoint,
        "--new-tokens",
        "48",
        "--repeats",
        "2",
        "--out",
        str(out),
    ]
    script.main([*options, "--dirty"])
    found = json.loads(out.read_text())["adversaries"]
    assert list(found) == list(chosen)
    assert all(len(each["ratios"]) == 2 for each in found.values())
    assert found["32 are right, then 32 wrong"]["accepted"] > found["never right"]["accepted"]
    assert module.known.Lookup is lookup, "what was replaced is there again"


def test_a_script_offers_the_text_or_another_token(script: ModuleType) -> None:
    right = script.adversaries.ADVERSARIES["every other token is right"].right()
    assert script.adversaries.Script([5, 6, 7, 8, 9], 2, right, 3).offer(2, 3) == [7, 8 ^ 1, 9]


def test_first_requests_are_compared_with_later_ones(script: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    runs = iter(([6.0, 1.0, 2.0, 4.0], [9.0, 3.0, 3.0, 1.0]))
    monkeypatch.setattr(script.first, "_run", lambda *_: next(runs))
    monkeypatch.setattr(script.first, "CHAT_PROMPTS", {"question": "Why?"})
    lines: list[str] = []
    (found,) = script.first.measure("tiny", 8, 2, lines.append).values()
    assert found == {"first": [6.0, 9.0], "later": [2.0, 3.0], "ratio": 3.0}
    assert lines == ["question: first request ÷ later ones 3.00"]


@needs_kernels
@pytest.mark.slow
def test_first_requests_are_those_of_new_processes(script: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(script.first, "CHAT_PROMPTS", {"question": script.first.CHAT_PROMPTS["question"]})
    lines: list[str] = []
    (found,) = script.first.measure("tiny", 8, 1, lines.append).values()
    assert found["ratio"] == pytest.approx(found["first"][0] / found["later"][0])
    assert len(lines) == 1
