"""Claim 6: DEL against all static choices of exit layer and draft length, and its decay factor (DEL, tables 1, 6)."""

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from selfspec.methods.papers import PAPERS
from selfspec_lab.checks import Check, not_applicable
from selfspec_lab.exit_grid import grid, shadow_texts
from selfspec_lab.exit_replay import static_rounds
from selfspec_lab.experiments import del_static_checks as checks
from selfspec_lab.experiments.base import Data, Experiment, register
from selfspec_lab.experiments.lab import TIMED_WIDENING, Lab
from selfspec_lab.experiments.trials import replayed, rounds_of, trial
from selfspec_lab.papers.costs import paper_machine
from selfspec_lab.prompts import PROMPTS
from selfspec_lab.replay import replayed_speedup, tokens_per_layer

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_TIMED_STATIC = 3

ByPrompt = dict[str, dict[str, list[float]]]
"""One number per prompt, by name of the drafter and domain."""


@dataclass(frozen=True)
class Amounts:
    """How much is measured.

    Attributes:
        prompts: prompts per domain for tokens per layer; at least 2.
        max_new_tokens: length of their outputs.
        omegas: decay factors for tokens per layer, including the paper's.
        timed_omegas: decay factors to time, including the paper's.
        draft_lengths: draft lengths of the static choices; their exit layers are all layers, at most 15.
        timed_prompts: prompts per domain for speed.
        timed_tokens: length of their outputs.
        repeats: repeats of the timing.
        widen: factor by which the timed model is widened.
    """

    prompts: int = 7
    max_new_tokens: int = 64
    omegas: tuple[float, ...] = (0.5, 0.6, 0.7, 0.8, 0.9, checks.OMEGA, 1.0)
    timed_omegas: tuple[float, ...] = (0.5, checks.OMEGA, 1.0)
    draft_lengths: tuple[int, ...] = (1, 2, 3, 4, 6, 8, 12, 18)
    timed_prompts: int = 7
    timed_tokens: int = 48
    repeats: int = 1
    widen: int = TIMED_WIDENING


QUICK = Amounts(
    prompts=7, max_new_tokens=48, omegas=(0.5, checks.OMEGA, 1.0), timed_prompts=1, timed_tokens=24, repeats=1, widen=2
)


@register
class DelStatic(Experiment):
    """DEL, tables 1 and 6: tokens per loaded layer over all domains and in each, speed, and the decay factor ω."""

    number = 6
    name = "del-static"
    claim = (
        "Over several tasks no static choice of exit layer E and draft length γ is as good as DEL, which generates the "
        "most tokens per loaded layer and is the fastest on every task. It is largely insensitive to its decay factor "
        "ω (speedup 2.54 to 2.60 for ω from 0.5 to 1)."
    )
    source = "DEL (Entezari Zarch et al. 2025), tables 1 and 6"
    method = (
        "Greedy outputs for the bundled prompts of three domains. Tokens per loaded layer (eTPL, appendix B.4), mean "
        "over prompts: for DEL from its rounds; for every exit layer with eight draft lengths from 1 to 18 by "
        "replaying the rounds of early exit on the target's text, which is exact. DEL has the settings of `--paper "
        "del`. As in the paper a static choice is picked on other prompts than it is tested on, here on the other "
        f"half, and also in hindsight. Speed by the clock on the checkpoint widened {TIMED_WIDENING} times: plain "
        "decoding, DEL with three ω, and the best draft lengths of the three best exit layers by eTPL, in turns. The "
        "paper uses up to 1000 outputs of up to 512 tokens, models of 1B to 70B parameters, and varies ω on one task."
    )
    model = "tiny-early-exit"
    unfit: ClassVar[Mapping[str, str]] = {}

    def __init__(self, amounts: Amounts | None = None) -> None:
        self._amounts = amounts

    def measure(self, lab: Lab) -> Data:
        """Replays static choices; if one pays, runs DEL on the same prompts, then measures speed by the clock."""
        amounts: Amounts = self._amounts or lab.pick(QUICK, Amounts())
        static, machine, layers = _replay_static(lab, self.model, amounts)
        best = max(static, key=lambda name: statistics.fmean(map(statistics.fmean, static[name].values())))
        found: Data = {
            "layers": layers,
            "static": {name: {each: statistics.fmean(static[name][each]) for each in static[name]} for name in static},
            "best_static": {best: static[best]},
            "picked": {
                "for all": pick_elsewhere(static, PROMPTS),
                "for each": {each: pick_elsewhere(static, [each])[each] for each in PROMPTS},
                "machine": pick_elsewhere(machine, PROMPTS),
            },
        }
        if not checks.early_exit_pays(found):
            return found
        candidates: dict[str, tuple[str, Mapping[str, Any]]] = {"plain": ("autoregressive", {})}
        candidates |= {checks.del_name(omega): ("del", _paper(omega)) for omega in amounts.timed_omegas}
        candidates |= {name: ("layerskip", _settings_of(name)) for name in _choices_to_time(static)}
        found["del"] = _run_del(lab, self.model, amounts)
        found["speed"] = _measure_speeds(lab, self.model, amounts, candidates)
        return found

    def judge(self, data: Data) -> Sequence[Check]:
        """See ``del_static_checks``; nothing is applicable if no early exit loads fewer layers than plain decoding."""
        if not checks.early_exit_pays(data):
            best = checks.best_static(data)
            mean = statistics.fmean(data["static"][best].values())
            figure = (
                f"{best}, the best, has {mean:.4f} tokens per loaded layer, plain decoding {1 / data['layers']:.4f}"
            )
            reason = "no exit layer loads fewer layers for a token than plain decoding on this model"
            return [not_applicable("DEL generates the most tokens per loaded layer", f"{reason}: {figure}")]
        return [
            checks.fewer_layers(data),
            checks.fewer_layers_in_hindsight(data),
            checks.fewer_layers_everywhere(data),
            checks.no_static_best_everywhere(data),
            checks.faster(data),
            checks.faster_by_the_clock(data),
            checks.insensitive(data),
        ]

    def draw(self, data: Data) -> "Figure":
        """Draws static choices by exit layer, and of DEL the domains and the decay factor."""
        from selfspec_lab.experiments.del_static_picture import draw

        return draw(data)


