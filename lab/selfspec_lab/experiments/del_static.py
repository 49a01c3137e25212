"""Claim 6: DEL against every static choice of exit layer and draft length, and its decay factor (DEL, tables 1, 6)."""

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from selfspec.errors import InvalidParameterError
from selfspec_lab.experiments import del_static_checks as checks
from selfspec_lab.experiments.base import Check, Data, Experiment, register
from selfspec_lab.experiments.del_replay import generated_tokens_per_layer, replayed_tokens_per_layer, shadow_matches
from selfspec_lab.experiments.lab import TIMED_WIDENING, Lab
from selfspec_lab.prompts import PROMPTS

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_MOST_EXITS = 15
_TIMED_STATIC = 3

ByPrompt = dict[str, dict[str, list[float]]]
"""Name of what drafts to domain to one number a prompt."""


@dataclass(frozen=True)
class Amounts:
    """How much is measured.

    Attributes:
        prompts: of each domain, for tokens per layer; at least 2.
        max_new_tokens: length of their outputs.
        omegas: decay factors for tokens per layer, the paper's among them.
        timed_omegas: those that are timed, the paper's among them.
        draft_lengths: of the static choices; their exit layers are all that there are, up to 15.
        timed_prompts: of each domain, for speed.
        timed_tokens: length of their outputs.
        repeats: how often speed is measured.
        widen: factor of the model whose speed is measured.
    """

    prompts: int = 10
    max_new_tokens: int = 80
    omegas: tuple[float, ...] = (0.5, 0.6, 0.7, 0.8, 0.9, checks.OMEGA, 1.0)
    timed_omegas: tuple[float, ...] = (0.5, checks.OMEGA, 1.0)
    draft_lengths: tuple[int, ...] = (1, 2, 3, 4, 6, 8, 12, 18)
    timed_prompts: int = 2
    timed_tokens: int = 48
    repeats: int = 3
    widen: int = TIMED_WIDENING


QUICK = Amounts(
    prompts=3, max_new_tokens=48, omegas=(0.5, checks.OMEGA, 1.0), timed_prompts=1, timed_tokens=24, repeats=1
)


@register
class DelStatic(Experiment):
    """Tokens per layer over all domains and in each, whether a static choice is best everywhere, speed, ω."""

    number = 6
    name = "del-static"
    claim = (
        "Over several tasks no one static choice of exit layer E and draft length γ is as good as DEL, which writes "
        "the most tokens per loaded layer and is the fastest on every task. It is largely insensitive to its decay "
        "factor ω (2.54 to 2.60 times as fast as plain decoding for ω from 0.5 to 1)."
    )
    source = "DEL (Entezari Zarch et al. 2025), tables 1 and 6"
    method = (
        "Greedy outputs of the bundled prompts of three domains. Tokens per loaded layer (eTPL, appendix B.4), mean "
        "over prompts: of DEL from its rounds; of every exit layer with eight draft lengths from 1 to 18 by replaying "
        "the rounds of early exit on the target's text, which is exact. As in the paper a static choice is picked on "
        "other prompts than those it is judged on, here on the other half, and also in hindsight. Speed on the "
        f"checkpoint widened {TIMED_WIDENING} times: plain decoding, DEL with three ω, and the best draft lengths of "
        "the three best exit layers by eTPL, taking turns. The paper takes up to 1000 outputs of up to 512 tokens of "
        "1B to 70B models, and varies ω on one task."
    )
    model = "tiny-early-exit"

    def __init__(self, amounts: Amounts | None = None) -> None:
        self._amounts = amounts

    def measure(self, lab: Lab) -> Data:
        """Tokens per layer of static choices and of DEL, then speeds."""
        amounts: Amounts = self._amounts or lab.pick(QUICK, Amounts())
        static, layers = _replay_static(lab, self.model, amounts)
        data: Data = {
            "layers": layers,
            "static": {name: {each: statistics.fmean(static[name][each]) for each in static[name]} for name in static},
            "del": _tokens_per_layer_of_del(lab, self.model, amounts),
        }
        best = checks.best_static(data)
        contenders: dict[str, tuple[str, Mapping[str, Any]]] = {"plain": ("autoregressive", {})}
        contenders |= {checks.del_name(omega): ("del", {"omega": omega}) for omega in amounts.timed_omegas}
        contenders |= {name: ("layerskip", _settings_of(name)) for name in _choices_to_time(data)}
        return {
            **data,
            "best_static": {best: static[best]},
            "picked": {
                "for all": pick_elsewhere(static, PROMPTS),
                "for each": {each: pick_elsewhere(static, [each])[each] for each in PROMPTS},
            },
            "speed": _measure_speeds(lab, self.model, amounts, contenders),
        }

    def judge(self, data: Data) -> Sequence[Check]:
        """Seven parts; see the module of the checks."""
        return [
            checks.fewer_layers(data),
            checks.fewer_layers_in_hindsight(data),
            checks.fewer_layers_everywhere(data),
            checks.no_static_best_everywhere(data),
            checks.faster(data),
            checks.insensitive_by_layers(data),
            checks.insensitive_by_speed(data),
        ]

    def draw(self, data: Data) -> "Figure":
        """Static choices by exit layer, the domains, the decay factor."""
        from selfspec_lab.experiments.del_static_picture import draw

        return draw(data)


