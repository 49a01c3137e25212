"""The checks of claim 5: where a sweep is fastest, by the clock and on the paper's machine."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median
from typing import Any

from selfspec.types import Generation
from selfspec_lab.checks import Check, compare, not_applicable
from selfspec_lab.experiments.trials import CLOCK, MACHINE
from selfspec_lab.papers.costs import PAPER_MACHINES, roofline_cost
from selfspec_lab.replay import plain_seconds, played, replayed_seconds

SELECTION_STEPS = 0.14 / 0.1
"""What a selection takes in the paper, in steps: 0.14 seconds against 0.1 of a verification (section 5.1)."""

FALLS_PAST = 128
"""Rounds between selections from which on speed falls in the paper (section 5.3.2)."""

Sweep = Mapping[str, Mapping[str, Any]]
"""By value of a setting the figures of its outputs."""


def replay_with_selections(written: Generation, interval: int) -> float:
    """The speedup of an output's rounds on the paper's machine, with a selection every ``interval`` rounds."""
    cost = roofline_cost(*PAPER_MACHINES["clasp"])
    rounds = [played(record) for record in written.rounds]
    selections = -(-len(rounds) // interval)
    step = cost.forward(1.0, 1.0, 1, written.prompt_token_count)
    seconds = replayed_seconds(rounds, written.prompt_token_count, cost) + selections * SELECTION_STEPS * step
    return plain_seconds(sum(each.tokens for each in rounds), written.prompt_token_count, cost) / seconds


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


def find_peak(sweep: Sweep, name: str) -> Peak:
    """Finds the fastest value of a sweep, and for each prompt the inner one that the other half of the prompts chooses.

    Args:
        sweep: at least three values with equally many prompts, at least two.
        name: of the speedups: ``speedups`` by the clock, ``machine`` on the paper's machine.
    """
    values = sorted(sweep, key=int)
    speedups: dict[str, Sequence[float]] = {value: sweep[value][name] for value in values}
    halves = [max(values[1:-1], key=lambda value: median(speedups[value][1 - half :: 2])) for half in (0, 1)]
    return Peak(
        best=max(values, key=lambda value: median(speedups[value])),
        picks=tuple(halves[index % 2] for index in range(len(speedups[values[0]]))),
        ends=(values[0], values[-1]),
    )


def lies_inside(sweep: Sweep, what: str, unit: str, *, unable: str = "") -> list[Check]:
    """Figures 4a and 4b: the speed rises and then falls.

    Args:
        sweep: as for ``find_peak``.
        what: name of the swept quantity.
        unit: unit of its values.
        unable: why the sweep cannot show a fall; empty if it can.
    """
    return [
        _beats_end(sweep, end, what, unit, name, where, unable if end else "")
        for name, where in (("machine", MACHINE), ("speedups", CLOCK))
        for end in (0, 1)
    ]


def never_falls(rounds: int) -> str:
    """Why texts of this many rounds cannot show that speed falls with the interval; empty if they can."""
    if rounds > FALLS_PAST:
        return ""
    return f"in the paper speed falls past {FALLS_PAST} rounds, and these texts have up to {rounds}"


def _beats_end(sweep: Sweep, end: int, what: str, unit: str, name: str, where: str, unable: str) -> Check:
    """Whether values between the ends are faster than one end, on the prompts on which they ran other rounds."""
    peak = find_peak(sweep, name)
    value = peak.ends[end]
    gains = [
        math.log(sweep[pick][name][index] / sweep[value][name][index])
        for index, pick in enumerate(peak.picks)
        if sweep[pick]["trials"][index]["trace"] != sweep[value]["trials"][index]["trace"]
    ]
    side = "smallest" if end == 0 else "largest"
    statement = f"the best {what} between the ends is faster than the {side}, {where}"
    figure = (
        f"best {median(sweep[peak.best][name]):.2f} times plain decoding at {peak.best} {unit}, {side} "
        f"{median(sweep[value][name]):.2f} at {value}; picked on the other half of the prompts: "
        f"{' and '.join(sorted({*peak.picks}, key=int))}"
    )
    if unable:
        return not_applicable(statement, f"{unable}; {figure}")
    return compare(
        statement,
        gains,
        figure,
        what="log of the ratio of speeds",
        same=len(peak.picks) - len(gains),
        counts=where == MACHINE,
    )


def trades_time_for_length(sweep: Sweep) -> list[Check]:
    """Section 5.3.2: a longer interval lowers the mean generated length."""
    shortest, *_, longest = sorted(sweep, key=int)
    first, last = sweep[shortest], sweep[longest]
    lengths = [figures["mean_generated_lengths"] for figures in (first, last)]
    falls = [
        before - after
        for before, after, one, other in zip(*lengths, first["trials"], last["trials"], strict=True)
        if one["trace"] != other["trace"]
    ]
    shares = [figures["selection_share"] for figures in (first, last)]
    rates = [figures["acceptance_rate"] for figures in (first, last)]
    return [
        compare(
            "with a longer interval fewer tokens are generated per round",
            falls,
            f"from {shortest} to {longest} rounds the share of selection goes from {shares[0]:.1%} to {shares[1]:.1%}, "
            f"the mean generated length from {fmean(lengths[0]):.2f} to {fmean(lengths[1]):.2f}, acceptance from "
            f"{rates[0]:.2f} to {rates[1]:.2f}",
            what="fall",
            same=len(lengths[0]) - len(falls),
        )
    ]
