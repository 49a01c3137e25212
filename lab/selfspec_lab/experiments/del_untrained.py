"""Claim 9: on models not trained for early exit, DEL is slower than plain decoding (KnapSpec, table 2)."""

import statistics
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from selfspec import Engine
from selfspec.errors import NoGainWarning
from selfspec_lab.experiments.base import Check, Data, Experiment, register
from selfspec_lab.experiments.figures import repeats_text, with_spread
from selfspec_lab.experiments.lab import TIMED_WIDENING, Lab, bootstrap_interval
from selfspec_lab.experiments.panels import make_panels
from selfspec_lab.prompts import PROMPTS

if TYPE_CHECKING:
    from matplotlib.figure import Figure

TRAINED = "tiny-early-exit"
"""The checkpoint that was trained for early exit."""

_PAPER: Mapping[str, Any] = {"schedule": "paper"}
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

    prompts: int = 10
    max_new_tokens: int = 64
    timed_prompts: int = 2
    timed_tokens: int = 48
    repeats: int = 4
    widen: int = TIMED_WIDENING


QUICK = Amounts(prompts=3, max_new_tokens=32, timed_prompts=1, timed_tokens=32, repeats=1)


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
        "Speed of DEL over plain decoding on three domains, in turns, on `tiny`, which was trained for skipped "
        f"sublayers but not for early exits, and on `{TRAINED}`, both widened {TIMED_WIDENING} times; acceptance on "
        "more prompts, not widened. Our DEL drafts nothing in rounds where its objective is highest at a draft length "
        "of 0; the authors' code always drafts. The paper has models of 1B to 70B parameters, long contexts, and no "
        "trained model for comparison."
    )
    model = "tiny"

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
                    kind: _count_drafts(each, name, amounts) for kind, (each, name) in _labs(lab, self.model).items()
                },
            }

    def judge(self, data: Data) -> Sequence[Check]:
        """Without training DEL is slower and accepts fewer tokens; with training it is faster."""
        return [_slower(data), _faster_when_trained(data), _fewer_accepted(data)]

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
        speed.set_ylabel("speed of DEL ÷ plain decoding\n(median, range of the repeats)")
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
    """Tokens per second by domain and by kind and candidate, one number per repeat."""
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
        speeds[domain] = {name: list(speed.samples) for name, speed in measured.items()}
    return speeds


def _count_drafts(lab: Lab, model_name: str, amounts: Amounts) -> dict[str, list[list[int]]]:
    """Drafted tokens, accepted tokens, and output tokens after the first; by domain, for each prompt."""
    engine = lab.engine(model_name, "del", _PAPER)
    counts: dict[str, list[list[int]]] = {}
    for domain in PROMPTS:
        lab.progress(f"acceptance of DEL on {domain}")
        written = [
            engine.generate(prompt, max_new_tokens=amounts.max_new_tokens, ignore_eos=True)
            for prompt in lab.prompts(domain, amounts.prompts)
        ]
        counts[domain] = [[each.drafted, each.accepted, each.new_token_count - 1] for each in written]
    return counts


def _ratios(data: Data, domain: str, kind: str) -> list[float]:
    """Speed of DEL ÷ plain decoding, one number per repeat."""
    speeds = data["speed"][domain]
    return [mine / plain for mine, plain in zip(speeds[f"{kind} DEL"], speeds[f"{kind} plain"], strict=True)]


def _acceptance(data: Data, kind: str, domain: str) -> float:
    """Accepted ÷ drafted over the prompts of a domain, 0 where nothing was drafted."""
    drafted, accepted, _ = (sum(counts) for counts in zip(*data["drafts"][kind][domain], strict=True))
    return accepted / drafted if drafted else 0.0


def _speeds_text(data: Data, kind: str) -> str:
    """Speedups by domain."""
    found = {domain: _ratios(data, domain, kind) for domain in data["speed"]}
    texts = [f"{domain} {with_spread(each)}" for domain, each in found.items()]
    return f"speed over plain decoding: {', '.join(texts)}, in {repeats_text(next(iter(found.values())))}"


def _slower(data: Data) -> Check:
    return Check(
        "without training for early exit, DEL is slower than plain decoding in every domain and repeat",
        all(max(_ratios(data, domain, "untrained")) < 1 for domain in data["speed"]),
        f"{_speeds_text(data, 'untrained')} (paper: 0.68× to 0.99×)",
    )


def _faster_when_trained(data: Data) -> Check:
    return Check(
        "with that training, it is faster than plain decoding in every domain and repeat",
        all(min(_ratios(data, domain, "trained")) > 1 for domain in data["speed"]),
        _speeds_text(data, "trained"),
    )


def _fewer_accepted(data: Data) -> Check:
    """Beyond noise over prompts; prompts for which nothing was drafted are left out."""
    intervals, texts = {}, {}
    for kind, by_domain in data["drafts"].items():
        rates = [accepted / drafted for counts in by_domain.values() for drafted, accepted, _ in counts if drafted]
        low, high = intervals[kind] = bootstrap_interval(rates) if rates else (0.0, 0.0)
        share = sum(accepted for counts in by_domain.values() for _, accepted, _ in counts)
        share /= sum(written for counts in by_domain.values() for _, _, written in counts)
        by_name = ", ".join(f"{domain} {_acceptance(data, kind, domain):.2f}" for domain in by_domain)
        texts[kind] = (
            f"{by_name} (95 % interval of a prompt's {low:.2f} to {high:.2f}; {share:.0%} of the text drafted)"
        )
    return Check(
        "without it, a smaller share of the draft tokens is accepted",
        intervals["untrained"][1] < intervals["trained"][0],
        f"{texts['untrained']}, against {texts['trained']} with training",
    )
