"""Claim 3: early stopping of drafts, dynamic verification and the search each improve SWIFT."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from selfspec import Engine
from selfspec.methods import make_method
from selfspec.methods.papers import PAPERS
from selfspec.methods.skipping import starting_set
from selfspec.methods.swift import Swift
from selfspec.types import SamplingParams
from selfspec_lab.checks import Check, compare
from selfspec_lab.experiments.base import Data, Experiment, register
from selfspec_lab.experiments.lab import TIMED_WIDENING, Lab
from selfspec_lab.experiments.panels import make_panels
from selfspec_lab.experiments.sets import DOMAIN_STYLES, HELD_OUT, hold_to, split_prompts, vary_prompts
from selfspec_lab.experiments.trials import (
    CLOCK,
    MACHINE,
    acceptance,
    count,
    mean_length,
    replayed,
    speed_gains,
)
from selfspec_lab.measuring import Target
from selfspec_lab.prompts import PROMPTS

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

VARIANTS: dict[str, dict[str, Any]] = {
    "swift": {},
    "no early stop": {"confidence_threshold": 0.0},
    "no dynamic verification": {"dynamic_verification": False},
    "no search": {},
}
"""Variants by name, with the settings that disable the part; without the search the set is uniform skipping's."""

_SKIP_RATIO = 0.45
_SEARCHED_TOKENS = 64


@dataclass(frozen=True)
class Amounts:
    """How much to measure.

    Attributes:
        searched: requests per domain for the search, unless it ends before.
        prompts: prompts per domain, for acceptance and length.
        max_new_tokens: output length for these prompts.
        timed_prompts: how many of these prompts are timed.
        timed_tokens: output length of timed requests.
        repeats: repeats of the timing, of which the median counts.
    """

    searched: int
    prompts: int
    max_new_tokens: int
    timed_prompts: int
    timed_tokens: int
    repeats: int


@register
class SwiftAblation(Experiment):
    """SWIFT, table 8.

    Args:
        amounts: how much to measure; by default as the lab says.
    """

    number = 3
    name = "swift-ablation"
    claim = (
        "Without early stop of drafting SWIFT's acceptance collapses (0.98 to 0.43 in the paper), without dynamic "
        "verification its mean generated length falls (5.82 to 4.39 in version 2 of the paper, to 5.72 in version 1), "
        "as it does without the search (2.15), and each costs speed."
    )
    source = "SWIFT (Xia et al. 2025), v2 table 8 and v1 table 7"
    method = (
        "SWIFT searches a set for each domain on three of its prompts and variations of them. Then the search stops, "
        "as in the paper's acceleration phase, and all variants draft the other seven prompts with that set, except "
        "the one without the search, which uses uniform skipping. Settings are those of `--paper swift-v2`, with a "
        "skip ratio of 0.45 throughout. Without early stop every draft has 25 tokens, or as "
        "many as the output has left. Acceptance collapses if it falls below half. Acceptance and length are counted "
        "on the model itself, and the same rounds are replayed on the paper's machine; speed by the clock is that of "
        "the widened model, which writes the same text."
    )

    def __init__(self, amounts: Amounts | None = None) -> None:
        self._amounts = amounts

    def measure(self, lab: Lab) -> Data:
        """Searches a set for each domain, then counts the drafts of all variants and times some of them."""
        amounts: Amounts = self._amounts or lab.pick(
            Amounts(2, HELD_OUT, 32, 1, 16, 1), Amounts(40, HELD_OUT, 64, 4, 32, 1)
        )
        writer = lab.engine(self.model, "suffix")
        target = Target(lab.load(self.model, widen=TIMED_WIDENING)[0])
        data: Data = {}
        for domain in PROMPTS:
            searched, held_out = split_prompts(lab.prompts(domain))
            lab.progress(f"searching a set on {domain}")
            found, steps = _search(writer, vary_prompts(writer, searched, amounts.searched, seed=lab.seed), lab.seed)
            tried = [writer.encode(prompt) for prompt in held_out[: amounts.prompts]]
            params = SamplingParams(max_new_tokens=amounts.max_new_tokens, ignore_eos=True)
            counted = count(lab, variant_engines(writer.target, found), [(prompt, params) for prompt in tried])
            speeds = lab.measure_speeds(
                {
                    "plain": Engine(target.model, None, make_method("autoregressive", target)),
                    **variant_engines(target, found),
                },
                tried[: amounts.timed_prompts],
                max_new_tokens=amounts.timed_tokens,
                repeats=amounts.repeats,
            )
            data[domain] = {
                "skipped": list(found),
                "steps": steps,
                "trials": counted,
                "tokens_per_second": {name: list(speed.by_prompt) for name, speed in speeds.items()},
            }
        return {"domains": data}

    def judge(self, data: Data) -> Sequence[Check]:
        """Acceptance falls without early stop, length without trees or search, speed without any part."""
        return [
            _check_collapse(data),
            *(_check_length(data, name) for name in ("no dynamic verification", "no search")),
            *(_check_speed(data, name) for name in VARIANTS if name != "swift"),
            *(_check_clock(data, name) for name in VARIANTS if name != "swift"),
        ]

    def draw(self, data: Data) -> "Figure":
        """Draws table 8 as three panels, with a mark for each domain."""
        figure, panels = make_panels(3, height=4.2, sharey=True)
        titles = ("acceptance rate", "mean generated length, tokens", "speedup over plain decoding")
        figures = (_acceptance, _length, _speedup)
        for panel, title, of_domain in zip(panels, titles, figures, strict=True):
            _draw_panel(panel, data, of_domain)
            panel.set_xlabel(title)
        panels[0].set_yticks(range(len(VARIANTS)), list(VARIANTS))
        panels[0].invert_yaxis()
        panels[2].axvline(1.0, color="#444444", linewidth=0.8, linestyle=":")
        figure.legend(
            *panels[0].get_legend_handles_labels(),
            loc="outside lower center",
            ncols=4,
            frameon=False,
            fontsize="small",
            markerscale=0.7,
        )
        return figure


