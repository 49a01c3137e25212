"""A model whose text is a Markov chain with known transitions, to test distributions.

A Llama whose attention branches write nothing, so that the next token depends on the last one alone. Everything else is
real: drafts, states, trees, searches, rejections.
"""

import functools
from typing import Any

import numpy as np
import torch
from scipy import stats
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from selfspec.engine import Engine
from selfspec.types import Generation, SamplingParams

VOCABULARY = 6
TOKENS = 1000


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


def write(method: str, params: SamplingParams, settings: dict[str, Any]) -> Generation:
    """Generates with a method on this model."""
    return Engine(markov_model(), method=method, settings=settings).generate([1, 4, 2, 0, 1, 4, 2], params)


def deviation(result: Generation) -> float:
    """The p-value of the χ² test that the tokens follow the model's own transitions."""
    counts = np.zeros((VOCABULARY, VOCABULARY))
    np.add.at(counts, (result.token_ids[:-1], result.token_ids[1:]), 1)
    expected = transitions() * counts.sum(1, keepdims=True)
    statistic = ((counts - expected) ** 2 / expected)[expected >= 1].sum()
    return float(stats.chi2.sf(statistic, (expected >= 1).sum() - VOCABULARY))
