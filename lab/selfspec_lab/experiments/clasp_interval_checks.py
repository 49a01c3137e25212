"""The checks of claim 5: where a sweep is fastest, and whether that is more than noise."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median
from typing import Any

from selfspec_lab.experiments.base import Check
from selfspec_lab.experiments.lab import bootstrap_interval


@dataclass(frozen=True)
class Peak:
    """Where a sweep is fastest, and by how much the ends of the sweep are slower.

    Attributes:
        best: the value with the highest median speedup.
        speedup: that median.
        picks: the best value for each half of the prompts, chosen on the other half.
        ends: the first and the last value of the sweep.
        end_speedups: their median speedups.
        leads: for each end the 95 % interval of the mean ratio of speeds, pick over end, prompt by prompt.
    """

    best: int
    speedup: float
    picks: tuple[int, int]
    ends: tuple[int, int]
    end_speedups: tuple[float, float]
    leads: tuple[tuple[float, float], tuple[float, float]]

    @property
    def inside(self) -> bool:
        """Whether both picks are between the ends, and faster than both ends beyond the spread over prompts."""
        return not {*self.picks} & {*self.ends} and all(lower > 1 for lower, _ in self.leads)


def find_peak(sweep: Mapping[str, Mapping[str, Any]]) -> Peak:
    """Finds the fastest value of a sweep, and tests it on prompts that did not choose it.

    Args:
        sweep: by value ``speedups``, one number per prompt, for at least two prompts.
    """
    values = sorted(sweep, key=int)
    speedups: dict[str, Sequence[float]] = {value: sweep[value]["speedups"] for value in values}
    medians = {value: median(speedups[value]) for value in values}
    best = max(values, key=medians.__getitem__)
    picks = [max(values, key=lambda value: median(speedups[value][1 - half :: 2])) for half in (0, 1)]
    picked = [speedups[picks[index % 2]][index] for index in range(len(speedups[best]))]
    first, last = (_lead(picked, speedups[end]) for end in (values[0], values[-1]))
    return Peak(
        best=int(best),
        speedup=medians[best],
        picks=(int(picks[0]), int(picks[1])),
        ends=(int(values[0]), int(values[-1])),
        end_speedups=(medians[values[0]], medians[values[-1]]),
        leads=(first, last),
    )


def _lead(picked: Sequence[float], other: Sequence[float]) -> tuple[float, float]:
    return bootstrap_interval([mine / theirs for mine, theirs in zip(picked, other, strict=True)])


def lies_inside(sweep: Mapping[str, Any], what: str, unit: str) -> Check:
    """Figures 4a and 4b: the speed rises and then falls.

    Args:
        sweep: as for ``find_peak``.
        what: name of the swept quantity.
        unit: unit of its values.
    """
    peak = find_peak(sweep)
    others = " and ".join(
        f"{speedup:.2f} at {end} (the picks are {lower:.2f} to {upper:.2f} times as fast)"
        for end, speedup, (lower, upper) in zip(peak.ends, peak.end_speedups, peak.leads, strict=True)
    )
    picks = " and ".join(map(str, sorted({*peak.picks})))
    return Check(
        f"the {what} with the highest speed is inside the sweep",
        peak.inside,
        f"fastest: {peak.speedup:.2f} times plain decoding at {peak.best} {unit}; picked on the other half of the "
        f"prompts: {picks}; against {others}",
    )


def trades_time_for_length(sweep: Mapping[str, Any]) -> Check:
    """Section 5.3.2: a longer interval saves selection time and lowers the mean generated length."""
    first, *_, last = sweep.values()
    lengths = [figures["mean_generated_lengths"] for figures in (first, last)]
    lower, upper = bootstrap_interval([before - after for before, after in zip(*lengths, strict=True)])
    shares = [figures["selection_share"] for figures in (first, last)]
    rates = [figures["acceptance_rate"] for figures in (first, last)]
    shortest, *_, longest = sweep
    return Check(
        "a longer interval takes less time for selection and accepts fewer draft tokens per round",
        shares[0] > shares[1] and lower > 0,
        f"from {shortest} to {longest} rounds the share of selection goes from {shares[0]:.1%} to "
        f"{shares[1]:.1%}, the mean generated length from {fmean(lengths[0]):.2f} to {fmean(lengths[1]):.2f} (a fall "
        f"by {lower:.2f} to {upper:.2f}), acceptance from {rates[0]:.2f} to {rates[1]:.2f}",
    )
