"""Medians of a run, over the repeats of a prompt, then over the prompts, with intervals."""

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence

import numpy as np

from selfspec_lab.bench.run.measurement import Measurement

_RESAMPLES = 2000

Samples = Mapping[tuple[str, int], Measurement]
"""Measurements with an output, by prompt and repeat."""


def samples_of(measurements: Iterable[Measurement], candidate: str) -> Samples:
    """The outputs of a candidate."""
    return {
        (each.prompt, each.repeat): each for each in measurements if each.candidate == candidate and each.error is None
    }


def decode_speed(sample: Measurement) -> float | None:
    """Tokens after the first ÷ seconds after the first token; ``None`` for an output of one token."""
    tokens = len(sample.token_ids) - 1
    return tokens / sample.decode_seconds if tokens > 0 and sample.decode_seconds > 0 else None


def whole_speed(sample: Measurement) -> float | None:
    """All tokens ÷ the time of the whole request."""
    seconds = sample.prefill_seconds + sample.decode_seconds
    return len(sample.token_ids) / seconds if seconds > 0 else None


def over(
    samples: Samples, others: Samples, value: Callable[[Measurement], float | None]
) -> dict[tuple[str, int], float | None]:
    """A value of each output ÷ the same value of another candidate's output for the same prompt and repeat."""
    return {
        key: quotient(value(sample), value(others[key])) if key in others else None for key, sample in samples.items()
    }


def quotient(mine: float | None, theirs: float | None) -> float | None:
    """``mine / theirs``; ``None`` if one of them is ``None`` or ``theirs`` is 0."""
    return None if mine is None or not theirs else mine / theirs


def medians_by_prompt(values: Mapping[tuple[str, int], float | None]) -> dict[str, float]:
    """The median over the repeats by prompt; prompts without a value are left out."""
    by_prompt: dict[str, list[float]] = {}
    for (prompt, _), value in values.items():
        if value is not None:
            by_prompt.setdefault(prompt, []).append(value)
    return {prompt: statistics.median(repeats) for prompt, repeats in by_prompt.items()}


def median_over_prompts(values: Mapping[tuple[str, int], float | None]) -> float | None:
    """The median over the prompts of their medians over the repeats; ``None`` without values."""
    return median(list(medians_by_prompt(values).values()))


def median(values: Sequence[float]) -> float | None:
    """The median; ``None`` without values."""
    return statistics.median(values) if values else None


def speedups_by_prompt(samples: Samples, others: Samples) -> dict[str, float]:
    """Decoding speed ÷ that of another candidate, by prompt; the median over the repeats."""
    return medians_by_prompt(over(samples, others, decode_speed))


def median_interval(values: Sequence[float]) -> list[float] | None:
    """A 95 % interval of the median by resampling (percentile bootstrap, Efron 1979).

    Args:
        values: one per prompt.

    Returns:
        Its lower and its upper end; ``None`` without values.
    """
    if not values:
        return None
    drawn = np.random.default_rng(0).choice(np.asarray(values, dtype=float), (_RESAMPLES, len(values)))
    lower, upper = np.quantile(np.median(drawn, axis=1), [0.025, 0.975])
    return [float(lower), float(upper)]
