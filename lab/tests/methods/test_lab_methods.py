"""The laboratory's methods: text, runtimes, batches, sampling, low-bit drafts and cascades."""

from typing import Any

import pytest
import torch

from helpers.drafts import begin
from helpers.low_bit_model import random_model
from helpers.markov import deviation, write
from helpers.models import FAMILY_NAMES, VOCABULARY, build, plain_text, prompt
from helpers.runs import Run
from selfspec import Engine, SamplingParams
from selfspec.decoding.draft import NoDraft, Proposal
from selfspec.decoding.drafter import Feedback
from selfspec.methods import make_method
from selfspec.runtimes.target import Target
from selfspec.sampling.acceptance import Acceptance, TokenTree

RUNS: dict[str, tuple[Run, ...]] = {
    "adaptive-cosine": (
        Run(1, {"skip_ratio": 0.3, "update_interval": 1, "confidence_threshold": 0.0, "draft_length": 3}),
        Run(17, {"skip_ratio": 0.5, "candidates": "attention", "confidence_threshold": 0.2}),
        Run(64, {"skip_ratio": 0.4, "update_interval": 3, "recent_rounds": 2, "confidence_threshold": 0.3}),
    ),
    "jacobi": (
        Run(1, {"block_size": 8, "initial": "prompt"}, new_tokens=48),
        Run(17, {"block_size": 16, "initial": "prompt"}, new_tokens=48),
        Run(2, {"block_size": 24, "initial": "prompt"}, new_tokens=64),
    ),
    "lookahead": (
        Run(1, {"window_size": 4, "ngram_size": 3, "guess_set_size": 4}, new_tokens=48),
        Run(17, {"window_size": 5, "ngram_size": 4, "guess_set_size": 3, "keep_pool": True}, new_tokens=48),
        Run(64, {"window_size": 3, "ngram_size": 2, "guess_set_size": 8, "pool_from_prompt": True}, new_tokens=33),
    ),
}
METHODS = tuple(RUNS)
CASCADES = ("cascade(suffix, uniform)", "cascade(token-recycling, swift)", "cascade(prompt-lookup, suffix, layerskip)")
MARKOV_SETTINGS: dict[str, dict[str, Any]] = {
    "adaptive-cosine": {"update_interval": 4, "confidence_threshold": 0.3},
    "cascade(token-recycling, swift)": {
        "token-recycling": {"candidates": 3, "tree_size": 20},
        "swift": {"schedule": "paper", "context_window": 8, "confidence_threshold": 0.3, "max_draft_length": 5},
    },
}
"""The defaults draft little with so unsure a model."""


@pytest.mark.in_turn(4)  # the families' methods alternate, so that no third of the cases would have all of them
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("name", FAMILY_NAMES)
def test_text_is_the_models_own(name: str, method: str) -> None:
    results = []
    for run in RUNS[method]:
        result = Engine(build(name), method=method, settings=run.settings).generate(
            prompt(run.length), max_new_tokens=run.new_tokens
        )
        assert result.token_ids == plain_text(name, prompt(run.length), run.new_tokens)
        results.append(result)
    assert max(result.accepted for result in results) > 0


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("runtime", ["eager", "fused"])
def test_text_is_the_same_on_every_runtime(runtime: str, method: str) -> None:
    run = RUNS[method][-1]
    for name, length in (("llama", run.length), ("gemma3", 300)):
        engine = Engine(build(name), method=method, settings=run.settings, runtime=runtime, prefill_chunk=128)
        result = engine.generate(prompt(length), max_new_tokens=run.new_tokens)
        assert result.token_ids == plain_text(name, prompt(length), run.new_tokens)
        assert result.drafted > 0


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("count", [1, 2, 3])
def test_few_tokens(count: int, method: str) -> None:
    result = Engine(build("gemma3"), method=method).generate(prompt(64), max_new_tokens=count)
    assert result.token_ids == plain_text("gemma3", prompt(64), count)
    assert result.drafted <= max(0, count - 2), "drafted more than can be committed"


