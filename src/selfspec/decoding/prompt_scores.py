"""The log-probabilities of a prompt, read from the states of its rows in parts that bound the memory of logits."""

from collections.abc import Sequence

import torch

from selfspec.runtimes.target import Target
from selfspec.sampling.logprobs import token_logprobs
from selfspec.types import TokenLogprobs

MOST_BYTES = 2**26
"""Of logits at a time, in float32. A part has at least one row, even if that takes more."""


def score_prompt(
    target: Target, hidden_states: torch.Tensor, token_ids: Sequence[int], alternatives: int
) -> list[TokenLogprobs]:
    """Scores tokens of a prompt.

    Args:
        target: the model.
        hidden_states: ``[n, hidden]``, the residual stream after the last sublayer. Row ``i`` predicts token ``i``.
        token_ids: ``[n]``, the tokens to score.
        alternatives: how many of the most probable tokens to report with each.

    Returns:
        ``[n]``, one for each token.
    """
    rows = max(1, MOST_BYTES // (target.vocab_size * torch.float32.itemsize))
    scored: list[TokenLogprobs] = []
    for first in range(0, len(token_ids), rows):
        part = slice(first, first + rows)
        scored += token_logprobs(target.logits(hidden_states[part]), token_ids[part], alternatives)
    return scored