def _replay_static(lab: Lab, model_name: str, amounts: Amounts) -> tuple[ByPrompt, ByPrompt, int]:
    """Tokens per loaded layer and speed on the paper's machine of every static choice, and the number of layers."""
    engine, cost = lab.engine(model_name), paper_machine("del")
    layers = engine.target.layer_count
    choices = grid(layers, amounts.draft_lengths)
    names = [checks.static_name(*choice) for choice in choices]
    static: ByPrompt = {name: {domain: [] for domain in PROMPTS} for name in names}
    machine: ByPrompt = {name: {domain: [] for domain in PROMPTS} for name in names}
    for domain in PROMPTS:
        lab.progress(f"replaying {len(choices)} static choices on {domain}")
        for text in shadow_texts(engine, lab.prompts(domain, amounts.prompts), amounts.max_new_tokens):
            for name, choice in zip(names, choices, strict=True):
                rounds = static_rounds(text.matches, *choice, layers)
                static[name][domain].append(tokens_per_layer(rounds, layers))
                machine[name][domain].append(replayed_speedup(rounds, text.prompt_tokens, cost))
    return static, machine, layers


def _paper(omega: float) -> Mapping[str, Any]:
    return {**PAPERS["del"].values(), "omega": omega}


def _run_del(lab: Lab, model_name: str, amounts: Amounts) -> dict[str, dict[str, list[Data]]]:
    """The outputs of DEL, by decay factor and domain: ``etpl`` and ``machine``, its speed on the paper's machine."""
    engines = lab.engines(model_name, {str(omega): ("del", _paper(omega)) for omega in amounts.omegas})
    found: dict[str, dict[str, list[Data]]] = {}
    for omega, engine in engines.items():
        lab.progress(f"DEL with a decay factor of {omega}")
        found[omega] = {}
        for domain in PROMPTS:
            written = [
                engine.generate(prompt, max_new_tokens=amounts.max_new_tokens, ignore_eos=True)
                for prompt in lab.prompts(domain, amounts.prompts)
            ]
            found[omega][domain] = [
                {
                    "etpl": tokens_per_layer(rounds_of(each), engine.target.layer_count),
                    "machine": replayed(each, "del"),
                }
                for each in (trial(one, drops=True) for one in written)
            ]
    return found


def pick_elsewhere(static: ByPrompt, domains: Iterable[str]) -> dict[str, list[float]]:
    """Picks, for each half of the prompts, the static choice that is best on the other half.

    Args:
        static: tokens per loaded layer of every static choice.
        domains: the domains over which the choice is made, all together.

    Returns:
        Tokens per loaded layer of the picks, by domain and prompt.
    """
    chosen = list(domains)
    picks = [
        max(static, key=lambda name: sum(sum(static[name][domain][1 - half :: 2]) for domain in chosen))
        for half in (0, 1)
    ]
    count = len(next(iter(static.values()))[chosen[0]])
    return {domain: [static[picks[index % 2]][domain][index] for index in range(count)] for domain in chosen}


def _measure_speeds(
    lab: Lab, model_name: str, amounts: Amounts, candidates: Mapping[str, tuple[str, Mapping[str, Any]]]
) -> dict[str, list[float]]:
    """Tokens per second by candidate, one number per prompt."""
    measured = lab.measure_speeds(
        lab.engines(model_name, candidates, widen=amounts.widen),
        [prompt for domain in PROMPTS for prompt in lab.prompts(domain, amounts.timed_prompts)],
        max_new_tokens=amounts.timed_tokens,
        repeats=amounts.repeats,
    )
    return {name: list(speed.by_prompt) for name, speed in measured.items()}


def _choices_to_time(static: ByPrompt) -> list[str]:
    """The best draft lengths of the best exit layers by eTPL over all domains, best first."""
    means = {name: statistics.fmean(map(statistics.fmean, values.values())) for name, values in static.items()}
    best_of_exit: dict[int, str] = {}
    for name in sorted(static, key=means.__getitem__, reverse=True):
        best_of_exit.setdefault(checks.split_static_name(name)[0], name)
    return list(best_of_exit.values())[:_TIMED_STATIC]


def _settings_of(name: str) -> dict[str, int]:
    exit_layer, draft_length = checks.split_static_name(name)
    return {"exit_layer": exit_layer, "draft_length": draft_length}
