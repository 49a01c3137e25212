"""``benchmarks/auto_replay.py``: what it records, and what a replay of it gives."""

import json
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from helpers import auto
from helpers.kernels import needs_kernels
from selfspec import Engine
from selfspec.methods.auto.method import Auto
from selfspec.methods.auto.preparation import Assignment, AutoSettings, Preparation, TriedAssignment
from selfspec.model.kept import KeptSet
from selfspec.runtimes.costs.rows import RowCosts
from selfspec.runtimes.precision import Precision
from selfspec.runtimes.target import Target

ANSWER = list(range(100, 161))
ROWS = {"16": [1.0, 1.02, 1.1], "6": [0.2, 0.22, 0.3]}


def eight_bits(target: Target, _: AutoSettings) -> Preparation:
    """Drafts from the whole model at 8 bits."""
    assignment = Assignment(KeptSet.full(target.sublayer_count), Precision.of(8))
    trial = TriedAssignment(assignment, 0.9, RowCosts((1, 64), (0.2, 0.4)))
    return Preparation(RowCosts((1, 64), (1.0, 1.1)), trial)


@pytest.fixture
def script(benchmarks: Callable[[str], ModuleType]) -> ModuleType:
    return benchmarks("auto_replay")


def rows_file(seconds: dict[str, list[float]] = ROWS) -> dict[str, Any]:
    """What ``rows.py`` writes, of 1, 8 and 32 rows."""
    return {
        "seconds": {
            bits: {str(rows): {"median": each} for rows, each in zip((1, 8, 32), own, strict=True)}
            for bits, own in seconds.items()
        }
    }


def speedup(
    script: ModuleType, chosen: list[int], answer: list[int] = ANSWER, times: int = 1
) -> tuple[float, set[str]]:
    """Of the last of some equal answers, and what drafted them."""
    replay = script.Replay(script.machine_of(rows_file(), 6), 6, 0.0)
    text = script.Text([1, 2, 3], answer, chosen, [0.999] * len(answer))
    speedups = [replay.speedup(text) for _ in range(times)]
    return speedups[-1], set(replay.seconds)


def test_the_costs_are_those_of_the_file(script: ModuleType) -> None:
    machine = script.machine_of(rows_file(), 6)
    assert (machine.verify(1), machine.verify(8), machine.draft(1)) == (1.0, 1.02, 0.2)


def test_right_drafts_pay_and_wrong_ones_hardly_cost(script: ModuleType) -> None:
    right, drafted = speedup(script, ANSWER)
    assert 2.0 < right < 1 / 0.2
    assert "6 bits" in drafted
    wrong, drafted = speedup(script, [token + 1 for token in ANSWER], times=6)
    assert 0.97 < wrong <= 1.0
    assert "6 bits" in drafted


def test_a_text_that_repeats_itself_is_copied(script: ModuleType) -> None:
    answer = ANSWER[:15] * 4
    repeated, drafted = speedup(script, [token + 1 for token in answer], answer)
    assert repeated > 1.5
    assert "lookup" in drafted


def test_a_draft_goes_on_with_wrong_tokens_after_a_wrong_one(script: ModuleType) -> None:
    chosen = [*ANSWER[:4], 7, *ANSWER[5:]]
    text = script.Text([1], ANSWER, chosen, [0.9] * len(ANSWER))
    drafts = []

    class Stop:
        threshold = 0.0

        def stops(self, confidence: float) -> bool:
            return False

    draft = script.LayerDraft(script.KeptSet.full(2), 6, Stop(), append=lambda *given: drafts.append(given) or [8, 9])
    tokens, confidences, forwards, guessed = script.drafted_by_layers(draft, text, 2)
    assert tokens[:3] == [ANSWER[2], ANSWER[3], 7]
    assert all(token < 0 for token in tokens[3:6])
    assert tokens[6:] == [8, 9]
    assert (confidences, forwards, guessed) == ([0.9] * 6, [1] * 6, 0)
    assert drafts == [(tuple(tokens[:6]), confidences)]


@needs_kernels
def test_what_a_draft_chooses_is_nearly_what_the_model_does(
    script: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    auto.give(monkeypatch, eight_bits)
    engine, prompt = Engine.from_pretrained("tiny", "auto"), [5, 6, 7, 8]
    assert isinstance(engine.method, Auto)
    answer = engine.generate(prompt, max_new_tokens=40, ignore_eos=True).token_ids
    chosen, confidences = script.draft_choices(engine.method, prompt, answer)
    assert len(chosen) == len(answer)
    assert sum(own == other for own, other in zip(chosen, answer, strict=True)) > 30
    assert all(0 < confidence <= 1 for confidence in confidences)


@needs_kernels
def test_suites_are_recorded_and_replayed(
    script: ModuleType,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    auto.give(monkeypatch, eight_bits)
    texts, rows = tmp_path / "texts.json", tmp_path / "rows-here.json"
    options = ["--model", "tiny", "--suite", "mini", "--limit", "2", "--max-new-tokens", "24"]
    script.main(["record", *options, "--out", str(texts)])
    recorded = json.loads(texts.read_text())
    bits = str(recorded["bits"])
    rows.write_text(json.dumps(rows_file({"16": ROWS["16"], bits: ROWS["6"]})))
    assert all(len(set(map(len, text[1:]))) == 1 for text in recorded["suites"]["mini"])
    script.main(["play", str(texts), str(rows)])
    lines = capsys.readouterr().out.splitlines()
    assert lines[-2] == "rows-here:"
    assert lines[-1].startswith("  mini: ")
    assert "of the time" in lines[-1]