def _search(writer: Engine, prompts: Sequence[Sequence[int]], seed: int) -> tuple[tuple[int, ...], int]:
    """The set that SWIFT's search has found when the search or the prompts end, and the steps that it took."""
    swift = _make_swift(writer.target, {"seed": seed})
    engine = Engine(writer.target.model, None, swift)
    for prompt in prompts:
        if not swift.search.finished:
            engine.generate(prompt, max_new_tokens=_SEARCHED_TOKENS, ignore_eos=True)
    return swift.search.kept.skipped, swift.search.steps


def variant_engines(target: Target, found: Sequence[int]) -> dict[str, Engine]:
    """Engines of SWIFT and of its variants, each with a fixed set."""
    evenly = starting_set(target.layer_count, _SKIP_RATIO)
    engines = {}
    for name, settings in VARIANTS.items():
        swift = hold_to(
            _make_swift(target, {"max_optimization_steps": 0, **settings}), evenly if name == "no search" else found
        )
        engines[name] = Engine(target.model, None, swift)
    return engines


def _make_swift(target: Target, settings: Mapping[str, Any]) -> Swift:
    method = make_method(
        "swift",
        target,
        {**PAPERS["swift-v2"].values(), "skip_ratio": _SKIP_RATIO, "acceptance_tolerance": 0.0, **settings},
    )
    assert isinstance(method, Swift)
    return method


def _trials(data: Data, name: str) -> list[Data]:
    return [each for domain in data["domains"].values() for each in domain["trials"][name]]


def _acceptance(domain: Data, name: str) -> float:
    return pooled_acceptance(domain["trials"][name])


def _length(domain: Data, name: str) -> float:
    rounds = [row for each in domain["trials"][name] for row in each["rounds"]]
    return float(sum(row[-1] for row in rounds) / len(rounds))


def _speedup(domain: Data, name: str) -> float:
    speeds = domain["tokens_per_second"]
    return float(np.mean(np.divide(speeds[name], speeds["plain"])))


def replayed_mean(domain: Data, name: str) -> float:
    """Speedup of a variant on the paper's machine, the mean over the prompts of a domain."""
    return float(np.mean([replayed(each, "swift") for each in domain["trials"][name]]))


def _mean(data: Data, figure: Callable[[Data, str], float], name: str) -> float:
    return float(np.mean([figure(domain, name) for domain in data["domains"].values()]))


