"""The pictures of claim 5: speedups as in CLaSp's figures 4a and 4b, with acceptance and share of selection."""

from collections.abc import Mapping
from statistics import median
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def draw_speedups(panel: "Axes", sweep: Mapping[str, Any]) -> None:
    """Draws the speedups of a sweep, with their range over prompts."""
    places = list(range(len(sweep)))
    speedups = [figures["speedups"] for figures in sweep.values()]
    medians = [median(each) for each in speedups]
    below = [middle - min(each) for middle, each in zip(medians, speedups, strict=True)]
    above = [max(each) - middle for middle, each in zip(medians, speedups, strict=True)]
    style: dict[str, Any] = {"color": "#0072b2", "marker": "o", "capsize": 3}
    panel.errorbar(places, medians, yerr=[below, above], label="median and range over prompts", **style)
    panel.axhline(1.0, color="black", linestyle=":", label="plain decoding")
    panel.set_xticks(places, list(sweep))
    panel.set_ylabel("speedup over\nplain decoding")
    panel.legend(frameon=False, fontsize="small")


def draw_shares(panel: "Axes", sweep: Mapping[str, Any]) -> None:
    """Draws acceptance and the share of selection over a sweep."""
    places = list(range(len(sweep)))
    lines: list[tuple[str, str, dict[str, Any]]] = [
        ("acceptance_rate", "acceptance rate", {"color": "#009e73", "marker": "s", "linestyle": "-"}),
        ("selection_share", "time for choosing layers", {"color": "#d55e00", "marker": "^", "linestyle": "--"}),
    ]
    for name, label, style in lines:
        panel.plot(places, [figures[name] for figures in sweep.values()], label=label, **style)
    panel.set_ylim(0, 1)
    panel.set_ylabel("share")
    panel.legend(frameon=False, fontsize="small")