@pytest.mark.parametrize("params", [{}, {"temperature": 0.8, "seed": 3}], ids=["greedy", "seed"])
@pytest.mark.parametrize("method", METHODS)
def test_batches_write_what_each_prompt_writes_alone(method: str, params: dict[str, Any]) -> None:
    model, prompts = build("llama"), [prompt(length) for length in (17, 5, 40)]
    sampling = SamplingParams(max_new_tokens=32, ignore_eos=True, **params)
    expected = [Engine(model, method="autoregressive").generate(each, sampling).token_ids for each in prompts]
    results = Engine(model, method=method, settings=RUNS[method][1].settings).generate(prompts, sampling)
    assert [result.token_ids for result in results] == expected
    assert sum(result.drafted for result in results) > 0


@pytest.mark.parametrize("method", [*METHODS, *(pytest.param(each, marks=pytest.mark.slow) for each in CASCADES)])
def test_speculative_sampling_writes_the_targets_distribution(method: str) -> None:
    count = 1000 if method == "jacobi" else 400  # as many as show a correction that is drawn from the target itself
    params = SamplingParams(max_new_tokens=count, temperature=1.0, seed=7, acceptance="speculative", ignore_eos=True)
    result = write(method, params, MARKOV_SETTINGS.get(method, {}))
    assert deviation(result) > 1e-3
    assert result.drafted > 100
    assert result.accepted > 50


@pytest.mark.parametrize("method", [*METHODS, *CASCADES])
def test_coupled_sampling_writes_what_the_seed_says(method: str) -> None:
    params = SamplingParams(max_new_tokens=200, temperature=1.0, seed=7, ignore_eos=True)
    result = write(method, params, MARKOV_SETTINGS.get(method, {}))
    assert result.token_ids == write("autoregressive", params, {}).token_ids
    assert result.accepted > 0


@pytest.mark.filterwarnings("ignore::selfspec.errors.NoGainWarning")
def test_adaptive_cosine_drafts_with_low_bit_weights() -> None:
    model, settings = random_model(), {"skip_ratio": 0.3, "update_interval": 2, "confidence_threshold": 0.0}
    drafting = Engine(model, method="adaptive-cosine", settings={**settings, "draft_bits": 8})
    result = drafting.generate(prompt(30), max_new_tokens=40, ignore_eos=True)
    assert result.token_ids == Engine(model).generate(prompt(30), max_new_tokens=40, ignore_eos=True).token_ids
    assert result.accepted > 0
    assert {each.precision for each in result.rounds if each.drafted} == {drafting.method.draft_precision}


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("cascade(jacobi, layerskip)", {"layerskip.exit_layer": 4}),
        ("cascade(token-recycling, adaptive-cosine)", {"token-recycling.tree_size": 20}),
    ],
)
def test_they_are_parts_of_cascades(name: str, settings: dict[str, Any]) -> None:
    result = Engine(build("llama"), method=name, settings=settings).generate(prompt(17), max_new_tokens=48)
    assert result.token_ids == plain_text("llama", prompt(17), 48)
    assert result.accepted > 0


def observed(tokens: tuple[int, ...]) -> Feedback:
    """A round of another drafter that drafted nothing of use and committed some tokens."""
    rows = tuple(range(len(tokens)))
    proposal = Proposal(torch.tensor(tokens[:-1], dtype=torch.long), TokenTree.chain(len(tokens) - 1))
    return Feedback(NoDraft(), proposal, Acceptance(rows, tokens), lambda: torch.zeros(len(tokens), VOCABULARY))


def test_guesses_of_jacobi_and_the_window_of_lookahead_move_on() -> None:
    target = Target(build("llama"))
    jacobi = begin(make_method("jacobi", target, {"block_size": 6, "initial": "prompt"}), [5, 6, 7, 8])
    before = jacobi.plan().token_ids
    jacobi.observe(observed((1, 2)))
    assert jacobi.plan().token_ids[:4] == before[2:]
    lookahead: Any = begin(make_method("lookahead", target, {"window_size": 4, "ngram_size": 3}), [5, 6, 7, 8])
    levels = [list(level) for level in lookahead.window.levels]
    lookahead.observe(observed((1, 2)))
    assert [level[:2] for level in lookahead.window.levels] == [level[2:] for level in levels]
    assert {len(level) for level in lookahead.window.levels} == {4}
