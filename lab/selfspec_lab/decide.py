"""Decides claims by paired tests: the bootstrap interval of a mean difference, and the power of the test.

A claim about two settings is a difference on each of some prompts. It *holds* if the 95 % interval of the mean
difference is above a bound, is *refuted* if the interval is below it, and is *undecided* otherwise, as with fewer than
``LEAST_PAIRS`` prompts. The interval is SciPy's BCa bootstrap (Efron 1987); the power is that of the paired t-test with
the spread that was seen.
"""

import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from scipy import stats

Status = Literal["holds", "undecided", "refuted", "not applicable"]

LEAST_PAIRS = 20
"""Fewest prompts on which a claim is decided."""

SEEDS = 3
"""Texts that are sampled of a prompt, each with a seed of its own; a difference is the mean over them."""

LEVEL = 0.95
"""Of the intervals; the tests are two-sided."""

POWER = 0.8
"""Power at which ``Test.detectable`` is given."""

_RESAMPLES = 5000
_CERTAIN = 30.0
"""Standard errors beyond which an effect is found for certain, and SciPy's distribution may lack numbers."""


@dataclass(frozen=True)
class Test:
    """A paired test.

    Attributes:
        status: what it decides.
        mean: mean difference.
        low: lower end of its interval.
        high: upper end.
        pairs: number of pairs.
        bound: what the mean is compared with.
        detectable: difference from the bound that the test finds with a power of ``POWER``; ``None`` for fewer than two
            pairs.
        effect: difference from the bound that the paper reports; ``None`` if it reports none.
        power: the chance that the test finds ``effect``, 0 to 1.
    """

    status: Status
    mean: float
    low: float
    high: float
    pairs: int
    bound: float = 0.0
    detectable: float | None = None
    effect: float | None = None
    power: float | None = None


def paired_test(differences: Sequence[float], *, bound: float = 0.0, effect: float | None = None) -> Test:
    """Tests whether the mean of some differences is above a bound.

    Args:
        differences: one for each prompt; at least one. Seeds and repeats of a prompt are averaged before.
        bound: what the claim says the mean is above.
        effect: difference from the bound that the paper reports.
    """
    values = np.asarray(differences, dtype=float)
    low, high = mean_interval(values.tolist())
    spread = float(values.std(ddof=1)) if len(values) > 1 else math.inf
    status: Status = "undecided"
    if len(values) >= LEAST_PAIRS and low > bound:
        status = "holds"
    elif len(values) >= LEAST_PAIRS and high < bound:
        status = "refuted"
    few = len(values) < 2
    return Test(
        status,
        float(values.mean()),
        low,
        high,
        len(values),
        bound,
        detectable=None if few else detectable_difference(spread, len(values)),
        effect=effect,
        power=None if few or effect is None else t_test_power(effect, spread, len(values)),
    )


def mean_interval(values: Sequence[float], *, seed: int = 0) -> tuple[float, float]:
    """The bootstrap interval of the mean of independent observations, at least one; equal ones have no width.

    BCa; the percentile interval where too few values differ for its acceleration.
    """
    if len(set(values)) == 1:
        return values[0], values[0]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", stats.DegenerateDataWarning)
        low, high = _interval(values, "BCa", seed)
    return (low, high) if math.isfinite(low) and math.isfinite(high) else _interval(values, "percentile", seed)


def _interval(values: Sequence[float], method: str, seed: int) -> tuple[float, float]:
    found = stats.bootstrap(
        (np.asarray(values, dtype=float),),
        np.mean,
        n_resamples=_RESAMPLES,
        confidence_level=LEVEL,
        method=method,
        rng=np.random.default_rng(seed),
    ).confidence_interval
    return float(found.low), float(found.high)


def t_test_power(effect: float, spread: float, pairs: int) -> float:
    """The chance that a two-sided paired t-test finds a mean difference.

    Args:
        effect: the true mean difference.
        spread: standard deviation of the differences.
        pairs: number of differences, at least 2.
    """
    if spread == 0:
        return float(effect != 0)
    freedom, shift = pairs - 1, abs(effect) / spread * math.sqrt(pairs)
    critical = stats.t.ppf((1 + LEVEL) / 2, freedom)
    found = float(stats.nct.sf(critical, freedom, min(shift, _CERTAIN)))  # the other tail is the wrong decision
    return found if math.isfinite(found) else 1.0


def detectable_difference(spread: float, pairs: int) -> float:
    """The mean difference that a two-sided paired t-test finds with a power of ``POWER``; see ``t_test_power``."""
    quantiles = stats.t.ppf([(1 + LEVEL) / 2, POWER], pairs - 1)
    return float(quantiles.sum() * spread / math.sqrt(pairs))


def describe_test(test: Test, form: str = "+.3f") -> str:
    """The interval and the power of a test in words.

    Args:
        test: the test.
        form: format of a difference.
    """
    words = f"{test.mean:{form}} ({test.low:{form}} to {test.high:{form}}) over {test.pairs} pairs"
    if test.bound:
        words += f", to be above {test.bound:{form}}"
    if test.pairs < LEAST_PAIRS:
        words += f", fewer than {LEAST_PAIRS}"
    if test.power is not None and test.effect is not None:
        words += f"; power {test.power:.2f} for the paper's {test.effect:{form}}"
    elif test.detectable is not None:
        words += f"; power {POWER:g} from {test.detectable:{form}} on"
    return words
