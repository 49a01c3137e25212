"""What a text costs under a model's logits."""

from __future__ import annotations

from collections.abc import Sequence

import torch

_ROWS = 64
"""Rows at a time; the logits of a whole window in float64 would take a gigabyte."""


def negative_log_likelihood(logits: torch.Tensor, token_ids: Sequence[int]) -> float:
    """The sum over all tokens but the first of their negative log-probabilities.

    Args:
        logits: those after every token, ``[len(token_ids), vocabulary]``.
        token_ids: the text.
    """
    following = torch.tensor(token_ids[1:])
    return sum(
        float(torch.nn.functional.cross_entropy(rows.double(), targets, reduction="sum"))
        for rows, targets in zip(logits[:-1].split(_ROWS), following.split(_ROWS), strict=True)
    )
