"""``benchmarks/referee_swift.py``: what it counts, our method watched, and a made program in the place of theirs."""

from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from selfspec.loading import load_model

UTILS = """
import torch

def layer_random_search():
    return [1], [2]

def layer_bayes_search():
    return {"x0": 0.5}, [2], [1]

def swift_optimization(model, statistics, optimizer):
    found = layer_bayes_search() if statistics["opt_iter"] else ({}, *layer_random_search())
    model.set_skip_layers(*found[1:])
    optimizer.register(params=found[0], target=0.25)
    statistics["opt_iter"] += 1
    statistics["optimization"] = statistics["opt_iter"] < 2

def swift_draft():
    return (torch.tensor([[[5, 6, 7]], [[8, 9, 4]]]), None, None), [0.9, 0.4]

def initialize_swift():
    logits, confidences = swift_draft()
    return logits, torch.tensor([[3]]), confidences

def get_choices_list(confidences):
    return [[0], [1], [0, 0]]

def evaluate_posterior():
    return torch.tensor(0), torch.tensor(1), None

def update_inference_inputs(text):
    return torch.cat([text, torch.tensor([[3, 5]])], 1), 2, torch.tensor([[9]])
"""

PROGRAM = """
import argparse
from types import SimpleNamespace

import torch
from fastchat.utils import str_to_torch_dtype
from transformers import AutoTokenizer

from evaluation_llama.eval import run_eval
from model.swift.utils import *

class Model:
    def __init__(self, dtype):
        assert dtype == torch.float32
        self.skipped = [1, 3], [1, 3]
    def eval(self):
        pass
    def get_skip_layers(self):
        return self.skipped
    def set_skip_layers(self, attention, mlp):
        self.skipped = attention, mlp

def write(text, model, tokenizer, most, statistics, optimizer, utility, logits_processor, max_steps):
    assert tokenizer.eos_token_id not in text[0].tolist()
    _, _, confidences = initialize_swift()
    for _ in range(max_steps):
        get_choices_list(confidences)
        evaluate_posterior()
        text, _, _ = update_inference_inputs(text)
        if statistics["optimization"]:
            swift_optimization(model, statistics, optimizer)
        _, confidences = swift_draft()
    return text, None, max_steps

if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    for name in ("model-path", "model-id", "task-name", "dtype"):
        parser.add_argument("--" + name, required=True)
    parser.add_argument("--temperature", type=float)
    parser.add_argument("--max-score", type=float)
    parser.add_argument("--optimization", action="store_true")
    options = parser.parse_args()
    assert options.max_score == 0.5
    AutoTokenizer.from_pretrained(options.model_path)
    run_eval(
        model=Model(str_to_torch_dtype(options.dtype)), tokenizer=AutoTokenizer.from_pretrained(""), forward_func=write,
        optimizer=SimpleNamespace(register=lambda params, target: None), utility=None, logits_processor=None,
        statistics={"opt_iter": 0, "optimization": options.optimization},
    )
"""

SCRIPT = """
MODEL_PATH=/data/model # a comment
OPT_INTERVAL=1
BAYES_INTERVAL=25
MAX_OPT_ITER=1000
MAX_TOLERANCE_ITER=300
MAX_SCORE=0.93
CONTEXT_WINDOW=50
SKIP_RATIO=0.45
run --opt-interval ${OPT_INTERVAL}
"""


@pytest.fixture
def module(benchmarks: Callable[[str], ModuleType]) -> ModuleType:
    return benchmarks("referee_swift")


def made_round(candidates: list[list[int]], accepted: list[int], following: int, **changes: Any) -> dict[str, Any]:
    confidences = [0.9] * len(candidates)
    common = {"skipped": [2, 3], "candidates": candidates, "confidences": confidences}
    return {**common, "accepted": accepted, "next": following, **changes}


def test_rounds_that_begin_at_the_same_token_are_compared(module: ModuleType) -> None:
    first, last = made_round([[5, 6], [7]], [5], 8), made_round([[1]], [1], 2)
    here = [first, made_round([[3, 4]], [3], 6), last]
    there = [{**first, "confidences": [0.9, 0.8]}, made_round([[3, 4], [6]], [3, 6], 1), last]
    found = module.compare_rounds(here, there)
    assert found["rounds"] == 3
    assert found["began"] == 2, "the third begins one token later there"
    assert found["equal"] == {"skipped": 2, "length": 1, "drafted": 1, "candidates": 1, "accepted": 1, "next": 1}
    assert found["confidence"] == pytest.approx(0.1)
    assert found["rejected"] == 1
    assert found["beside"] == 0
    assert found["here"] == [[2, 1], [1, 1]]
    assert found["there"] == [[2, 1], [2, 2], [1, 1]]
    assert module.compare_rounds(there, there)["equal"] == dict.fromkeys(module.ROUND, 3)


def test_other_candidates_beside_the_same_path_are_no_other_draft(module: ModuleType) -> None:
    found = module.compare_rounds([made_round([[5, 6]], [], 7)], [made_round([[5, 4]], [], 7)])
    assert found["equal"] == {"skipped": 1, "length": 1, "drafted": 1, "candidates": 0, "accepted": 1, "next": 1}


