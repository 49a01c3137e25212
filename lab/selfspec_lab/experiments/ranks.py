"""Spearman's rank correlation."""

import statistics
from collections.abc import Sequence

import numpy as np


def rank_correlation(one: Sequence[float], other: Sequence[float]) -> float:
    """Whether two rows of numbers rise together, whatever their shape (Spearman 1904).

    Args:
        one: numbers.
        other: as many.

    Returns:
        1 where they rise together throughout, -1 where one falls as the other rises; 0 where one of them stays the
        same, or there are fewer than two.
    """
    if min(len(set(one)), len(set(other))) < 2:
        return 0.0
    return statistics.correlation(_ranks(one), _ranks(other))


def _ranks(values: Sequence[float]) -> list[float]:
    """Place of each number among them, counted from 1; equal ones share the mean of their places."""
    _, place, counts = np.unique(np.asarray(values, dtype=float), return_inverse=True, return_counts=True)
    shared: list[float] = (np.cumsum(counts) - (counts - 1) / 2)[place].tolist()
    return shared
