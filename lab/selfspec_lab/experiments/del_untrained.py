"""Claim 9: on models not trained for early exit, DEL is slower than plain decoding (KnapSpec, table 2)."""

import math
import statistics
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from selfspec import Engine
from selfspec.errors import NoGainWarning
from selfspec.methods.papers import PAPERS
from selfspec_lab.checks import Check, compare, shown
from selfspec_lab.experiments.base import Data, Experiment, register
from selfspec_lab.experiments.lab import TIMED_WIDENING, Lab
from selfspec_lab.experiments.panels import make_panels
from selfspec_lab.experiments.trials import CLOCK, MACHINE, rounds_of, trial
from selfspec_lab.papers.costs import PAPER_MACHINES, roofline_cost
from selfspec_lab.prompts import PROMPTS
from selfspec_lab.replay import replayed_speedup

if TYPE_CHECKING:
    from matplotlib.figure import Figure

TRAINED = "tiny-early-exit"
"""The checkpoint that was trained for early exit."""

_PAPER: Mapping[str, Any] = PAPERS["del"].values()
_CANDIDATES: Mapping[str, tuple[str, Mapping[str, Any]]] = {"plain": ("autoregressive", {}), "DEL": ("del", _PAPER)}
_LABELS = {"untrained": "not trained for early exit", "trained": "trained for early exit"}


@dataclass(frozen=True)
class Amounts:
    """How much is measured.

    Attributes:
        prompts: prompts per domain for acceptance.
        max_new_tokens: length of their outputs.
        timed_prompts: prompts per domain for speed.
        timed_tokens: length of their outputs.
        repeats: repeats of the timing.
        widen: factor by which the timed models are widened.
    """

    prompts: int = 7
    max_new_tokens: int = 64
    timed_prompts: int = 7
    timed_tokens: int = 48
    repeats: int = 1
    widen: int = TIMED_WIDENING


QUICK = Amounts(prompts=7, max_new_tokens=32, timed_prompts=1, timed_tokens=24, repeats=1, widen=2)


@register
class DelUntrained(Experiment):
    """KnapSpec, table 2: speed and acceptance of DEL, with and without training for early exit."""

    number = 9
    name = "del-untrained"
    claim = (
        "On models not trained for early exit, DEL is slower than plain decoding: 0.68 to 0.99 times its speed in all "
        "24 cells of the table, with 0 to 66 % of the draft tokens accepted."
    )
    source = "KnapSpec (Cha et al. 2026), table 2 and section 5.1"
    method = (
        "The outputs of DEL with the settings of `--paper del` on three domains, on `tiny`, which was trained for "
        f"skipped sublayers but not for early exits, and on `{TRAINED}`; speed by the clock in turns with plain "
        f"decoding on fewer prompts, both models widened {TIMED_WIDENING} times. The paper has models of 1B to 70B "
        "parameters, long contexts, and no trained model for comparison."
    )
    model = "tiny"
    unfit: ClassVar[Mapping[str, str]] = {TRAINED: "it was trained for early exit"}

    def __init__(self, amounts: Amounts | None = None) -> None:
        self._amounts = amounts

    def measure(self, lab: Lab) -> Data:
        """Measures speed and acceptance, with and without training."""
        amounts: Amounts = self._amounts or lab.pick(QUICK, Amounts())
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", NoGainWarning)  # the experiment shows it
            return {
                "speed": _measure_speeds(lab, self.model, amounts),
                "drafts": {
                    kind: _run_drafts(each, name, amounts) for kind, (each, name) in _labs(lab, self.model).items()
                },
            }

    def judge(self, data: Data) -> Sequence[Check]:
        """Without training DEL is slower than plain decoding. What training changes is no claim of the table."""
        return [_slower(data), _slower_by_the_clock(data), *_shown_beside(data)]

    def draw(self, data: Data) -> "Figure":
        """Draws speed and acceptance by domain."""
        figure, (speed, acceptance) = make_panels(2)
        styles = {"untrained": ("#d55e00", "////", -0.2), "trained": ("#0072b2", "", 0.2)}
        domains = list(data["speed"])
        for kind, (colour, hatch, shift) in styles.items():
            style: dict[str, Any] = {"facecolor": colour, "hatch": hatch, "edgecolor": "white", "label": _LABELS[kind]}
            places = [index + shift for index in range(len(domains))]
            ratios = [_ratios(data, domain, kind) for domain in domains]
            medians = [statistics.median(each) for each in ratios]
            spread = [
                [middle - min(each) for middle, each in zip(medians, ratios, strict=True)],
                [max(each) - middle for middle, each in zip(medians, ratios, strict=True)],
            ]
            speed.bar(places, medians, 0.38, yerr=spread, capsize=3, **style)
            acceptance.bar(places, [_acceptance(data, kind, domain) for domain in domains], 0.38, **style)
        speed.axhline(1, color="black", linestyle=":", label="plain decoding")
        speed.set_ylabel("speed of DEL ÷ plain decoding\n(median, range of the prompts)")
        acceptance.set_ylabel("accepted ÷ drafted tokens")
        for panel in (speed, acceptance):
            panel.set_xticks(range(len(domains)), domains)
            panel.set_ylim(0, 1.35 * panel.get_ylim()[1])
            panel.legend(frameon=False, fontsize="small", loc="upper left")
        return figure


