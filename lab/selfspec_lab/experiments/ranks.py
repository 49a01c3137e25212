"""Spearman's rank correlation."""

import statistics
from collections.abc import Sequence

import numpy as np


def rank_correlation(one: Sequence[float], other: Sequence[float]) -> float:
    """Spearman's rank correlation (Spearman 1904).

    Args:
        one: numbers.
        other: equally many numbers.

    Returns:
        The correlation, -1 to 1; 0 if one of the two is constant or has fewer than two numbers.
    """
    if min(len(set(one)), len(set(other))) < 2:
        return 0.0
    return statistics.correlation(_ranks(one), _ranks(other))


def _ranks(values: Sequence[float]) -> list[float]:
    """Ranks from 1; equal numbers share their mean rank."""
    _, index, counts = np.unique(np.asarray(values, dtype=float), return_inverse=True, return_counts=True)
    shared: list[float] = (np.cumsum(counts) - (counts - 1) / 2)[index].tolist()
    return shared
