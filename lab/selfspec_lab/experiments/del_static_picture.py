"""The picture of claim 6."""

import statistics
from typing import TYPE_CHECKING, Any

from selfspec_lab.experiments.base import Data
from selfspec_lab.experiments.del_static_checks import (
    OMEGA,
    best_static,
    del_means,
    del_name,
    of_del,
    ratios,
    split_static_name,
    timed_del,
)
from selfspec_lab.experiments.panels import make_panels

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_SHOWN_LENGTHS = {1: ("#cc79a7", "v"), 3: ("#56b4e9", "s"), 6: ("#009e73", "^"), 12: ("#e69f00", "D")}
_DEL, _STATIC, _OWN = "#0072b2", "#e69f00", "#009e73"


def draw(data: Data) -> "Figure":
    """Draws static choices by exit layer with plain decoding, and of DEL, if it was run, domains and decay factor."""
    parts = (_draw_grid, _draw_domains, _draw_decay) if "del" in data else (_draw_grid,)
    figure, panels = make_panels(len(parts), width=11.0)
    for draw_part, panel in zip(parts, panels, strict=True):
        draw_part(panel, data)
    return figure


def _draw_grid(panel: "Axes", data: Data) -> None:
    means = {split_static_name(name): statistics.fmean(values.values()) for name, values in data["static"].items()}
    for length, (colour, marker) in _SHOWN_LENGTHS.items():
        points = sorted((exit_layer, mean) for (exit_layer, each), mean in means.items() if each == length)
        if points:
            panel.plot(
                *zip(*points, strict=True), color=colour, marker=marker, markersize=4, label=f"static, γ = {length}"
            )
    if "del" in data:
        panel.axhline(del_means(data)[str(OMEGA)], color=_DEL, linewidth=2, label="DEL")
    panel.axhline(1 / data["layers"], color="black", linestyle=":", label="plain decoding")
    panel.set_xticks(range(0, data["layers"] + 1, max(1, data["layers"] // 8)))
    panel.set_xlabel("exit layer E")
    panel.set_ylabel("eTPL, tokens per loaded layer")
    panel.set_title("mean of the domains", fontsize="medium")
    panel.legend(frameon=False, fontsize="small")


def _draw_domains(panel: "Axes", data: Data) -> None:
    picked, domains = data["picked"], list(data["picked"]["for all"])
    bars: list[tuple[str, str, str, dict[str, list[float]]]] = [
        ("static, picked for all domains", _STATIC, "////", picked["for all"]),
        ("static, picked for the domain", _OWN, "", picked["for each"]),
        ("DEL", _DEL, "..", of_del(data, "etpl")),
    ]
    heights = [[statistics.fmean(values[domain]) for domain in domains] for *_, values in bars]
    for place, (label, colour, hatch, _) in enumerate(bars):
        positions = [index + 0.27 * (place - 1) for index in range(len(domains))]
        panel.bar(positions, heights[place], 0.25, label=label, facecolor=colour, edgecolor="white", hatch=hatch)
    panel.axhline(1 / data["layers"], color="black", linestyle=":")
    labels = [f"{domain}\n{best_static(data, domain)}" for domain in domains]
    panel.set_xticks(range(len(domains)), labels)
    panel.set_ylim(0, 1.45 * max(map(max, heights)))
    panel.set_ylabel("eTPL, tokens per loaded layer")
    panel.set_title("each domain, its best static choice below", fontsize="medium")
    panel.legend(frameon=False, fontsize="small", loc="upper left")


def _draw_decay(panel: "Axes", data: Data) -> None:
    layers: Any = {float(omega): data["layers"] * mean for omega, mean in del_means(data).items()}
    panel.plot(*zip(*sorted(layers.items()), strict=True), color=_DEL, marker="o", label="eTPL over 1 / L")
    speeds = {float(name.removeprefix(del_name(""))): ratios(data, name) for name in timed_del(data)}
    for index, (omega, samples) in enumerate(sorted(speeds.items())):
        panel.plot([omega] * 2, [min(samples), max(samples)], color=_STATIC, linewidth=1)
        panel.plot(
            omega,
            statistics.median(samples),
            color=_STATIC,
            marker="s",
            linestyle="",
            label=None if index else "speedup, median and range",
        )
    panel.axhline(1, color="black", linestyle=":")
    panel.set_ylim(bottom=0)
    panel.set_xlabel("decay factor ω")
    panel.set_ylabel("DEL over plain decoding")
    panel.set_title("decay factor", fontsize="medium")
    panel.legend(frameon=False, fontsize="small", loc="lower left")