def _check_collapse(data: Data) -> Check:
    whole, without = (_trials(data, name) for name in ("swift", "no early stop"))
    by_domain = ", ".join(
        f"{name} {_acceptance(domain, 'no early stop'):.3f}" for name, domain in data["domains"].items()
    )
    return compare(
        "Without early stop of drafting the acceptance rate falls below half",
        [acceptance(one) / 2 - acceptance(other) for one, other in zip(whole, without, strict=True)],
        f"{pooled_acceptance(whole):.3f} with it, {pooled_acceptance(without):.3f} without ({by_domain})",
        what="half of the rate with it less the rate without",
        effect=0.98 / 2 - 0.43,
    )


def pooled_acceptance(trials: Sequence[Data]) -> float:
    """Accepted ÷ drafted tokens of some outputs together."""
    return float(sum(each["accepted"] for each in trials) / max(1, sum(each["drafted"] for each in trials)))


_PAPER_LENGTH = {"no dynamic verification": 5.82 - 4.39, "no search": 5.82 - 2.15}
_PAPER_SPEED = {"no early stop": 0.896, "no dynamic verification": 1.342, "no search": 1.224}
"""Version 2, table 8: what is lost of the mean generated length, and the speedup (1.560 with all parts)."""


def _check_length(data: Data, name: str) -> Check:
    pairs = list(zip(_trials(data, "swift"), _trials(data, name), strict=True))
    losses = [mean_length(one) - mean_length(other) for one, other in pairs if one["trace"] != other["trace"]]
    part = name.removeprefix("no ")
    return compare(
        f"Without {part} the mean generated length falls",
        losses,
        f"{_mean(data, _length, 'swift'):.2f} with it, {_mean(data, _length, name):.2f} without{_searched(data, name)}",
        what="loss of a request",
        effect=_PAPER_LENGTH[name],
        same=len(pairs) - len(losses),
    )


def _check_speed(data: Data, name: str) -> Check:
    gains, same = speed_gains(_trials(data, "swift"), _trials(data, name), MACHINE, "swift")
    return compare(
        f"Without {name.removeprefix('no ')} SWIFT is slower, {MACHINE}",
        gains,
        f"speedup {_mean(data, replayed_mean, 'swift'):.2f} with it, {_mean(data, replayed_mean, name):.2f} without"
        f"{_searched(data, name)}",
        what="log of the ratio of speeds",
        effect=math.log(1.560 / _PAPER_SPEED[name]),
        same=same,
        counts=name != "no dynamic verification",  # rows are nearly free in a roofline: more candidates cannot lose
    )


def _searched(data: Data, name: str) -> str:
    steps = ", ".join(str(domain["steps"]) for domain in data["domains"].values())
    return f", after {steps} steps of the search" if name == "no search" else ""


def _check_clock(data: Data, name: str) -> Check:
    speeds = [domain["tokens_per_second"] for domain in data["domains"].values()]
    gains = [float(gain) for each in speeds for gain in np.log(np.divide(each["swift"], each[name]))]
    return compare(
        f"Without {name.removeprefix('no ')} SWIFT is slower, {CLOCK}",
        gains,
        f"speedup {_mean(data, _speedup, 'swift'):.2f} with it, {_mean(data, _speedup, name):.2f} without",
        what="log of the ratio of speeds",
        effect=math.log(1.560 / _PAPER_SPEED[name]),
        counts=False,
    )


def _draw_panel(panel: "Axes", data: Data, figure: Callable[[Data, str], float]) -> None:
    rows = range(len(VARIANTS))
    means = [_mean(data, figure, name) for name in VARIANTS]
    panel.plot(means, rows, "|", color="black", markersize=22, markeredgewidth=2, label="mean")
    for domain, values in data["domains"].items():
        colour, marker = DOMAIN_STYLES[domain]
        panel.plot([figure(values, name) for name in VARIANTS], rows, marker, color=colour, label=domain)
    panel.set_xlim(left=0)
    panel.set_ylim(-0.5, len(VARIANTS) - 0.5)
    panel.grid(axis="y", color="#dddddd", linewidth=0.6)
    panel.set_axisbelow(True)
