"""What claim 5 comes to: where a sweep is fastest, and whether that is more than noise."""

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
        best: what is swept, at the highest median speedup.
        speedup: that median.
        ends: the first and the last value of the sweep.
        end_speedups: their medians.
        leads: intervals of the mean ratio of the best one's speed to each end's, prompt by prompt.
    """

    best: int
    speedup: float
    ends: tuple[int, int]
    end_speedups: tuple[float, float]
    leads: tuple[tuple[float, float], tuple[float, float]]

    @property
    def inside(self) -> bool:
        """Whether the best one is at neither end, and faster than both by more than the prompts' spread explains."""
        return self.best not in self.ends and all(lower > 1 for lower, _ in self.leads)


def find_peak(sweep: Mapping[str, Mapping[str, Any]]) -> Peak:
    """Where a sweep is fastest.

    Args:
        sweep: by value ``speedups``, prompt by prompt.
    """
    values = sorted(sweep, key=int)
    medians = {value: median(sweep[value]["speedups"]) for value in values}
    best = max(values, key=medians.__getitem__)
    first, last = (_lead(sweep[best]["speedups"], sweep[end]["speedups"]) for end in (values[0], values[-1]))
    ends = (values[0], values[-1])
    return Peak(
        int(best), medians[best], (int(ends[0]), int(ends[1])), (medians[ends[0]], medians[ends[1]]), (first, last)
    )


def _lead(best: Sequence[float], other: Sequence[float]) -> tuple[float, float]:
    return bootstrap_interval([mine / theirs for mine, theirs in zip(best, other, strict=True)])


def lies_inside(sweep: Mapping[str, Any], what: str, unit: str) -> Check:
    """Figures 4a and 4b: the speed rises and then falls.

    Args:
        sweep: as for ``find_peak``.
        what: is swept, for readers.
        unit: of its values, for readers.
    """
    peak = find_peak(sweep)
    where = "inside" if peak.inside else "at an end" if peak.best in peak.ends else "inside, but within noise of an end"
    others = " and ".join(
        f"{speedup:.2f} at {end} (the best is {lower:.2f} to {upper:.2f} times as fast)"
        for end, speedup, (lower, upper) in zip(peak.ends, peak.end_speedups, peak.leads, strict=True)
        if end != peak.best
    )
    return Check(
        f"the {what} with the highest speed lies inside of the sweep",
        peak.inside,
        f"highest {where}: {peak.speedup:.2f} times plain decoding at {peak.best} {unit}, against {others}",
    )


def trades_time_for_length(sweep: Mapping[str, Any]) -> Check:
    """Section 5.3.2: what an interval saves, and what it costs."""
    first, *_, last = sweep.values()
    lengths = [figures["mean_generated_lengths"] for figures in (first, last)]
    lower, upper = bootstrap_interval([before - after for before, after in zip(*lengths, strict=True)])
    shares = [figures["selection_share"] for figures in (first, last)]
    rates = [figures["acceptance_rate"] for figures in (first, last)]
    shortest, *_, longest = sweep
    return Check(
        "a longer interval takes less time for choosing layers and accepts fewer draft tokens a round",
        shares[0] > shares[1] and lower > 0,
        f"from {shortest} to {longest} rounds the share of time for choosing goes from {shares[0]:.1%} to "
        f"{shares[1]:.1%}, the mean generated length from {fmean(lengths[0]):.2f} to {fmean(lengths[1]):.2f} (a fall "
        f"by {lower:.2f} to {upper:.2f}), acceptance from {rates[0]:.2f} to {rates[1]:.2f}",
    )
