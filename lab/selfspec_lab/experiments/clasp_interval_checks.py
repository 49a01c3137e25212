"""The checks of claim 5: where a sweep is fastest, by the clock and on the paper's machine."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median
from typing import Any

from selfspec_lab.checks import Check, compare, not_applicable
from selfspec_lab.experiments.base import Data
from selfspec_lab.experiments.sampled import by_prompt, prompt_means
from selfspec_lab.experiments.trials import CLOCK, MACHINE, rounds_of
from selfspec_lab.papers.costs import PAPER_MACHINES, roofline_cost
from selfspec_lab.replay import plain_seconds, replayed_seconds

SELECTION_STEPS = 0.14 / 0.1
"""What a selection takes in the paper, in steps: 0.14 seconds against 0.1 of a verification (section 5.1)."""

FALLS_PAST = 128
"""Rounds between selections from which on speed falls in the paper (section 5.3.2)."""


def replay_with_selections(each: Mapping[str, Any], interval: int) -> float:
    """The speedup of an output's rounds on the paper's machine, with a selection every ``interval`` rounds."""
    cost, rounds, prompt_tokens = roofline_cost(*PAPER_MACHINES["clasp"]), rounds_of(each), each["prompt_tokens"]
    selections = -(-len(rounds) // interval)
    step = cost.forward(1.0, 1.0, 1, prompt_tokens)
    seconds = replayed_seconds(rounds, prompt_tokens, cost) + selections * SELECTION_STEPS * step
    return plain_seconds(sum(row.tokens for row in rounds), prompt_tokens, cost) / seconds


@dataclass(frozen=True)
class Sweep:
    """The speedups of a sweep, by value of the swept setting.

    Attributes:
        where: ``CLOCK`` or ``MACHINE``.
        speedups: over plain decoding, one for each prompt: the geometric mean over its texts.
        traces: for each prompt those of its texts, which two settings share if they ran the same rounds.
        rounds: the most rounds of a text.
    """

    where: str
    speedups: Mapping[str, Sequence[float]]
    traces: Mapping[str, Sequence[Sequence[str]]]
    rounds: int


def read_sweeps(data: Data, sweep: str) -> tuple[Sweep, Sweep]:
    """A sweep on the paper's machine, and by the clock.

    Args:
        data: of the experiment.
        sweep: ``intervals`` or ``skipped``.
    """
    return _read_sweep(data, sweep, "machine", MACHINE), _read_sweep(clock_of(data), sweep, "speedups", CLOCK)


def clock_of(data: Data) -> Data:
    """What was measured by the clock."""
    timed: Data = data.get("clock", data)
    return timed


def _read_sweep(data: Data, sweep: str, name: str, where: str) -> Sweep:
    values, seeds = data[sweep], data.get("seeds", 1)
    return Sweep(
        where,
        {
            value: [math.exp(mean) for mean in prompt_means([math.log(speedup) for speedup in figures[name]], seeds)]
            for value, figures in values.items()
        },
        {value: by_prompt([each["trace"] for each in figures["trials"]], seeds) for value, figures in values.items()},
        max(max(figures["rounds"]) for figures in values.values()),
    )


@dataclass(frozen=True)
class Peak:
    """Where a sweep is fastest.

    Attributes:
        best: the value with the highest median speedup.
        picks: for each prompt the value between the ends that is best on the other half of the prompts.
        ends: the first and the last value of the sweep.
    """

    best: str
    picks: tuple[str, ...]
    ends: tuple[str, str]


def find_peak(speedups: Mapping[str, Sequence[float]]) -> Peak:
    """Finds the fastest value of a sweep, and for each prompt the inner one that the other half of the prompts chooses.

    Args:
        speedups: by value those of the prompts; at least three values with equally many prompts, at least two.
    """
    values = sorted(speedups, key=int)
    halves = [max(values[1:-1], key=lambda value: median(speedups[value][1 - half :: 2])) for half in (0, 1)]
    return Peak(
        best=max(values, key=lambda value: median(speedups[value])),
        picks=tuple(halves[index % 2] for index in range(len(speedups[values[0]]))),
        ends=(values[0], values[-1]),
    )


def lies_inside(data: Data, sweep: str, what: str, unit: str) -> list[Check]:
    """Figures 4a and 4b: the speed rises and then falls.

    Args:
        data: of the experiment.
        sweep: as for ``read_sweeps``.
        what: name of the swept quantity.
        unit: unit of its values.
    """
    return [_beats_end(each, end, sweep, what, unit) for each in read_sweeps(data, sweep) for end in (0, 1)]


def _never_falls(rounds: int) -> str:
    """Why texts of this many rounds cannot show that speed falls with the interval; empty if they can."""
    long = 2 * FALLS_PAST  # before that a set that stays is hardly older than one that is renewed where speed falls
    if rounds >= long:
        return ""
    return f"in the paper speed falls past {FALLS_PAST} rounds, which takes texts of {long}; these have up to {rounds}"


def _beats_end(swept: Sweep, end: int, sweep: str, what: str, unit: str) -> Check:
    """Whether values between the ends are faster than one end, on the prompts on which they ran other rounds."""
    peak, speedups = find_peak(swept.speedups), swept.speedups
    value = peak.ends[end]
    gains = [
        math.log(speedups[pick][index] / speedups[value][index])
        for index, pick in enumerate(peak.picks)
        if swept.traces[pick][index] != swept.traces[value][index]
    ]
    side = "smallest" if end == 0 else "largest"
    statement = f"the best {what} between the ends is faster than the {side}, {swept.where}"
    texts = f" (texts have up to {swept.rounds})" if sweep == "intervals" else ""
    figure = (
        f"best {median(speedups[peak.best]):.2f} times plain decoding at {peak.best} {unit}{texts}, {side} "
        f"{median(speedups[value]):.2f} at {value}; picked on the other half of the prompts: "
        f"{' and '.join(sorted({*peak.picks}, key=int))}"
    )
    if sweep == "intervals" and end and (unable := _never_falls(swept.rounds)):
        return not_applicable(statement, f"{unable}; {figure}")
    return compare(
        statement,
        gains,
        figure,
        what="log of the ratio of speeds",
        same=len(peak.picks) - len(gains),
        counts=swept.where == MACHINE,
    )


def trades_time_for_length(data: Data) -> Check:
    """Section 5.3.2: a longer interval lowers the mean generated length."""
    sweep, timed, seeds = data["intervals"], clock_of(data)["intervals"], data.get("seeds", 1)
    shortest, *_, longest = sorted(sweep, key=int)
    first, last = sweep[shortest], sweep[longest]
    lengths = [prompt_means(figures["mean_generated_lengths"], seeds) for figures in (first, last)]
    traces = read_sweeps(data, "intervals")[0].traces
    falls = [
        before - after
        for before, after, one, other in zip(*lengths, traces[shortest], traces[longest], strict=True)
        if one != other
    ]
    shares = [timed[value]["selection_share"] for value in (shortest, longest)]
    rates = [figures["acceptance_rate"] for figures in (first, last)]
    return compare(
        "with a longer interval fewer tokens are generated per round",
        falls,
        f"from {shortest} to {longest} rounds the share of selection goes from {shares[0]:.1%} to {shares[1]:.1%} "
        f"{CLOCK}, the mean generated length from {fmean(lengths[0]):.2f} to {fmean(lengths[1]):.2f}, acceptance from "
        f"{rates[0]:.2f} to {rates[1]:.2f}",
        what="fall",
        same=len(lengths[0]) - len(falls),
    )
