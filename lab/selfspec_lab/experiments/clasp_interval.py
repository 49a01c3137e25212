"""Claim 5: CLaSp is fastest at a medium interval between selections and a medium number of skipped layers."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from selfspec.types import Generation
from selfspec_lab.checks import Check
from selfspec_lab.experiments.base import Data, Experiment, register
from selfspec_lab.experiments.clasp_interval_checks import (
    lies_inside,
    never_falls,
    replay_with_selections,
    trades_time_for_length,
)
from selfspec_lab.experiments.clasp_interval_picture import draw_shares, draw_speedups
from selfspec_lab.experiments.lab import TIMED_WIDENING, Lab
from selfspec_lab.experiments.panels import make_panels
from selfspec_lab.experiments.sampled import TEMPERATURE, write_in_turn
from selfspec_lab.experiments.trials import trial
from selfspec_lab.prompts import PROMPTS

if TYPE_CHECKING:
    from matplotlib.figure import Figure

INTERVAL = 16
"""Rounds between selections while the number of skipped layers varies."""

SKIPPED = 0.5
"""Share of skipped layers while the interval varies."""


@dataclass(frozen=True)
class Amounts:
    """How much is measured.

    Attributes:
        prompts: prompts per domain.
        max_new_tokens: length of every output, in tokens.
        intervals: rounds between selections, ascending.
        skipped: shares of skipped layers, ascending.
        widening: factor by which the checkpoint is widened.
    """

    prompts: int
    max_new_tokens: int
    intervals: tuple[int, ...]
    skipped: tuple[float, ...]
    widening: int = TIMED_WIDENING


_QUICK = Amounts(1, 48, (1, 8, 64), (0.125, SKIPPED, 0.875), widening=2)
_FULL = Amounts(7, 128, (1, 4, 16, 64), (0.125, 0.25, SKIPPED, 0.75, 0.875))


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
        f"The checkpoint widened {TIMED_WIDENING} times writes the same texts (sampled with a seed at temperature "
        f"{TEMPERATURE}, so all candidates write the same) plainly and with CLaSp, in turns prompt by prompt; a "
        "speedup is the ratio of the speeds on one prompt. Half of the layers are skipped while the interval varies, "
        f"and the interval is {INTERVAL} rounds while their number varies. An interval longer than the number of "
        "rounds means one selection per request, as almost in the paper, whose outputs end at 1024 tokens. An "
        "optimum is inside the sweep if the best value between the ends is faster than both. It is chosen for a "
        "prompt on the other half of the prompts, so no prompt tests a choice that it made. On the paper's machine a "
        "selection takes 1.4 steps (0.14 seconds against 0.1, section 5.1)."
    )
    model = "tiny"

    def __init__(self, amounts: Amounts | None = None) -> None:
        self.amounts = amounts

    def measure(self, lab: Lab) -> Data:
        """Times plain decoding and all settings in turns on the same prompts."""
        amounts = self.amounts or lab.pick(_QUICK, _FULL)
        model, _ = lab.load(self.model, widen=amounts.widening)
        layers = model.config.num_hidden_layers
        counts = dict.fromkeys(_count(share, layers) for share in amounts.skipped)
        intervals = {str(interval): _settings(interval, _count(SKIPPED, layers)) for interval in amounts.intervals}
        skipped = {str(count): _settings(INTERVAL, count) for count in counts}
        # A setting that is in both sweeps is measured once.
        names = {_name(settings): ("clasp", settings) for settings in (*intervals.values(), *skipped.values())}
        engines = lab.engines(self.model, {"plain": ("autoregressive", {}), **names}, widen=amounts.widening)
        prompts = [prompt for domain in PROMPTS for prompt in lab.prompts(domain, amounts.prompts)]
        seeds = range(lab.seed, lab.seed + len(prompts))
        written = write_in_turn(lab, engines, prompts, amounts.max_new_tokens, seeds=seeds)
        figures = {
            name: _figures(written[name], written["plain"], settings["update_interval"])
            for name, (_, settings) in names.items()
        }
        return {
            "layers": layers,
            "prompts": len(prompts),
            "max_new_tokens": amounts.max_new_tokens,
            "rounds": max(max(each["rounds"]) for each in figures.values()),
            "plain_tokens_per_second": [each.tokens_per_second for each in written["plain"]],
            "intervals": {value: figures[_name(settings)] for value, settings in intervals.items()},
            "skipped": {value: figures[_name(settings)] for value, settings in skipped.items()},
        }

    def judge(self, data: Data) -> Sequence[Check]:
        """Both optima are inside their sweeps; a longer interval takes less time and drafts worse."""
        return [
            *lies_inside(
                data["intervals"],
                "interval",
                f"rounds (texts have up to {data['rounds']})",
                unable=never_falls(data["rounds"]),
            ),
            *trades_time_for_length(data["intervals"]),
            *lies_inside(data["skipped"], "number of skipped layers", f"of {data['layers']} layers"),
        ]

    def draw(self, data: Data) -> "Figure":
        """Draws speedups as in figures 4b and 4a; below, acceptance and the share of selection."""
        figure, panels = make_panels(2, 2, height=5.0, sharex="col", height_ratios=[3, 2])
        labels = ("interval between choices (rounds)", f"skipped layers (of {data['layers']})")
        for column, (sweep, label) in enumerate(zip(("intervals", "skipped"), labels, strict=True)):
            upper, lower = panels[column::2]
            draw_speedups(upper, data[sweep])
            draw_shares(lower, data[sweep])
            lower.set_xlabel(label)
        return figure


def _count(share: float, layers: int) -> int:
    """A share of the layers as a number of layers, from 1 to ``layers - 1``."""
    return min(max(1, round(share * layers)), layers - 1)


def _settings(interval: int, skipped: int) -> dict[str, Any]:
    return {"schedule": "paper", "update_interval": interval, "skipped_layers": skipped}


def _name(settings: Mapping[str, Any]) -> str:
    return " ".join(str(value) for value in settings.values())


def _figures(written: Sequence[Generation], plain: Sequence[Generation], interval: float) -> dict[str, Any]:
    """The figures of a candidate, by prompt and over all prompts."""
    drafted, accepted = (sum(getattr(each, name) for each in written) for name in ("drafted", "accepted"))
    selection = sum(record.seconds.select for each in written for record in each.rounds)
    pairs = zip(written, plain, strict=True)
    return {
        "trials": [trial(each) for each in written],
        "machine": [replay_with_selections(each, int(interval)) for each in written],
        "speedups": [each.tokens_per_second / other.tokens_per_second for each, other in pairs],
        "rounds": [each.round_count for each in written],
        "mean_generated_lengths": [each.mean_generated_length for each in written],
        "drafted": drafted,
        "acceptance_rate": accepted / drafted if drafted else 0.0,
        "selection_share": selection / sum(each.seconds - each.prefill_seconds for each in written),
    }
