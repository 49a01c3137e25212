"""Intervals by resampling (percentile bootstrap, Efron 1979)."""

from collections.abc import Sequence
from typing import Literal

import numpy as np

_RESAMPLES = 2000


def bootstrap_interval(
    values: Sequence[float], statistic: Literal["mean", "median"] = "mean", *, seed: int = 0, level: float = 0.95
) -> tuple[float, float]:
    """Bootstrap interval of the mean or the median of independent observations.

    Args:
        values: the observations, at least one.
        statistic: the statistic.
        seed: seed of the resampling.
        level: share of the resampled statistics inside the interval.

    Returns:
        The lower and the upper end.
    """
    drawn = np.random.default_rng(seed).choice(np.asarray(values, dtype=float), (_RESAMPLES, len(values)))
    figures = drawn.mean(axis=1) if statistic == "mean" else np.median(drawn, axis=1)
    lower, upper = np.quantile(figures, [(1 - level) / 2, (1 + level) / 2])
    return float(lower), float(upper)
