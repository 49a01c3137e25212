"""Spearman's rank correlation."""

from collections.abc import Sequence

from scipy import stats


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
    return float(stats.spearmanr(one, other).statistic)
