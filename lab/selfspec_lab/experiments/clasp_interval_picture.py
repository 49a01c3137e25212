"""The pictures of claim 5: speedups as in CLaSp's figures 4a and 4b, with acceptance and share of selection."""

from statistics import median
from typing import TYPE_CHECKING, Any

from selfspec_lab.experiments.base import Data
from selfspec_lab.experiments.clasp_interval_checks import clock_of, read_sweeps

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_STYLES: list[dict[str, Any]] = [
    {"color": "#0072b2", "marker": "o", "capsize": 3},
    {"color": "#e69f00", "marker": "s", "capsize": 3, "linestyle": "--"},
]


def draw_speedups(panel: "Axes", data: Data, sweep: str) -> None:
    """Draws the speedups of a sweep on the paper's machine and by the clock, with their range over prompts."""
    for swept, style in zip(read_sweeps(data, sweep), _STYLES, strict=True):
        speedups = list(swept.speedups.values())
        places = list(range(len(speedups)))
        medians = [median(each) for each in speedups]
        below = [middle - min(each) for middle, each in zip(medians, speedups, strict=True)]
        above = [max(each) - middle for middle, each in zip(medians, speedups, strict=True)]
        panel.errorbar(places, medians, yerr=[below, above], label=swept.where, **style)
        panel.set_xticks(places, list(swept.speedups))
    panel.axhline(1.0, color="black", linestyle=":", label="plain decoding")
    panel.set_ylabel("speedup over plain decoding\n(median and range over prompts)")
    panel.legend(frameon=False, fontsize="small")


def draw_shares(panel: "Axes", data: Data, sweep: str) -> None:
    """Draws acceptance and, by the clock, the share of selection over a sweep."""
    places = list(range(len(data[sweep])))
    lines: list[tuple[Data, str, str, dict[str, Any]]] = [
        (data, "acceptance_rate", "acceptance rate", {"color": "#009e73", "marker": "s", "linestyle": "-"}),
        (
            clock_of(data),
            "selection_share",
            "time for choosing layers",
            {"color": "#d55e00", "marker": "^", "linestyle": "--"},
        ),
    ]
    for measured, name, label, style in lines:
        panel.plot(places, [figures[name] for figures in measured[sweep].values()], label=label, **style)
    panel.set_ylim(0, 1)
    panel.set_ylabel("share")
    panel.legend(frameon=False, fontsize="small")
