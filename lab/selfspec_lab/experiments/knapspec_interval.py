"""Claim 7, third part: the interval between selections has an interior optimum (KnapSpec, figure 6)."""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

from selfspec import Engine
from selfspec.methods import make_method
from selfspec.types import Generation
from selfspec_lab.checks import Check, compare, shown
from selfspec_lab.experiments.base import Data
from selfspec_lab.experiments.knapspec_scene import MODEL, knapspec_with, measure_profile
from selfspec_lab.experiments.lab import Lab
from selfspec_lab.experiments.sampled import TEMPERATURE, write_in_turn
from selfspec_lab.experiments.trials import CLOCK
from selfspec_lab.inspection import add_seconds, shares
from selfspec_lab.measuring import Target
from selfspec_lab.prompts import PROMPTS

if TYPE_CHECKING:
    from matplotlib.axes import Axes

WIDENING = 2
"""Factor by which the checkpoint is widened. A step is still bound by memory; a selection is bound by arithmetic on a
processor, and at four times the width short intervals would take too long."""

METHOD = (
    f"Figure 6: speed and selection's share of the time against the interval, on the checkpoint widened {WIDENING} "
    f"times, one text a domain, sampled with a seed at temperature {TEMPERATURE}, so all intervals write the "
    "same text. On a processor a selection is bound by arithmetic and costs more steps than on an accelerator. The "
    "paper has intervals of 4 to 256 on long outputs."
)


@dataclass(frozen=True)
class Amounts:
    """How much is measured.

    Attributes:
        intervals: rounds between two selections, ascending, at least three.
        domains: number of domains, with one prompt each.
        max_new_tokens: length of the outputs.
        widen: factor of the model.
    """

    intervals: tuple[int, ...] = (8, 16, 32, 64, 128)
    domains: int = 3
    max_new_tokens: int = 320
    widen: int = WIDENING


QUICK = Amounts(intervals=(8, 32, 128), domains=1, max_new_tokens=160)


def measure(lab: Lab, amounts: Amounts) -> Data:
    """Speed, share of selection and acceptance of every interval, measured in turns."""
    model, tokenizer = lab.load(MODEL, widen=amounts.widen)
    target = Target(model)
    profile = measure_profile(target)
    engines = {"plain": Engine(model, tokenizer, make_method("autoregressive", target))} | {
        str(interval): Engine(model, tokenizer, knapspec_with(target, profile, interval=interval))
        for interval in amounts.intervals
    }
    prompts = [lab.prompts(domain, 1)[0] for domain in list(PROMPTS)[: amounts.domains]]
    written = write_in_turn(lab, engines, prompts, amounts.max_new_tokens, seeds=[lab.seed] * len(prompts))
    plain = written.pop("plain")
    return {
        "plain_tokens_per_second": [each.tokens_per_second for each in plain],
        "intervals": {name: _describe(generations) for name, generations in written.items()},
    }


def judge(data: Data) -> Sequence[Check]:
    """Whether an inner interval is the fastest; whether longer intervals spend less time on selection."""
    intervals: dict[str, Data] = data["intervals"]
    names = sorted(intervals, key=int)
    speeds = {name: statistics.fmean(intervals[name]["tokens_per_second"]) for name in names}
    best = max(names[1:-1], key=speeds.__getitem__)
    times = statistics.fmean(data["plain_tokens_per_second"])
    spent = [statistics.fmean(intervals[name]["selection_share"]) for name in names]
    told = ", ".join(f"{speed / times:.2f}× at {name}" for name, speed in speeds.items())
    return [
        *(
            compare(
                f"the fastest interval between the ends is faster than the {side}, {CLOCK}",
                [math.log(ratio) for ratio in _ratios(data, best, end)],
                f"over plain decoding {told} (paper: fastest at 64 of 4 to 256)",
                what="log of the ratio of speeds",
                counts=False,
            )
            for side, end in (("shortest", names[0]), ("longest", names[-1]))
        ),
        shown(
            "the share of the time of selection falls with the interval",  # fewer selections of the same cost
            all(after < before for before, after in pairwise(spent)),
            ", ".join(f"{share:.0%} at {name}" for share, name in zip(spent, names, strict=True))
            + " (paper: 40.9 % at 4, 7.5 % at 64)",
        ),
    ]


def draw(panel: "Axes", data: Data) -> None:
    """Speedup and share of selection against the interval."""
    intervals: dict[str, Data] = data["intervals"]
    names = sorted(intervals, key=int)
    numbers = [int(name) for name in names]
    plain = statistics.fmean(data["plain_tokens_per_second"])
    speedups = [statistics.fmean(intervals[name]["tokens_per_second"]) / plain for name in names]
    spent = [100 * statistics.fmean(intervals[name]["selection_share"]) for name in names]
    lines = panel.plot(numbers, speedups, color="#0072b2", marker="o", label="speed (left)")
    other = panel.twinx()
    lines += other.plot(numbers, spent, color="#d55e00", marker="s", linestyle="--", label="selection (right)")
    panel.set_xscale("log", base=2)
    panel.set_xticks(numbers, names)
    panel.set_ylim(0, 1.5 * max(speedups))
    other.set_ylim(0, 1.5 * max(spent))
    panel.set_xlabel("interval, rounds")
    panel.set_ylabel("speed ÷ plain decoding")
    other.set_ylabel("selection, % of the time")
    panel.set_title("fig. 6: interval between selections", fontsize="medium")
    panel.legend(handles=lines, frameon=False, fontsize="small", loc="upper center")


def _describe(generations: Sequence[Generation]) -> Data:
    """The figures, one number per text."""
    return {
        "tokens_per_second": [each.tokens_per_second for each in generations],
        "selection_share": [shares(add_seconds(each.rounds))["select"] for each in generations],
        "acceptance_rate": [each.acceptance_rate for each in generations],
        "rounds": [each.round_count for each in generations],
    }


def _ratios(data: Data, name: str, over: str) -> list[float]:
    """Speed of one interval ÷ speed of another, one number per text."""
    one, other = (data["intervals"][each]["tokens_per_second"] for each in (name, over))
    return [mine / theirs for mine, theirs in zip(one, other, strict=True)]
