"""The page about clients is made of the committed results; how the backends of lm-eval are compared."""

import importlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
BENCHMARK = ROOT / "benchmarks" / "clients"
RESULTS = ROOT / "benchmarks" / "results" / "clients"


@pytest.fixture(autouse=True)
def _scripts(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.syspath_prepend(str(BENCHMARK))
    yield
    for name in ("client", "report", "run_lm_eval", "run_scripts", "served"):
        monkeypatch.delitem(sys.modules, name, raising=False)


def test_the_page_is_made_of_the_committed_results() -> None:
    render = importlib.import_module("report").render
    names = ("openai", "anthropic", "langchain-openai", "litellm", "instructor", "lm-eval", "guidellm")
    agents = ("claude-code", "codex", "opencode-ai")
    files = [RESULTS / f"{name}.json" for name in (*names, *agents, "schemathesis")]
    results = {file.stem: json.loads(file.read_text(encoding="utf-8")) for file in files if file.is_file()}
    assert results
    assert (ROOT / "docs" / "clients.md").read_text(encoding="utf-8") == render(results)


def samples(scores: list[tuple[str, str]], text: str, correct: float = 1.0) -> dict[str, Any]:
    """What lm-eval logs for one question of each task."""
    return {
        "selfspec_choice": [{"filtered_resps": scores, "acc": correct}],
        "selfspec_answer": [{"resps": [[text]], "exact_match": 0.0}],
    }


@pytest.mark.parametrize(
    ("ours", "holds"),
    [
        (samples([("-1.00001", "False"), ("-0.5", "True")], "Tokyo"), True),
        (samples([("-1.1", "False"), ("-0.5", "True")], "Tokyo"), False),
        (samples([("-1.0", "True"), ("-0.5", "True")], "Tokyo"), False),
        (samples([("-1.0", "False"), ("-0.5", "True")], "Tokio"), False),
        (samples([("-1.0", "False"), ("-0.5", "True")], "Tokyo", 0.0), False),
    ],
)
def test_backends_agree_only_in_everything(ours: dict[str, Any], holds: bool) -> None:
    theirs = samples([("-1.0", "False"), ("-0.5", "True")], "Tokyo")
    found = importlib.import_module("run_lm_eval").compare(ours, theirs)
    assert found["holds"] is holds
    assert (found["log_likelihoods"], found["texts"]) == (2, 1)
