"""Every method samples the target's distribution: χ² of what it writes with a model whose text is a Markov chain.

The model is a Llama whose attention branches write nothing, so that the next token depends on the last one alone and
its transitions are known exactly. Everything else is real: drafts, states, trees, searches, rejections.
"""

import functools

import numpy as np
import pytest
import torch

from helpers.markov import TOKENS, deviation, markov_model, transitions, write
from helpers.runs import METHODS_OF_ANY_MODEL as METHODS
from selfspec.types import SamplingParams

SETTINGS = {
    "swift": {"schedule": "paper", "context_window": 8, "confidence_threshold": 0.3, "max_draft_length": 5},
    "clasp": {"schedule": "paper", "update_interval": 4, "draft_exit_threshold": 0.3},
    "knapspec": {"schedule": "paper", "interval": 4, "confidence_threshold": 0.3},
    "del": {"schedule": "paper"},
    "token-recycling": {"candidates": 3, "tree_size": 20},
}
"""Where the defaults draft too little or too much with so unsure a model, or search less than a short text allows."""


def test_the_model_is_a_markov_chain_with_a_taste() -> None:
    with torch.no_grad():
        logits = markov_model()(torch.tensor([[3, 1, 4, 1, 5, 0, 2]])).logits[0]
    expected = transitions()[[3, 1, 4, 1, 5, 0, 2]]
    np.testing.assert_allclose(torch.softmax(logits.double(), -1).numpy(), expected, atol=1e-5)
    assert transitions().max() > 0.5


QUICK = ("auto", "suffix", "swift", "token-recycling")
"""Methods that together draft in every way there is: chains, trees, known tokens, early exits."""
CASES = [pytest.param(each, marks=[pytest.mark.slow] * (each not in QUICK)) for each in METHODS]


@pytest.mark.parametrize("method", CASES)
def test_speculative_sampling_writes_the_targets_distribution(method: str) -> None:
    params = SamplingParams(max_new_tokens=TOKENS, temperature=1.0, seed=7, acceptance="speculative", ignore_eos=True)
    result = write(method, params, SETTINGS.get(method, {}))
    assert deviation(result) > 1e-3
    drafts = method != "autoregressive"
    assert (result.drafted > 100, result.accepted > 50) == (drafts, drafts)


COUPLED = SamplingParams(max_new_tokens=200, temperature=1.0, seed=7, ignore_eos=True)


@functools.cache
def plain_ids() -> tuple[int, ...]:
    return write("autoregressive", COUPLED, {}).token_ids


@pytest.mark.parametrize("method", METHODS)
def test_coupled_sampling_writes_what_the_seed_says(method: str) -> None:
    result = write(method, COUPLED, SETTINGS.get(method, {}))
    assert result.token_ids == plain_ids()
    drafts = method != "autoregressive"
    assert (result.drafted > 0, result.accepted > 0) == (drafts, drafts)
