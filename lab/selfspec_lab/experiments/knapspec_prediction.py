"""Claim 7, second part: TPT predicts the throughput of kept sets better than acceptance does (KnapSpec, figure 2)."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from selfspec import Engine
from selfspec.methods.api import KeptSet
from selfspec.methods.objective import tokens_per_time
from selfspec_lab.checks import Check
from selfspec_lab.decide import interval_test
from selfspec_lab.experiments.base import Data
from selfspec_lab.experiments.knapspec_scene import MODEL, knapspec_with, measure_profile
from selfspec_lab.experiments.knapspec_sets import (
    FixedSet,
    FixedSetSettings,
    early_exits,
    estimate_acceptance,
    knapspec_sets,
    random_sets,
    uniform_sets,
)
from selfspec_lab.experiments.lab import TIMED_WIDENING, Lab
from selfspec_lab.measuring import LatencyProfile, Target
from selfspec_lab.prompts import PROMPTS

if TYPE_CHECKING:
    from matplotlib.axes import Axes

METHOD = (
    "Figure 2: kept sets of four kinds (random, evenly spread, KnapSpec's candidates, early exits) draft with one "
    f"fixed length on the checkpoint widened {TIMED_WIDENING} times. Their tokens per second are compared with "
    "acceptance, estimated by equation 9 on the same texts, and with TPT for that acceptance and the latencies "
    "measured here. The paper (Llama-3.1-8B, GovReport) does not say which sets it measured."
)

PAPER = {"tpt": 0.837, "acceptance": 0.538}
"""Pearson correlations with throughput in the paper (section 5.2)."""

_KINDS = {
    "random": ("#0072b2", "o"),
    "uniform": ("#e69f00", "s"),
    "knapspec": ("#009e73", "D"),
    "early exit": ("#cc79a7", "^"),
}
_RESAMPLES = 2000

Numbers = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Amounts:
    """How much is measured.

    Attributes:
        random: number of random sets.
        others: number of sets of each other kind.
        domains: number of domains, with one prompt each.
        max_new_tokens: length of the outputs, at least 16.
        draft_length: tokens of every draft.
        repeats: repeats of the timing.
        widen: factor by which the timed model is widened.
    """

    random: int = 10
    others: int = 4
    domains: int = 3
    max_new_tokens: int = 32
    draft_length: int = 4
    repeats: int = 2
    widen: int = TIMED_WIDENING


QUICK = Amounts(random=14, others=3, domains=1, max_new_tokens=16, repeats=1, widen=2)


def measure(lab: Lab, amounts: Amounts) -> Data:
    """Measures acceptance, predicted throughput and throughput of every set."""
    prompts = [lab.prompts(domain, 1)[0] for domain in list(PROMPTS)[: amounts.domains]]
    model, tokenizer = lab.load(MODEL, widen=amounts.widen)
    wide = Target(model)
    profile = measure_profile(wide)
    plain = lab.engine(MODEL)
    sets = _make_sets(lab, plain, profile, amounts)
    windows: list[list[float]] = []
    context = 0.0
    for prompt in prompts:
        lab.progress(f"estimating the acceptance of {len(sets)} kept sets")
        prompt_ids = plain.encode(prompt)
        output = plain.generate(prompt, max_new_tokens=amounts.max_new_tokens, ignore_eos=True)
        text = [*prompt_ids, *output.token_ids]
        windows += estimate_acceptance(plain.target, text, len(prompt_ids), list(sets))
        context += (len(prompt_ids) + len(text)) / 2 / len(prompts)
    engines = {
        str(index): Engine(model, tokenizer, FixedSet(wide, FixedSetSettings(kept, amounts.draft_length)))
        for index, kept in enumerate(sets)
    }
    speeds = lab.measure_speeds(engines, prompts, max_new_tokens=amounts.max_new_tokens, repeats=amounts.repeats)
    acceptance = [statistics.fmean(shares) for shares in zip(*windows, strict=True)]
    return {
        "sets": [
            {
                "kind": kind,
                "attention_share": kept.attention_share,
                "mlp_share": kept.mlp_share,
                "acceptance": alpha,
                "tpt": _predict(kept, alpha, profile, round(context), amounts.draft_length, with_head=False),
                "tpt_with_head": _predict(kept, alpha, profile, round(context), amounts.draft_length, with_head=True),
                "measured_acceptance": speeds[str(index)].to_dict()["acceptance_rate"],
                "tokens_per_second": list(speeds[str(index)].samples),
            }
            for index, ((kept, kind), alpha) in enumerate(zip(sets.items(), acceptance, strict=True))
        ],
        "draft_length": amounts.draft_length,
    }


def judge(data: Data) -> Sequence[Check]:
    """Whether TPT correlates better with throughput than acceptance does."""
    tpt, with_head, acceptance = (correlation(data, name) for name in ("tpt", "tpt_with_head", "acceptance"))
    test = interval_test(tpt - acceptance, partial(_interval_of_difference, data), len(data["sets"]))
    return [
        Check(
            "TPT correlates with the throughput of kept sets better than acceptance does",
            test.status,
            f"Pearson's r {tpt:.2f} ({with_head:.2f} with the head counted) against {acceptance:.2f} over "
            f"{len(data['sets'])} sets; 95 % bootstrap interval of the difference {test.low:+.2f} to {test.high:+.2f} "
            f"(paper: {PAPER['tpt']:.2f} against {PAPER['acceptance']:.2f})",
            test=test,
        )
    ]


def draw(by_tpt: "Axes", by_acceptance: "Axes", data: Data) -> None:
    """Draws throughput over TPT and over acceptance."""
    for panel, name, label in (
        (by_tpt, "tpt", "TPT, tokens/s"),
        (by_acceptance, "acceptance", "estimated acceptance"),
    ):
        for kind, (colour, marker) in _KINDS.items():
            sets = [each for each in data["sets"] if each["kind"] == kind]
            panel.plot(
                [each[name] for each in sets],
                [statistics.median(each["tokens_per_second"]) for each in sets],
                color=colour,
                marker=marker,
                linestyle="",
                label=kind,
            )
        panel.set_xlabel(label)
        panel.set_ylabel("measured tokens/s")
        panel.set_title(f"fig. 2: r = {correlation(data, name):.2f} (paper {PAPER[name]:.2f})", fontsize="medium")
    by_acceptance.legend(frameon=False, fontsize="small")


def correlation(data: Data, name: str) -> float:
    """Pearson's correlation of a figure of the sets with their throughput; 0 if one of them is constant."""
    return float(_pearson(np.array([each[name] for each in data["sets"]]), np.array(_throughputs(data))))


