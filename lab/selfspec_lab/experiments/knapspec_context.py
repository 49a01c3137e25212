"""Claim 7: KnapSpec adapts to the context, its objective predicts speed, and its interval and threshold are good."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from selfspec_lab.checks import Check
from selfspec_lab.experiments import knapspec_interval, knapspec_prediction, knapspec_shares, knapspec_threshold
from selfspec_lab.experiments.base import Data, Experiment, register
from selfspec_lab.experiments.knapspec_scene import MODEL
from selfspec_lab.experiments.lab import Lab

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class Amounts:
    """How much is measured in each part."""

    shares: knapspec_shares.Amounts = field(default_factory=knapspec_shares.Amounts)
    prediction: knapspec_prediction.Amounts = field(default_factory=knapspec_prediction.Amounts)
    interval: knapspec_interval.Amounts = field(default_factory=knapspec_interval.Amounts)
    threshold: knapspec_threshold.Amounts = field(default_factory=knapspec_threshold.Amounts)


QUICK = Amounts(knapspec_shares.QUICK, knapspec_prediction.QUICK, knapspec_interval.QUICK, knapspec_threshold.QUICK)


@register
class KnapspecContext(Experiment):
    """KnapSpec, figures 2, 3, 4 and 6; each part is a module."""

    number = 7
    name = "knapspec-context"
    claim = (
        "KnapSpec skips a larger share of attention as the context grows. Tokens per time (TPT) predicts throughput "
        "better than acceptance does (Pearson 0.84 against 0.54). Speed has an interior maximum over the interval "
        "between selections, while the share of selection falls. Pruning at a cosine of 0.5 loses nothing."
    )
    source = "KnapSpec (Cha et al. 2026), figures 2, 3, 4 and 6"
    method = " ".join(
        (knapspec_shares.METHOD, knapspec_prediction.METHOD, knapspec_interval.METHOD, knapspec_threshold.METHOD)
    )
    model = MODEL

    def __init__(self, amounts: Amounts | None = None) -> None:
        self._amounts = amounts

    def measure(self, lab: Lab) -> Data:
        """Measures one part after another."""
        amounts: Amounts = self._amounts or lab.pick(QUICK, Amounts())
        return {
            "shares": knapspec_shares.measure(lab, amounts.shares),
            "prediction": knapspec_prediction.measure(lab, amounts.prediction),
            "interval": knapspec_interval.measure(lab, amounts.interval),
            "threshold": knapspec_threshold.measure(lab, amounts.threshold),
        }

    def judge(self, data: Data) -> Sequence[Check]:
        """The checks of all parts."""
        return [
            *knapspec_shares.judge(data["shares"]),
            *knapspec_prediction.judge(data["prediction"]),
            *knapspec_interval.judge(data["interval"]),
            *knapspec_threshold.judge(data["threshold"]),
        ]

    def draw(self, data: Data) -> "Figure":
        """Draws the paper's four figures, figure 2 in two panels."""
        from matplotlib.figure import Figure

        figure = Figure(figsize=(11.0, 6.4), layout="constrained")
        panels = figure.subplots(2, 3).flatten()
        knapspec_shares.draw(panels[0], data["shares"])
        knapspec_prediction.draw(panels[1], panels[2], data["prediction"])
        knapspec_interval.draw(panels[3], data["interval"])
        knapspec_threshold.draw(panels[4], data["threshold"])
        panels[5].set_axis_off()
        for panel in panels[[0, 1, 2, 4]]:
            panel.spines[["top", "right"]].set_visible(False)
        return figure
