"""Decides claims by paired tests: the bootstrap interval of a mean difference, and the power of the test.

A claim about two settings is a difference on each of some prompts. It *holds* if the 95 % interval of the mean
difference is above a bound, is *refuted* if the interval is below it, and is *undecided* otherwise, as with fewer than
``LEAST_PAIRS`` prompts. The interval is SciPy's BCa bootstrap (Efron 1987); the power is that of the paired t-test with
the spread that was seen.
"""

import bisect
import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
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

MOST_PARTS = 32
"""Most parts for whose number an interval is widened: beyond, the resamples have too few values at its ends."""

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
        refuted_among: among how many parts of a claim it is refuted still, its interval widened for their number
            (Bonferroni), up to ``MOST_PARTS``; 0 if it is not refuted.
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
    refuted_among: int = 0


def paired_test(differences: Sequence[float], *, bound: float = 0.0, effect: float | None = None) -> Test:
    """Tests whether the mean of some differences is above a bound.

    Args:
        differences: one for each prompt; at least one. Seeds and repeats of a prompt are averaged before.
        bound: what the claim says the mean is above.
        effect: difference from the bound that the paper reports.
    """
    values = np.asarray(differences, dtype=float)
    spread = float(values.std(ddof=1)) if len(values) > 1 else math.inf
    few = len(values) < 2
    return replace(
        interval_test(
            float(values.mean()), lambda level: mean_interval(values.tolist(), level=level), len(values), bound=bound
        ),
        detectable=None if few else detectable_difference(spread, len(values)),
        effect=effect,
        power=None if few or effect is None else t_test_power(effect, spread, len(values)),
    )


def interval_test(
    found: float, interval: Callable[[float], tuple[float, float]], pairs: int, *, bound: float = 0.0
) -> Test:
    """Tests whether a figure is above a bound by its intervals.

    Args:
        found: the figure, a mean unless said otherwise.
        interval: the figure's interval at a level.
        pairs: number of observations.
        bound: what the claim says the figure is above.
    """
    low, high = interval(LEVEL)
    status: Status = "undecided"
    if pairs >= LEAST_PAIRS and low > bound:
        status = "holds"
    elif pairs >= LEAST_PAIRS and high < bound:
        status = "refuted"

    def reaches(parts: int) -> bool:
        return interval(1 - (1 - LEVEL) / parts)[1] >= bound

    among = bisect.bisect_left(range(1, MOST_PARTS + 1), True, key=reaches) if status == "refuted" else 0
    return Test(status, found, low, high, pairs, bound, refuted_among=among)


def mean_interval(values: Sequence[float], *, seed: int = 0, level: float = LEVEL) -> tuple[float, float]:
    """The bootstrap interval of the mean of independent observations, at least one; equal ones have no width.

    BCa; the percentile interval where too few values differ for its acceleration.
    """
    if len(set(values)) == 1:
        return values[0], values[0]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", stats.DegenerateDataWarning)
        low, high = _interval(values, "BCa", seed, level)
    return (low, high) if math.isfinite(low) and math.isfinite(high) else _interval(values, "percentile", seed, level)


def _interval(values: Sequence[float], method: str, seed: int, level: float) -> tuple[float, float]:
    found = stats.bootstrap(
        (np.asarray(values, dtype=float),),
        np.mean,
        n_resamples=_RESAMPLES,
        confidence_level=level,
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
