"""``benchmarks/bridges.py``: its figures, where texts differ, and its processes on a tiny file."""

import argparse
import contextlib
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from selfspec_lab.bench.llama_cpp import is_installed

ROOT = Path(__file__).parents[3]
F32 = ROOT / "tests" / "fixtures" / "gguf" / "F32.gguf"
PROMPT = [5, 6, 7, 8] * 4


@pytest.fixture
def module(benchmarks: Callable[[str], ModuleType]) -> ModuleType:
    return benchmarks("bridges")


class FakeAnswers:
    """``bridge`` is twice as fast and writes another third token for the second prompt."""

    def __init__(self) -> None:
        self.about: dict[str, Any] = {}
        self.asked: list[str] = []

    def answer(self, candidate: str, prompts: list[list[int]]) -> dict[str, Any]:
        self.asked.append(candidate)
        texts = [[1, 2, 3, 4] for _ in prompts]
        if candidate == "bridge":
            texts[1][2] = 9
        rest = 3.0 if candidate == "bridge" else 6.0
        counts = {"drafted": 4, "accepted": 2, "rounds": 5}
        return {"token_ids": texts, "after_first": 6, "first": 1.0, "rest": rest, **counts}

    def margin(self, token_ids: list[int], one: int, other: int) -> float:
        assert token_ids == [20, 1, 2]
        assert (one, other) == (3, 9)
        return 0.25


def test_candidates_take_turns_and_differences_are_named(module: ModuleType) -> None:
    answers, options = FakeAnswers(), argparse.Namespace(candidates=["none", "bridge"], repeats=2)
    figures = module.compare(options, answers, {"edits": [[10], [20]]})
    assert answers.asked == ["none", "bridge"] * 3
    assert figures["edits"]["none"]["tokens_per_second"]["samples"] == [1.0, 1.0]
    assert figures["edits"]["bridge"]["tokens_per_second"]["median"] == 2.0
    assert figures["edits"]["none"]["differs"] == []
    assert figures["edits"]["bridge"]["differs"] == [{"prompt": 1, "token": 2, "margin": 0.25}]
    table = module.table({"figures": figures})
    assert "| edits | bridge | 2.00 (2.00 to 2.00) | 2.00 | 1.00 | 1 |" in table


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--engine", "vllm", "--model", str(F32)], "a folder for vllm"),
        (["--engine", "llama_cpp", "--model", str(F32), "--candidates", "none,ngram-2"], "there is no ngram-2"),
        (["--engine", "llama_cpp", "--model", str(F32), "--candidates", "bridge"], "need none"),
    ],
)
def test_bad_arguments_are_refused(
    module: ModuleType, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        module.main(arguments)
    assert message in capsys.readouterr().err


@pytest.mark.skipif(not is_installed(), reason="needs llama-cpp-python and gguf")
def test_the_engine_answers_with_and_without_drafts(module: ModuleType) -> None:
    options = argparse.Namespace(model=F32, threads=1, python=sys.executable, max_new_tokens=32)
    with contextlib.ExitStack() as stack:
        answers = module.LlamaCpp(options, stack, [])
        assert answers.about["version"]
        assert {"1", "16"} <= answers.about["row_seconds"].keys()
        found = {name: answers.answer(name, [PROMPT]) for name in ("none", "lookup-10", "bridge", "again")}
        assert answers.margin(PROMPT, 1, 1) == 0.0
    for each in found.values():
        assert each["token_ids"] == found["none"]["token_ids"]
        assert each["after_first"] == 31
        assert each["rest"] > 0
    assert found["bridge"]["rounds"] > 0
    assert found["none"]["rounds"] == 0
