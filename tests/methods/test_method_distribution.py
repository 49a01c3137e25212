"""Every method samples the target's distribution: χ² of what it writes with a model whose text is a Markov chain.

The model is a Llama whose attention branches write nothing, so that the next token depends on the last one alone and
its transitions are known exactly. Everything else is real: drafts, states, trees, searches, rejections.
"""

import functools

import numpy as np
import pytest
import torch
from scipy import stats
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from helpers.runs import METHODS_OF_ANY_MODEL as METHODS
from selfspec.engine import Engine
from selfspec.types import Generation, SamplingParams

VOCABULARY = 6
TOKENS = 1000
SETTINGS = {
    "swift": {"schedule": "paper", "context_window": 8, "confidence_threshold": 0.3},
    "clasp": {"schedule": "paper", "update_interval": 4, "draft_exit_threshold": 0.3},
    "knapspec": {"schedule": "paper", "interval": 4, "confidence_threshold": 0.3},
    "del": {"schedule": "paper"},
    "adaptive-cosine": {"update_interval": 4, "confidence_threshold": 0.3},
    "token-recycling": {"candidates": 3, "tree_size": 20},
    "cascade(token-recycling, swift)": {
        "token-recycling": {"candidates": 3, "tree_size": 20},
        "swift": {"schedule": "paper", "context_window": 8, "confidence_threshold": 0.3},
    },
}
"""Where the defaults draft little with so unsure a model, or search less than such a short text has room for."""


@functools.cache
def markov_model() -> PreTrainedModel:
    """Random weights, large enough that every token prefers some others, and nothing from attention."""
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=4,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=TOKENS + 64,
        tie_word_embeddings=False,
    )
    torch.manual_seed(3)
    model = LlamaForCausalLM(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 2:
                parameter.normal_(0, 0.4)
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.zero_()
    return model


@functools.cache
def transitions() -> np.ndarray:
    """``[last, next]``: the model's own distribution after each token."""
    with torch.no_grad():
        logits = markov_model()(torch.arange(VOCABULARY)[:, None]).logits[:, 0]
    return torch.softmax(logits.double(), -1).numpy()


def write(method: str, params: SamplingParams) -> Generation:
    engine = Engine(markov_model(), method=method, settings=SETTINGS.get(method, {}))
    return engine.generate([1, 4, 2, 0, 1, 4, 2], params)


def test_the_model_is_a_markov_chain_with_a_taste() -> None:
    with torch.no_grad():
        logits = markov_model()(torch.tensor([[3, 1, 4, 1, 5, 0, 2]])).logits[0]
    expected = transitions()[[3, 1, 4, 1, 5, 0, 2]]
    np.testing.assert_allclose(torch.softmax(logits.double(), -1).numpy(), expected, atol=1e-5)
    assert transitions().max() > 0.5


CASCADES = ("cascade(suffix, uniform)", "cascade(token-recycling, swift)", "cascade(prompt-lookup, jacobi, layerskip)")


@pytest.mark.parametrize("method", [*METHODS, *CASCADES])
def test_speculative_sampling_writes_the_targets_distribution(method: str) -> None:
    params = SamplingParams(max_new_tokens=TOKENS, temperature=1.0, seed=7, acceptance="speculative", ignore_eos=True)
    result = write(method, params)
    counts = np.zeros((VOCABULARY, VOCABULARY))
    np.add.at(counts, (result.token_ids[:-1], result.token_ids[1:]), 1)
    expected = transitions() * counts.sum(1, keepdims=True)
    statistic = ((counts - expected) ** 2 / expected)[expected >= 1].sum()
    assert stats.chi2.sf(statistic, (expected >= 1).sum() - VOCABULARY) > 1e-3
    drafts = method != "autoregressive"
    assert (result.drafted > 100, result.accepted > 50) == (drafts, drafts)


COUPLED = SamplingParams(max_new_tokens=200, temperature=1.0, seed=7, ignore_eos=True)


@functools.cache
def plain_ids() -> tuple[int, ...]:
    return write("autoregressive", COUPLED).token_ids


@pytest.mark.parametrize("method", [*METHODS, *CASCADES])
def test_coupled_sampling_writes_what_the_seed_says(method: str) -> None:
    result = write(method, COUPLED)
    assert result.token_ids == plain_ids()
    drafts = method != "autoregressive"
    assert (result.drafted > 0, result.accepted > 0) == (drafts, drafts)