def test_steps_are_compared_in_their_order(module: ModuleType) -> None:
    there = [{"bayesian": False, "score": score, "kept": [2], "ended": False} for score in (0.25, 0.5, 0.75)]
    here = [there[0], {**there[1], "kept": [3], "ended": True}]
    found = module.compare_steps(here, there)
    assert found == {"steps": 3, "taken": 2, "equal": {"bayesian": 2, "score": 2, "kept": 1, "ended": 1}}
    assert module.scores(there) == {"steps": 3, "best": 0.75, "random": 0.5, "bayesian": None}


def test_the_table_has_counts_by_model_and_the_scores_of_both_searches(module: ModuleType) -> None:
    rounds = [made_round([[5, 6]], [6], 7)] * 2
    steps = [{"bayesian": True, "score": 0.5, "kept": [2], "ended": True}]
    there = {"token_ids": [4, 5], "rounds": rounds}
    text = module.compare_text("code 1", [4, 5, 7], [rounds[0], made_round([[5, 6]], [6], 8)], there)
    found = {"there": module.scores(steps), "here": module.scores([])}
    search = {"search": "any score", **module.compare_steps(steps, steps), "scores": found, "texts": [text]}
    table = module.table({"a file": {"model": "tiny", "drafts": [text, text], "searches": [search]}})
    assert "| equal | tiny |" in table
    assert "| texts by given sets | 2 of 2 |" in table
    assert "| rounds by given sets: token after these | 2 of 4 |" in table
    assert "| rounds while it searches: accepted tokens | 2 of 2 |" in table
    assert "| steps of searches: score of the candidate | 1 of 1 |" in table
    assert "| tiny | any score | 1, 0 | 0.50, - | -, - | 0.50, - |" in table
    assert "Of the 6 rounds 0 reject a draft token, and 6 accept one beside the path." in table


def test_our_search_scores_the_given_sets_and_its_own(module: ModuleType, checkpoint: str) -> None:
    model, tokenizer = load_model(checkpoint, dtype="float32", device="cpu")
    here = module.Here(model, tokenizer, {"context_window": 8, "bayesian_interval": 2, "max_matchness": 1.0})
    given = [[2, 3, 4], [2, 3, 5], [3, 4, 5]]
    written = here.write([5, 6, 7, 8], 40, given)
    assert written == list(here.engine.generate([5, 6, 7, 8], max_new_tokens=40, ignore_eos=True).token_ids)
    scores = [step["score"] for step in here.steps]
    assert here.steps[-1]["kept"] == given[scores.index(max(scores))]
    assert [step["bayesian"] for step in here.steps] == [False, True, False]
    assert [token for each in here.rounds for token in (*each["accepted"], each["next"])][:30] == written[1:31]
    here.write([5, 6, 7, 8], 40, None)
    assert len(here.steps) > 3


def test_our_method_drafts_with_a_given_set(module: ModuleType, checkpoint: str) -> None:
    model, tokenizer = load_model(checkpoint, dtype="float32", device="cpu")
    here = module.Here(model, tokenizer, {"max_optimization_steps": 0})
    here.skip([2])
    here.write([5, 6, 7, 8], 20, [])
    assert here.rounds
    assert all(each["skipped"] == [2] for each in here.rounds)
    assert here.steps == []
    counts = [len(tokens) for each in here.rounds[:3] for tokens in each["candidates"]]
    assert all(3 <= count <= 10 for count in counts)


def test_their_program_says_what_it_drafts_and_scores(module: ModuleType, tmp_path: Path) -> None:
    for name, text in (("model/swift/utils.py", UTILS), ("evaluation_llama/inference_swift.py", PROGRAM)):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text, encoding="utf-8")
    side = module.Process("referee_sides.swift.Swift", 1, clone=str(tmp_path), model="a-folder")
    with side:
        side.ask("start", options={"max-score": 0.5}, flags=["optimization"], seed=1)
        found = side.ask("write", token_ids=[1, 2], rounds=3)
        side.ask("start", options={"max-score": 0.5}, flags=[], seed=1)
        side.ask("skip", attention=[4], mlp=[5])
        fixed = side.ask("write", token_ids=[1, 2], rounds=1)
    common = {"candidates": [[5, 6], [8]], "confidences": [0.9, 0.4], "accepted": [5], "next": 9}
    assert found["token_ids"] == [3, 5] * 3
    assert found["rounds"] == [{"skipped": skipped, **common} for skipped in ([2, 3, 6, 7], [2, 5], [3, 4])]
    assert found["steps"] == [
        {"bayesian": False, "skipped": [2, 5], "score": 0.25, "kept": [2, 5], "ended": False},
        {"bayesian": True, "skipped": [3, 4], "score": 0.25, "kept": [3, 4], "ended": True},
    ]
    assert fixed == {"token_ids": [3, 5], "rounds": [{"skipped": [8, 11], **common}], "steps": []}


def test_the_values_of_their_script_are_options_of_their_program(module: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "eval_llama.sh").write_text(SCRIPT, encoding="utf-8")
    assert module.script_options(tmp_path) == {
        "opt-interval": 1,
        "bayes-interval": 25,
        "max-opt-iter": 1000,
        "max-tolerance-iter": 300,
        "max-score": 0.93,
        "context-window": 50,
        "skip-ratio": 0.45,
    }


def test_another_repository_is_refused(module: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        module.main([str(tmp_path), "--python", "python"])
    assert "is no clone of hemingkx/SWIFT" in capsys.readouterr().err
