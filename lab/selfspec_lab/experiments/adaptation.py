"""Claim 2: a set is best on the domain it was tuned on; over a stream of domains SWIFT adapts, a fixed set does not."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from selfspec import Engine
from selfspec.methods import make_method
from selfspec.methods.layer_search import Observations, generator_of, point_of, skipped_by, suggest_point
from selfspec.methods.skipping import free_sublayers, starting_set
from selfspec.methods.swift import Swift
from selfspec_lab.checks import Check, compare, not_applicable
from selfspec_lab.experiments.base import Data, Experiment, register
from selfspec_lab.experiments.lab import Lab
from selfspec_lab.experiments.panels import make_panels
from selfspec_lab.experiments.sets import (
    DOMAIN_STYLES,
    HELD_OUT,
    WINDOW,
    Windows,
    hold_to,
    split_prompts,
    vary_prompts,
    write_texts,
)
from selfspec_lab.measuring import Target
from selfspec_lab.prompts import PROMPTS

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

SKIP_RATIO = 0.45  # the paper's
DOMAINS = tuple(PROMPTS)

VARIANTS = {
    "fixed": "the set tuned on the first domain",
    "swift": "SWIFT as published",
    "reopening": "SWIFT with a new search",
}
_STYLES = {"fixed": ("#cc79a7", "--", "s"), "swift": ("#56b4e9", "-.", "^"), "reopening": ("black", "-", "o")}
_RECHECK_INTERVAL = 8
_UNIFORM = "#bbbbbb"


@dataclass(frozen=True)
class Amounts:
    """How much to measure.

    Attributes:
        tuning_texts: texts per domain to tune a set on.
        tuning_steps: sets that the tuning tries.
        held_out_texts: texts per domain to score every set on.
        streams: number of streams, each a rotation of the domains.
        requests: requests per domain in a stream.
    """

    tuning_texts: int
    tuning_steps: int
    held_out_texts: int
    streams: int
    requests: int


@register
class Adaptation(Experiment):
    """SWIFT, figures 2b and 7.

    Args:
        amounts: how much to measure; by default as the lab says.
    """

    number = 2
    name = "adaptation"
    claim = (
        "A set of skipped sublayers that was tuned on one domain is worse on another (speedup 1.47 to 1.01 in the "
        "paper). Over a stream of domains SWIFT keeps its acceptance rate (0.96), a set tuned on the first domain does "
        "not (0.92 to 0.68)."
    )
    source = "SWIFT (Xia et al. 2025), figures 2b and 7"
    method = (
        "Sets are tuned offline by Bayesian optimisation as in Draft & Verify, but for matchness on texts of the "
        "domain instead of time, which no machine measures twice alike, and with a fixed number of skipped sublayers: "
        f"all sets skip {SKIP_RATIO} of them. Each is scored on texts from seven other prompts of every domain. The "
        "streams are rotations of code, math and prose, whose first requests are these prompts and the others "
        "variations of them; the first and the last layer always run. All variants draft chains with SWIFT's "
        "confidence threshold, because nearly all tokens of token trees are accepted, whichever set drafts. As "
        "published, in the paper and in the authors' code, a search that has ended does not start again, and neither "
        "explains the adaptation in figure 7. So SWIFT runs twice: as published, and with recheck_interval "
        f"{_RECHECK_INTERVAL}, our addition: every {_RECHECK_INTERVAL} rounds after the end the set is scored again, "
        "and below 0.8 a new search starts. "
        "Acceptance is counted over the second half of each domain after the first, when SWIFT has had time to adapt."
    )

    def __init__(self, amounts: Amounts | None = None) -> None:
        self._amounts = amounts

    def measure(self, lab: Lab) -> Data:
        """Tunes a set for each domain, scores every set on every domain, then runs the streams."""
        amounts: Amounts = self._amounts or lab.pick(
            Amounts(2, 8, HELD_OUT, 1, 3), Amounts(7, 60, HELD_OUT, 3, 2 * HELD_OUT - 1)
        )
        writer = lab.engine(self.model, "suffix")
        sets = _tune_sets(lab, writer, amounts)
        scores = _score_sets(lab, writer, sets, amounts.held_out_texts)
        prompts = {
            domain: vary_prompts(writer, split_prompts(lab.prompts(domain))[1], amounts.requests, seed=lab.seed + 2000)
            for domain in DOMAINS
        }
        streams = []
        for turn in range(amounts.streams):
            order = [*DOMAINS[turn:], *DOMAINS[:turn]]
            lab.progress(f"the stream {', '.join(order)}")
            streams.append(_play_stream(writer.target, order, prompts, sets[order[0]], lab.seed))
        return {"sets": {name: list(skipped) for name, skipped in sets.items()}, "scores": scores, "streams": streams}

    def judge(self, data: Data) -> Sequence[Check]:
        """Every set is best on its own domain; SWIFT, with and without a new search, beats the fixed set."""
        return [
            _check_home(data["scores"]),
            _check_loss(data["scores"]),
            _check_stream(data["streams"], "reopening", "with a new search"),
            _check_stream(data["streams"], "swift", "as published"),
        ]

    def draw(self, data: Data) -> "Figure":
        """Draws matchness of every set on every domain, and acceptance over the stream."""
        figure, (left, right) = make_panels(2, height=4.2, width_ratios=[4, 5])
        _draw_scores(left, data["scores"])
        _draw_streams(right, data["streams"])
        handles, labels = right.get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=3, frameon=False, fontsize="small")
        return figure


def _tune_sets(lab: Lab, writer: Engine, amounts: Amounts) -> dict[str, tuple[int, ...]]:
    """The sets by name: uniform skipping, and the set tuned on each domain."""
    sets = {"uniform": starting_set(writer.target.layer_count, SKIP_RATIO)}
    for domain in DOMAINS:
        lab.progress(f"tuning a set on {domain}")
        prompts = vary_prompts(writer, split_prompts(lab.prompts(domain))[0], amounts.tuning_texts, seed=lab.seed)
        windows = Windows(writer.target, write_texts(writer, prompts, 2 * WINDOW))
        sets[domain] = tune_set(writer.target, windows, amounts.tuning_steps, lab.seed)
    return sets


def _score_sets(lab: Lab, writer: Engine, sets: Mapping[str, Sequence[int]], texts: int) -> Data:
    """Matchness on each held-out text, by set and domain."""
    scores: dict[str, dict[str, list[float]]] = {name: {} for name in sets}
    for domain in DOMAINS:
        lab.progress(f"scoring all sets on {domain}")
        prompts = [writer.encode(prompt) for prompt in split_prompts(lab.prompts(domain))[1][:texts]]
        windows = Windows(writer.target, write_texts(writer, prompts, 2 * WINDOW))
        for name, skipped in sets.items():
            scores[name][domain] = [round(score, 4) for score in windows.score(skipped)]
    return scores


def tune_set(target: Target, windows: Windows, steps: int, seed: int) -> tuple[int, ...]:
    """The set of highest mean matchness found by Bayesian optimisation, which starts with uniform skipping."""
    free = free_sublayers(target.layer_count)
    point = point_of(starting_set(target.layer_count, SKIP_RATIO), free)
    observations = Observations(len(free))
    for step in range(steps):
        if step:
            point = suggest_point(*observations.table(), int(point.sum()), generator_of(seed, step))
        observations.add(point, float(np.mean(windows.score(skipped_by(point, free)))))
    points, scores = observations.table()
    return skipped_by(points[scores.argmax()], free)


def _play_stream(
    target: Target,
    order: Sequence[str],
    prompts: Mapping[str, Sequence[Sequence[int]]],
    first_set: Sequence[int],
    seed: int,
) -> Data:
    """Acceptance rate and mean generated length of every request, for each variant."""
    variants = {"fixed": hold_to(_make_swift(target, seed, max_optimization_steps=0), first_set)}
    variants["swift"] = _make_swift(target, seed)
    variants["reopening"] = _make_swift(target, seed, recheck_interval=_RECHECK_INTERVAL)
    acceptance: dict[str, list[float]] = {name: [] for name in VARIANTS}
    length: dict[str, list[float]] = {name: [] for name in VARIANTS}
    for domain in order:
        for prompt in prompts[domain]:
            for name, method in variants.items():
                written = Engine(target.model, None, method).generate(
                    prompt, max_new_tokens=2 * WINDOW, ignore_eos=True
                )
                acceptance[name].append(round(written.acceptance_rate, 4))
                length[name].append(round(written.mean_generated_length, 4))
    return {"order": list(order), "acceptance": acceptance, "length": length}


def _make_swift(target: Target, seed: int, **settings: Any) -> Swift:
    common = {
        "schedule": "paper",
        "skip_ratio": SKIP_RATIO,
        "acceptance_tolerance": 0.0,
        "dynamic_verification": False,
        "seed": seed,
    }
    method = make_method("swift", target, {**common, **settings})
    assert isinstance(method, Swift)
    return method


def _check_home(scores: Data) -> Check:
    means = {name: {domain: float(np.mean(values)) for domain, values in row.items()} for name, row in scores.items()}
    best = {domain: max(means, key=lambda name: means[name][domain]) for domain in DOMAINS}
    figure = "; ".join(
        f"on {domain} " + ", ".join(f"{name} {means[name][domain]:.3f}" for name in means) for domain in DOMAINS
    )
    gains = []
    for domain in DOMAINS:
        other = max((name for name in DOMAINS if name != domain), key=lambda name: means[name][domain])
        gains += np.subtract(scores[domain][domain], scores[other][domain]).tolist()
    return compare(
        "Over the domains, the set tuned on one has a higher matchness there than the best set of another, on average",
        gains,
        f"best on {sum(domain == name for domain, name in best.items())} of {len(best)}; {figure}",
        what="gain of a text",
    )


def _check_loss(scores: Data) -> Check:
    losses = {
        (name, domain): np.subtract(scores[domain][domain], scores[name][domain])
        for domain in DOMAINS
        for name in DOMAINS
        if name != domain
    }
    by_text = [
        float(loss) for domain in DOMAINS for loss in np.mean([losses[pair] for pair in losses if pair[1] == domain], 0)
    ]
    worst = max(losses, key=lambda pair: losses[pair].mean())
    return compare(
        "On another domain a tuned set has lower matchness than the set tuned there, on average",
        by_text,
        f"at most {losses[worst].mean():.3f}, with the set of {worst[0]} on {worst[1]}",
        what="loss of a text",
    )


def settled(stream: Data, figure: str, variant: str) -> dict[tuple[str, int], float]:
    """A figure of the requests in the second half of each domain after the first, by domain and prompt."""
    values, order = stream[figure][variant], stream["order"]
    requests = len(values) // len(order)
    return {
        (order[index // requests], index % requests): value
        for index, value in enumerate(values)
        if index >= requests and index % requests >= requests // 2
    }


def _gains_by_prompt(streams: Sequence[Data], variant: str) -> list[float]:
    """The gain in acceptance of each prompt, the mean over the streams in which it comes after the first domain."""
    gains: dict[tuple[str, int], list[float]] = {}
    for stream in streams:
        ours, fixed = (settled(stream, "acceptance", name) for name in (variant, "fixed"))
        for prompt in ours:
            gains.setdefault(prompt, []).append(ours[prompt] - fixed[prompt])
    return [float(np.mean(each)) for each in gains.values()]


def _check_stream(streams: Sequence[Data], variant: str, what: str) -> Check:
    means: dict[tuple[str, str], float] = {}
    for figure in ("acceptance", "length"):
        for name in ("fixed", variant):
            means[figure, name] = float(
                np.mean([value for each in streams for value in settled(each, figure, name).values()])
            )
    gains = _gains_by_prompt(streams, variant)
    statement = (
        f"After a change of domain SWIFT, {what}, has a higher acceptance rate than the set fixed on the first domain"
    )
    if variant == "reopening" and all(
        each[figure]["swift"] == each[figure]["reopening"] for each in streams for figure in ("acceptance", "length")
    ):
        return not_applicable(statement, "no search ended, so none started again: the same run as without a new search")
    return compare(
        statement,
        gains,
        f"acceptance {means['acceptance', variant]:.3f} against {means['acceptance', 'fixed']:.3f}; mean generated "
        f"length {means['length', variant]:.2f} against {means['length', 'fixed']:.2f}",
        what="gain of a request",
        effect=0.28,  # 0.96 against 0.68 (figure 7)
        counts=variant == "swift",  # a new search is ours
    )


def _draw_scores(panel: "Axes", scores: Data) -> None:
    """Draws bars by the domain that a set is scored on, as in figure 2b, with the standard error over texts."""
    width = 0.2
    for place, (name, row) in enumerate(scores.items()):
        colour = _UNIFORM if name == "uniform" else DOMAIN_STYLES[name][0]
        where = [index + (place - 1.5) * width for index in range(len(DOMAINS))]
        errors = [np.std(row[domain]) / len(row[domain]) ** 0.5 for domain in DOMAINS]
        bars = panel.bar(where, [np.mean(row[domain]) for domain in DOMAINS], width, yerr=errors, color=colour)
        label, ink = ("uniform", "black") if name == "uniform" else (f"of {name}", "white")
        panel.bar_label(bars, [label] * len(DOMAINS), rotation=90, label_type="center", fontsize="small", color=ink)
    lowest = min(float(np.mean(values)) for row in scores.values() for values in row.values())
    panel.set_ylim(max(0.0, lowest - 0.15), 1.0)
    panel.set_xticks(range(len(DOMAINS)), [f"on {domain}" for domain in DOMAINS])
    panel.set_ylabel("matchness on held-out text")


def _draw_streams(panel: "Axes", streams: Sequence[Data]) -> None:
    """Draws the acceptance rate at each request, the mean over the streams."""
    for name, label in VARIANTS.items():
        colour, line, marker = _STYLES[name]
        acceptance = np.mean([stream["acceptance"][name] for stream in streams], axis=0)
        requests = np.arange(1, len(acceptance) + 1)
        panel.plot(requests, acceptance, line, marker=marker, color=colour, markersize=4, label=label)
    per_domain = len(requests) // len(DOMAINS)
    for change in range(1, len(DOMAINS)):
        panel.axvline(change * per_domain + 0.5, color="#444444", linewidth=0.8, linestyle=":")
    orders = " / ".join(", ".join(stream["order"]) for stream in streams)
    panel.set_title(orders, fontsize="small")
    panel.set_xlabel("request of the stream (dotted: the domain changes)")
    panel.set_ylabel("acceptance rate")