def _labs(lab: Lab, model_name: str) -> dict[str, tuple[Lab, str]]:
    """The lab and the model name of each kind of checkpoint; another model replaces only the untrained one."""
    if lab.model is None:
        return {"untrained": (lab, model_name), "trained": (lab, TRAINED)}
    other = Lab(quick=lab.quick, device=lab.device, seed=lab.seed, progress=lab.progress)
    return {"untrained": (lab, model_name), "trained": (other, TRAINED)}


def _measure_speeds(lab: Lab, model_name: str, amounts: Amounts) -> dict[str, dict[str, list[float]]]:
    """Tokens per second by domain and by kind and candidate, one number per prompt."""
    engines: dict[str, Engine] = {}
    for kind, (each, name) in _labs(lab, model_name).items():
        made = each.engines(name, _CANDIDATES, widen=amounts.widen)
        engines |= {f"{kind} {candidate}": engine for candidate, engine in made.items()}
    speeds = {}
    for domain in PROMPTS:
        measured = lab.measure_speeds(
            engines,
            lab.prompts(domain, amounts.timed_prompts),
            max_new_tokens=amounts.timed_tokens,
            repeats=amounts.repeats,
        )
        speeds[domain] = {name: list(speed.by_prompt) for name, speed in measured.items()}
    return speeds


def _run_drafts(lab: Lab, model_name: str, amounts: Amounts) -> dict[str, list[Data]]:
    """The outputs of DEL by domain."""
    engine = lab.engine(model_name, "del", _PAPER)
    counts: dict[str, list[Data]] = {}
    for domain in PROMPTS:
        lab.progress(f"acceptance of DEL on {domain}")
        written = [
            engine.generate(prompt, max_new_tokens=amounts.max_new_tokens, ignore_eos=True)
            for prompt in lab.prompts(domain, amounts.prompts)
        ]
        counts[domain] = [trial(each, drops=True) for each in written]
    return counts


def _ratios(data: Data, domain: str, kind: str) -> list[float]:
    """Speed of DEL ÷ plain decoding by the clock, one number per prompt."""
    speeds = data["speed"][domain]
    return [mine / plain for mine, plain in zip(speeds[f"{kind} DEL"], speeds[f"{kind} plain"], strict=True)]


def _acceptance(data: Data, kind: str, domain: str) -> float:
    """Accepted ÷ drafted over the prompts of a domain, 0 where nothing was drafted."""
    outputs = data["drafts"][kind][domain]
    return float(sum(each["accepted"] for each in outputs) / max(1, sum(each["drafted"] for each in outputs)))


def _outputs(data: Data, kind: str) -> list[Data]:
    return [each for outputs in data["drafts"][kind].values() for each in outputs]


def _replayed(output: Data) -> float:
    """The speedup on the machine of KnapSpec's table; DEL publishes no share of time for selecting."""
    return replayed_speedup(rounds_of(output), output["prompt_tokens"], roofline_cost(*PAPER_MACHINES["knapspec"]))


def _slower(data: Data) -> Check:
    speeds = [_replayed(each) for each in _outputs(data, "untrained")]
    return compare(
        f"without training for early exit, DEL is slower than plain decoding, {MACHINE}",
        [-math.log(speed) for speed in speeds],
        f"{statistics.fmean(speeds):.2f}× plain decoding (paper: 0.68× to 0.99×)",
        what="log of the ratio of speeds",
        effect=-math.log(0.84),  # the mean of the 24 cells
    )


def _slower_by_the_clock(data: Data) -> Check:
    by_domain = {domain: _ratios(data, domain, "untrained") for domain in data["speed"]}
    told = ", ".join(f"{domain} {statistics.fmean(ratios):.2f}×" for domain, ratios in by_domain.items())
    return compare(
        f"the same {CLOCK}",
        [-math.log(ratio) for ratios in by_domain.values() for ratio in ratios],
        told,
        what="log of the ratio of speeds",
        counts=False,
    )


def _shown_beside(data: Data) -> list[Check]:
    """What training for early exit changes, here."""
    speeds = {kind: statistics.fmean(map(_replayed, _outputs(data, kind))) for kind in data["drafts"]}
    rates = {
        kind: ", ".join(f"{domain} {_acceptance(data, kind, domain):.2f}" for domain in by_domain)
        for kind, by_domain in data["drafts"].items()
    }
    pooled = {
        kind: statistics.fmean(_acceptance(data, kind, domain) for domain in by_domain)
        for kind, by_domain in data["drafts"].items()
    }
    return [
        shown(
            f"with that training, it is faster than plain decoding, {MACHINE}",
            speeds["trained"] > 1,
            f"{speeds['trained']:.2f}× against {speeds['untrained']:.2f}× without",
        ),
        shown(
            "without it, a smaller share of the draft tokens is accepted",
            pooled["untrained"] < pooled["trained"],
            f"{rates['untrained']}, against {rates['trained']} with training",
        ),
    ]
