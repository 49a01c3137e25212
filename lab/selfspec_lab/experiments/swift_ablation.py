"""Claim 3: early stopping of drafts, dynamic verification and the search each improve SWIFT."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from selfspec import Engine
from selfspec.methods import make_method
from selfspec.methods.skipping import starting_set
from selfspec.methods.swift import Swift
from selfspec.types import Generation
from selfspec_lab.experiments.base import Check, Data, Experiment, register
from selfspec_lab.experiments.lab import TIMED_WIDENING, Lab, bootstrap_interval
from selfspec_lab.experiments.panels import make_panels
from selfspec_lab.experiments.sets import DOMAIN_STYLES, halves, hold_to, vary_prompts
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
        searched: requests per domain for the search.
        prompts: prompts per domain, for acceptance and length.
        max_new_tokens: output length for these prompts.
        timed_prompts: how many of these prompts are timed.
        timed_tokens: output length of timed requests.
        repeats: repeats of the timing.
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
        "verification its mean generated length falls (5.82 to 4.39), as it does without the search (2.15), and each "
        "costs speed."
    )
    source = "SWIFT (Xia et al. 2025), table 8"
    method = (
        "SWIFT searches a set for each domain on half of its prompts. Then the search stops, as in the paper's "
        "acceleration phase, and all variants draft other prompts with that set, except the one without the search, "
        "which uses uniform skipping. Settings are the paper's: skip ratio 0.45, threshold 0.8, at most 25 draft "
        "tokens, and our limit of 32 tree nodes outside the path. Without early stop every draft has 25 tokens, or as "
        "many as the output has left. Acceptance collapses if it falls below half. Acceptance and length are counted "
        "on the model itself; speed over plain decoding is measured on the widened model, which writes the same "
        "text."
    )

    def __init__(self, amounts: Amounts | None = None) -> None:
        self._amounts = amounts

    def measure(self, lab: Lab) -> Data:
        """Searches a set for each domain, then counts the drafts of all variants and times some of them."""
        amounts: Amounts = self._amounts or lab.pick(Amounts(3, 2, 48, 1, 16, 1), Amounts(10, 10, 64, 2, 40, 3))
        writer = lab.engine(self.model, "suffix")
        target = Target(lab.load(self.model, widen=TIMED_WIDENING)[0])
        data: Data = {}
        for domain in PROMPTS:
            searched, held_out = halves(lab.prompts(domain))
            lab.progress(f"searching a set on {domain}")
            found = _search(writer, vary_prompts(writer, searched, amounts.searched, seed=lab.seed), lab.seed)
            tried = vary_prompts(writer, held_out, amounts.prompts, seed=lab.seed + 1000)
            lab.progress(f"counting on {domain}")
            counts = {
                name: [
                    _counts(engine.generate(prompt, max_new_tokens=amounts.max_new_tokens, ignore_eos=True))
                    for prompt in tried
                ]
                for name, engine in variant_engines(writer.target, found).items()
            }
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
                "counts": counts,
                "tokens_per_second": {name: list(speed.samples) for name, speed in speeds.items()},
            }
        return {"domains": data}

    def judge(self, data: Data) -> Sequence[Check]:
        """Acceptance falls without early stop, length without trees or search, speed without any part."""
        return [
            _check_collapse(data),
            *(_check_length(data, name) for name in ("no dynamic verification", "no search")),
            *(_check_speed(data, name) for name in VARIANTS if name != "swift"),
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


def _search(writer: Engine, prompts: Sequence[Sequence[int]], seed: int) -> tuple[int, ...]:
    """The set that SWIFT's search has found when the search or the prompts end."""
    swift = _make_swift(writer.target, {"seed": seed})
    engine = Engine(writer.target.model, None, swift)
    for prompt in prompts:
        if not swift.search.finished:
            engine.generate(prompt, max_new_tokens=_SEARCHED_TOKENS, ignore_eos=True)
    return swift.search.kept.skipped


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
        "swift", target, {"schedule": "paper", "skip_ratio": _SKIP_RATIO, "acceptance_tolerance": 0.0, **settings}
    )
    assert isinstance(method, Swift)
    return method


def _counts(written: Generation) -> list[int]:
    """Drafted tokens, accepted tokens, rounds, and tokens committed by rounds."""
    return [written.drafted, written.accepted, written.round_count, written.new_token_count - 1]


def _rows(data: Data, name: str) -> list[list[int]]:
    return [row for domain in data["domains"].values() for row in domain["counts"][name]]


def _acceptance(domain: Data, name: str) -> float:
    return _pooled_acceptance(domain["counts"][name])


def _length(domain: Data, name: str) -> float:
    _, _, rounds, tokens = np.sum(domain["counts"][name], axis=0)
    return float(tokens / rounds)


def _speedup(domain: Data, name: str) -> float:
    speeds = domain["tokens_per_second"]
    return float(np.median(np.divide(speeds[name], speeds["plain"])))


def _mean(data: Data, figure: Callable[[Data, str], float], name: str) -> float:
    return float(np.mean([figure(domain, name) for domain in data["domains"].values()]))


def _check_collapse(data: Data) -> Check:
    rate, without = (_pooled_acceptance(_rows(data, name)) for name in ("swift", "no early stop"))
    # The mean is negative exactly if the rate without early stop is below half of the rate with it.
    excess = [accepted - rate / 2 * drafted for drafted, accepted, _, _ in _rows(data, "no early stop")]
    _, high = bootstrap_interval(excess)
    by_domain = ", ".join(
        f"{name} {_acceptance(domain, 'no early stop'):.3f}" for name, domain in data["domains"].items()
    )
    sure = "95 % sure" if high < 0 else "not 95 % sure"
    return Check(
        "Without early stop of drafting the acceptance rate falls below half",
        high < 0,
        f"{rate:.3f} with it, {without:.3f} without ({by_domain}); below half: {sure} (bootstrap over "
        f"{len(excess)} requests)",
    )


def _pooled_acceptance(rows: Sequence[Sequence[int]]) -> float:
    return sum(row[1] for row in rows) / max(1, sum(row[0] for row in rows))


def _check_length(data: Data, name: str) -> Check:
    losses = [
        whole[3] / whole[2] - without[3] / without[2]
        for without, whole in zip(_rows(data, name), _rows(data, "swift"), strict=True)
    ]
    low, high = bootstrap_interval(losses)
    part = name.removeprefix("no ")
    return Check(
        f"Without {part} the mean generated length falls",
        low > 0,
        f"{_mean(data, _length, 'swift'):.2f} with it, {_mean(data, _length, name):.2f} without; {low:.3f} to "
        f"{high:.3f} less a request (95 % bootstrap over {len(losses)} requests)",
    )


def _check_speed(data: Data, name: str) -> Check:
    gains = overall_speeds(data, "swift") / overall_speeds(data, name)
    part = name.removeprefix("no ")
    return Check(
        f"Without {part} SWIFT is slower, in every repeat",
        bool((gains > 1).all()),
        f"speedup {_mean(data, _speedup, 'swift'):.2f} with it, {_mean(data, _speedup, name):.2f} without; with it "
        f"{gains.min():.2f} to {gains.max():.2f} times as fast (repeats: {len(gains)})",
    )


def overall_speeds(data: Data, name: str) -> npt.NDArray[np.float64]:
    """Tokens per second over all domains, one number per repeat; all domains have equally many tokens."""
    samples = np.array([domain["tokens_per_second"][name] for domain in data["domains"].values()], dtype=np.float64)
    speeds: npt.NDArray[np.float64] = len(samples) / (1 / samples).sum(axis=0)
    return speeds


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
