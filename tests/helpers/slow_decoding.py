"""Decoding as it is defined: a whole forward of transformers for each token, and scores changed one by one in Python.

What is fast in the library is compared with this. Nothing of the library's sampling is used here.
"""

import math
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from typing import TypeAlias

import torch
from scipy import stats
from transformers import PreTrainedModel

from selfspec.types import SamplingParams

Allowed: TypeAlias = Callable[[Sequence[int]], Collection[int]]
"""The tokens that may follow an output."""


def slow_logits(model: PreTrainedModel, token_ids: Sequence[int]) -> list[list[float]]:
    """The model's logits after each token."""
    with torch.no_grad():
        return model(torch.tensor([list(token_ids)])).logits[0].float().tolist()


def slow_scores(
    logits: Sequence[float],
    params: SamplingParams,
    prompt: Sequence[int],
    output: Sequence[int],
    ends: Collection[int],
    allowed: Allowed | None = None,
) -> list[float]:
    """The scores from which the token after ``output`` is chosen.

    Args:
        logits: of the model, one for each token.
        params: biases, penalties, least length and temperature of them are used.
        prompt: its tokens.
        output: tokens so far.
        ends: tokens that end the output.
        allowed: the tokens that a grammar allows after an output; all of them if not given.
    """
    possible = range(len(logits)) if allowed is None else allowed(output)
    counts = Counter(output)
    scores = []
    for token_id, logit in enumerate(logits):
        score = logit + params.logit_bias.get(token_id, 0.0)
        if token_id in prompt or token_id in counts:
            penalty = params.repetition_penalty
            score = score / penalty if score > 0 else score * penalty
        times = counts[token_id]
        score -= params.frequency_penalty * times
        score -= params.presence_penalty if times else 0.0
        if token_id in ends and len(output) < params.min_tokens:
            score = -math.inf
        if token_id not in possible:
            score = -math.inf
        scores.append(score / params.temperature if params.temperature else score)
    return scores


def slow_greedy(
    model: PreTrainedModel,
    prompt: Sequence[int],
    params: SamplingParams,
    ends: Collection[int] = (),
    allowed: Allowed | None = None,
) -> tuple[int, ...]:
    """The greedy output; a choice that rounding could turn around is an error."""
    output: list[int] = []
    while len(output) < params.max_new_tokens:
        scores = slow_scores(slow_logits(model, [*prompt, *output])[-1], params, prompt, output, ends, allowed)
        best, second = sorted(scores, reverse=True)[:2]
        assert best - second > 1e-4, "a choice can fall either way; take another prompt"
        output.append(scores.index(best))
        if output[-1] in ends:
            break
    return tuple(output)


def p_value_of_samples(
    model: PreTrainedModel,
    prompt: Sequence[int],
    output: Sequence[int],
    params: SamplingParams,
    allowed: Allowed | None = None,
) -> float:
    """Whether tokens were drawn from the distributions that the slow scores give after each prefix.

    Each token becomes a number: the probability of the tokens before it in some order, and a random part of its own. If
    every token was drawn from its distribution, these numbers are independent and uniform (Rosenblatt 1952), which the
    Kolmogorov-Smirnov test looks at. Tokens that occur more often come first, so that a wrong penalty shows.
    """
    rows = slow_logits(model, [*prompt, *output])[len(prompt) - 1 : -1]
    uniform = torch.rand(len(output), generator=torch.Generator().manual_seed(0)).tolist()
    numbers = []
    for place, (token_id, logits) in enumerate(zip(output, rows, strict=True)):
        scores = slow_scores(logits, params, prompt, output[:place], (), allowed)
        largest = max(scores)
        weights = [math.exp(score - largest) for score in scores]
        times = Counter(output[:place])
        own = (-times[token_id], token_id)
        before = sum(weight for other, weight in enumerate(weights) if (-times[other], other) < own)
        numbers.append((before + uniform[place] * weights[token_id]) / sum(weights))
    return float(stats.kstest(numbers, "uniform").pvalue)