def _make_sets(lab: Lab, plain: Engine, profile: LatencyProfile, amounts: Amounts) -> dict[KeptSet, str]:
    """The sets and their kinds; each set once."""
    target = plain.target
    sublayers = target.sublayer_count
    method = knapspec_with(target, profile)
    prompt = plain.encode(lab.prompts(next(iter(PROMPTS)), 1)[0])
    by_kind = {
        "random": random_sets(sublayers, amounts.random, lab.random()),
        "uniform": uniform_sets(sublayers, amounts.others),
        "knapspec": knapspec_sets(method, prompt, amounts.others),
        "early exit": early_exits(sublayers, amounts.others),
    }
    return {kept: kind for kind, sets in by_kind.items() for kept in sets}


def _predict(
    kept: KeptSet, alpha: float, profile: LatencyProfile, context: int, draft_length: int, *, with_head: bool
) -> float:
    """TPT (equation 4) in tokens per second."""
    draft, target = (profile.draft_step(each, context, with_head=False) for each in (kept, KeptSet.full(kept.total)))
    outside = profile.outside if with_head else 0.0
    return float(tokens_per_time(alpha, draft_length, draft, target, head_time=outside))


def _throughputs(data: Data) -> list[float]:
    return [statistics.median(each["tokens_per_second"]) for each in data["sets"]]


def _interval_of_difference(data: Data, level: float) -> tuple[float, float]:
    """Percentile bootstrap interval over sets of the difference of the two correlations."""
    tpt, acceptance = (np.array([each[name] for each in data["sets"]]) for name in ("tpt", "acceptance"))
    throughputs = np.array(_throughputs(data))
    drawn = np.random.default_rng(0).integers(len(throughputs), size=(_RESAMPLES, len(throughputs)))
    differences = _pearson(tpt[drawn], throughputs[drawn]) - _pearson(acceptance[drawn], throughputs[drawn])
    low, high = np.quantile(differences, [(1 - level) / 2, (1 + level) / 2])
    return float(low), float(high)


def _pearson(one: Numbers, other: Numbers) -> Numbers:
    """Pearson's correlation along the last axis; 0 if one of the two is constant."""
    one, other = (each - each.mean(-1, keepdims=True) for each in (one, other))
    spread = np.sqrt((one**2).sum(-1) * (other**2).sum(-1))
    correlations: Numbers = np.where(spread > 1e-12, (one * other).sum(-1) / np.maximum(spread, 1e-12), 0.0)
    return correlations