def static_name(exit_layer: int, draft_length: int) -> str:
    """As in the paper's tables: ``E6-γ4``."""
    return f"E{exit_layer}-γ{draft_length}"


def split_static_name(name: str) -> tuple[int, int]:
    """Exit layer and draft length of a ``static_name``."""
    exit_layer, draft_length = name.removeprefix("E").split("-γ")
    return int(exit_layer), int(draft_length)


def _replay_static(lab: Lab, model_name: str, amounts: Amounts) -> tuple[ByPrompt, int]:
    """Tokens per loaded layer of every static choice, and the number of layers."""
    engine = lab.engine(model_name)
    layers = engine.target.layer_count
    if layers < 3:
        raise InvalidParameterError(f"a model of {layers} layers has no choice of exit layer; take one of at least 3")
    exits = range(1, layers, -(-(layers - 1) // _MOST_EXITS))
    choices = [(exit_layer, length) for exit_layer in exits for length in amounts.draft_lengths]
    static: ByPrompt = {static_name(*choice): {domain: [] for domain in PROMPTS} for choice in choices}
    for domain in PROMPTS:
        lab.progress(f"replaying {len(choices)} static choices on {domain}")
        for prompt in lab.prompts(domain, amounts.prompts):
            output = engine.generate(prompt, max_new_tokens=amounts.max_new_tokens, ignore_eos=True)
            matches = shadow_matches(engine.target, engine.encode(prompt), output.token_ids)
            for choice in choices:
                static[static_name(*choice)][domain].append(replayed_tokens_per_layer(matches, *choice, layers))
    return static, layers


def _tokens_per_layer_of_del(lab: Lab, model_name: str, amounts: Amounts) -> ByPrompt:
    """Tokens per loaded layer of DEL, by decay factor."""
    engines = lab.engines(model_name, {str(omega): ("del", {"omega": omega}) for omega in amounts.omegas})
    found: ByPrompt = {}
    for omega, engine in engines.items():
        lab.progress(f"DEL with a decay factor of {omega}")
        found[omega] = {
            domain: [
                generated_tokens_per_layer(
                    engine.generate(prompt, max_new_tokens=amounts.max_new_tokens, ignore_eos=True),
                    engine.target.layer_count,
                )
                for prompt in lab.prompts(domain, amounts.prompts)
            ]
            for domain in PROMPTS
        }
    return found


def pick_elsewhere(static: ByPrompt, domains: Iterable[str]) -> dict[str, list[float]]:
    """The static choices that are best for some domains on the other half of the prompts.

    Args:
        static: tokens per loaded layer of every static choice.
        domains: those that the choice has to be good for, all of them together.

    Returns:
        Tokens per loaded layer by domain and prompt, of the choice picked on the other prompts.
    """
    chosen = list(domains)
    picks = [
        max(static, key=lambda name: sum(sum(static[name][domain][1 - half :: 2]) for domain in chosen))
        for half in (0, 1)
    ]
    count = len(next(iter(static.values()))[chosen[0]])
    return {domain: [static[picks[index % 2]][domain][index] for index in range(count)] for domain in chosen}


def _measure_speeds(
    lab: Lab, model_name: str, amounts: Amounts, contenders: Mapping[str, tuple[str, Mapping[str, Any]]]
) -> dict[str, list[float]]:
    """Tokens per second over all domains: contender to one number a repeat."""
    measured = lab.measure_speeds(
        lab.engines(model_name, contenders, widen=amounts.widen),
        [prompt for domain in PROMPTS for prompt in lab.prompts(domain, amounts.timed_prompts)],
        max_new_tokens=amounts.timed_tokens,
        repeats=amounts.repeats,
    )
    return {name: list(speed.samples) for name, speed in measured.items()}


def _choices_to_time(data: Data) -> list[str]:
    """The best draft lengths of the best exit layers by eTPL over all domains, best first."""
    static = data["static"]
    ordered = sorted(static, key=lambda name: statistics.fmean(static[name].values()), reverse=True)
    best_of_exit: dict[int, str] = {}
    for name in ordered:
        best_of_exit.setdefault(split_static_name(name)[0], name)
    return list(best_of_exit.values())[:_TIMED_STATIC]


def _settings_of(name: str) -> dict[str, int]:
    exit_layer, draft_length = split_static_name(name)
    return {"exit_layer": exit_layer, "draft_length": draft_length}
