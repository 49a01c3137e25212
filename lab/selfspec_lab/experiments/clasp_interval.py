"""Claim 5: CLaSp is fastest at a medium interval between selections and a medium number of skipped layers."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from selfspec.types import Generation
from selfspec_lab.checks import Check
from selfspec_lab.decide import SEEDS
from selfspec_lab.experiments.base import Data, Experiment, register
from selfspec_lab.experiments.clasp_interval_checks import (
    lies_inside,
    replay_with_selections,
    trades_time_for_length,
)
from selfspec_lab.experiments.clasp_interval_picture import draw_shares, draw_speedups
from selfspec_lab.experiments.lab import TIMED_WIDENING, Lab
from selfspec_lab.experiments.panels import make_panels
from selfspec_lab.experiments.sampled import TEMPERATURE, sampling, seeds_of, write_in_turn
from selfspec_lab.experiments.trials import count, mean_length, trial
from selfspec_lab.prompts import PROMPTS

if TYPE_CHECKING:
    from matplotlib.figure import Figure

INTERVAL = 16
"""Rounds between selections while the number of skipped layers varies."""

SKIPPED = 0.5
"""Share of skipped layers while the interval varies."""

SWEEPS = ("intervals", "skipped")


@dataclass(frozen=True)
class Amounts:
    """How much is measured.

    Attributes:
        prompts: prompts per domain, whose rounds are counted.
        seeds: texts per prompt.
        interval_tokens: length of a text while the interval varies; a fall past 128 rounds takes texts of 256.
        skipped_tokens: length of a text while the number of skipped layers varies.
        timed_prompts: how many of these prompts are timed, with one text each.
        timed_tokens: length of these texts.
        intervals: rounds between selections, ascending.
        skipped: shares of skipped layers, ascending.
        widening: factor by which the checkpoint is widened to be timed.
    """

    prompts: int
    seeds: int
    interval_tokens: int
    skipped_tokens: int
    timed_prompts: int
    timed_tokens: int
    intervals: tuple[int, ...]
    skipped: tuple[float, ...]
    widening: int = TIMED_WIDENING


_QUICK = Amounts(1, 2, 48, 24, 1, 24, (1, 8, 64), (0.125, SKIPPED, 0.875), widening=2)
_FULL = Amounts(7, SEEDS, 448, 64, 4, 48, (4, 16, 64, 256), (0.125, 0.25, SKIPPED, 0.75, 0.875))


@register
class ClaspInterval(Experiment):
    """CLaSp, figures 4a and 4b: speed over the interval and over the number of skipped layers."""

    number = 5
    name = "clasp-interval"
    claim = (
        "CLaSp's speedup first rises and then falls with the interval between selections of layers, past 128 rounds "
        "because old sets draft worse. It also rises and then falls with the number of skipped layers, with its "
        "maximum at 44 of 80."
    )
    source = "CLaSp (Chen et al. 2025), sections 3.7 and 5.3, figures 4a and 4b"
    method = (
        f"The model writes {SEEDS} texts of each prompt with CLaSp (sampled with seeds, temperature {TEMPERATURE}, so "
        "all settings write the same), several together, which changes no round. Their rounds are replayed on the "
        "paper's machine, where a selection takes 1.4 steps (0.14 seconds against 0.1, section 5.1); what is compared "
        "is a prompt's mean over its texts, of speeds the geometric mean. Half of the layers are skipped while the "
        f"interval varies, in texts of {_FULL.interval_tokens} tokens; the interval is {INTERVAL} rounds while the "
        f"number of layers varies, in texts of {_FULL.skipped_tokens}. An interval longer than the number of rounds "
        "means one selection per request, as almost in the paper, whose outputs end at 1024 tokens. An optimum is "
        "inside the sweep if the best value between the ends is faster than both. It is chosen for a prompt on the "
        "other half of the prompts, so no prompt tests a choice that it made. By the clock the checkpoint widened "
        f"{TIMED_WIDENING} times writes one text of {_FULL.timed_tokens} tokens for {_FULL.timed_prompts} prompts a "
        "domain, plainly and with CLaSp, in turns prompt by prompt; a speedup is the ratio of the speeds on one prompt."
    )
    model = "tiny"

    def __init__(self, amounts: Amounts | None = None) -> None:
        self.amounts = amounts

    def measure(self, lab: Lab) -> Data:
        """Counts the rounds of all settings on the same texts, then times shorter ones in turns."""
        amounts = self.amounts or lab.pick(_QUICK, _FULL)
        layers = lab.load(self.model)[0].config.num_hidden_layers
        skips = dict.fromkeys(_skips(share, layers) for share in amounts.skipped)
        settings = {
            "intervals": {
                str(interval): _settings(interval, _skips(SKIPPED, layers)) for interval in amounts.intervals
            },
            "skipped": {str(each): _settings(INTERVAL, each) for each in skips},
        }
        tokens = {"intervals": amounts.interval_tokens, "skipped": amounts.skipped_tokens}
        return {
            "layers": layers,
            "prompts": amounts.prompts * len(PROMPTS),
            "seeds": amounts.seeds,
            "max_new_tokens": tokens,
            **{sweep: self._count_rounds(lab, amounts, settings[sweep], tokens[sweep]) for sweep in SWEEPS},
            "clock": self._time(lab, amounts, settings),
        }

    def _count_rounds(self, lab: Lab, amounts: Amounts, settings: Mapping[str, Any], max_new_tokens: int) -> Data:
        """The figures of the rounds of some settings, by value: one for each text, prompt after prompt."""
        requests = [
            (prompt, sampling(max_new_tokens, seed))
            for index, prompt in enumerate(_prompts(lab, amounts.prompts))
            for seed in seeds_of(index, lab.seed, amounts.seeds)
        ]
        engines = lab.engines(self.model, {value: ("clasp", each) for value, each in settings.items()})
        counted = count(lab, engines, requests)
        return {value: _counted(counted[value], each["update_interval"]) for value, each in settings.items()}

    def _time(self, lab: Lab, amounts: Amounts, settings: Mapping[str, Mapping[str, Any]]) -> Data:
        """The same by the clock, for one text of each prompt."""
        # A setting that is in both sweeps is measured once.
        names = {_name(each): ("clasp", each) for sweep in settings.values() for each in sweep.values()}
        engines = lab.engines(self.model, {"plain": ("autoregressive", {}), **names}, widen=amounts.widening)
        prompts = _prompts(lab, amounts.timed_prompts)
        seeds = range(lab.seed, lab.seed + len(prompts))
        written = write_in_turn(lab, engines, prompts, amounts.timed_tokens, seeds=seeds)
        figures = {name: _timed(written[name], written["plain"]) for name in names}
        return {
            "max_new_tokens": amounts.timed_tokens,
            "plain_tokens_per_second": [each.tokens_per_second for each in written["plain"]],
            **{sweep: {value: figures[_name(each)] for value, each in settings[sweep].items()} for sweep in SWEEPS},
        }

    def judge(self, data: Data) -> Sequence[Check]:
        """Both optima are inside their sweeps; a longer interval takes less time and drafts worse."""
        return [
            *lies_inside(data, "intervals", "interval", "rounds"),
            trades_time_for_length(data),
            *lies_inside(data, "skipped", "number of skipped layers", f"of {data['layers']} layers"),
        ]

    def draw(self, data: Data) -> "Figure":
        """Draws speedups as in figures 4b and 4a; below, acceptance and the share of selection."""
        figure, panels = make_panels(2, 2, height=5.0, sharex="col", height_ratios=[3, 2])
        labels = ("interval between choices (rounds)", f"skipped layers (of {data['layers']})")
        for column, (sweep, label) in enumerate(zip(SWEEPS, labels, strict=True)):
            upper, lower = panels[column::2]
            draw_speedups(upper, data, sweep)
            draw_shares(lower, data, sweep)
            lower.set_xlabel(label)
        return figure


def _prompts(lab: Lab, count: int) -> list[str]:
    """``count`` prompts of every domain."""
    return [prompt for domain in PROMPTS for prompt in lab.prompts(domain, count)]


def _skips(share: float, layers: int) -> int:
    """A share of the layers as a number of layers, from 1 to ``layers - 1``."""
    return min(max(1, round(share * layers)), layers - 1)


def _settings(interval: int, skipped: int) -> dict[str, Any]:
    own = {"update_interval": interval, "skipped_layers": skipped}
    return {"schedule": "paper", "share_kept_set": False, **own}


def _name(settings: Mapping[str, Any]) -> str:
    return " ".join(str(value) for value in settings.values())


def _counted(trials: Sequence[Data], interval: int) -> dict[str, Any]:
    """The figures of the rounds of a setting, by text and over all texts."""
    drafted, accepted = (sum(each[name] for each in trials) for name in ("drafted", "accepted"))
    return {
        "trials": list(trials),
        "machine": [replay_with_selections(each, interval) for each in trials],
        "rounds": [len(each["rounds"]) for each in trials],
        "mean_generated_lengths": [mean_length(each) for each in trials],
        "drafted": drafted,
        "acceptance_rate": accepted / drafted if drafted else 0.0,
    }


def _timed(written: Sequence[Generation], plain: Sequence[Generation]) -> dict[str, Any]:
    """The figures of a setting by the clock, by text and over all texts."""
    selection = sum(record.seconds.select for each in written for record in each.rounds)
    pairs = zip(written, plain, strict=True)
    return {
        "trials": [trial(each) for each in written],
        "speedups": [each.tokens_per_second / other.tokens_per_second for each, other in pairs],
        "rounds": [each.round_count for each in written],
        "selection_share": selection / sum(each.seconds - each.prefill_seconds for each in written),
    }
