"""The pictures of a report that show figures of the summary. Needs matplotlib."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from selfspec_lab.bench.options import PLAIN
from selfspec_lab.bench.report.read import Run
from selfspec_lab.bench.report.round_plots import draw_draft_lengths, draw_kept
from selfspec_lab.bench.report.stream_plot import draw_stream
from selfspec_lab.bench.report.styles import GREY, SPEEDUP, Picture, Styles, grid, make_figure, plain_text, shown, tidy
from selfspec_lab.bench.report.tables import DIFFERS
from selfspec_lab.formulas import ideal_speedup
from selfspec_lab.plots import PHASE_STYLES

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_PANELS_A_ROW = 4
_ROW_HEIGHT = 0.17
_COSTS = {0.0: "-", 0.25: "--", 0.5: "-.", 0.75: ":"}
"""Costs of a draft step whose ideal curves are drawn, with their line styles."""

_PAPER = {"facecolor": "white", "edgecolor": "none", "pad": 0.5}
_PHASES = (("draft", "draft"), ("verify", "verify"), ("select", "selection"), ("other", "other"))


def draw_pictures(run: Run, summary: Mapping[str, Any]) -> list[Picture]:
    """Draws all pictures for which the run has data.

    Args:
        run: the run.
        summary: as ``summarise`` returns it.
    """
    drawn = [
        draw_speedups(summary),
        draw_acceptance(summary),
        draw_time(summary),
        draw_kept(run, summary),
        draw_draft_lengths(run, summary),
        draw_stream(run, summary),
    ]
    return [picture for picture in drawn if picture is not None]


def draw_speedups(summary: Mapping[str, Any]) -> Picture | None:
    """Draws speedups with intervals, one panel per category, one row per candidate."""
    names = shown(summary)
    if not names:
        return None
    categories = list(summary["categories"])
    panels: list[str | None] = [None, *categories] if len(categories) > 1 else [None]
    styles = Styles(summary)
    figure, axes = grid(len(panels), _PANELS_A_ROW, _ROW_HEIGHT * len(names) + 0.45, sharex=True, sharey=True)
    for panel, category in zip(axes, panels, strict=True):
        panel.axvline(1, color="black", linewidth=1, zorder=1)
        for place, name in enumerate(names):
            candidate = summary["candidates"][name]
            figures = candidate["overall"] if category is None else candidate["categories"][category]
            if figures["speedup"] is not None:
                _draw_interval(panel, place, figures, styles.colour(name), styles.marker(name))
        panel.set_title("overall" if category is None else plain_text(category), fontsize="medium", loc="left")
        panel.set_ylim(len(names) - 0.4, -0.6)
        panel.set_yticks(range(len(names)), [styles.label(name) for name in names])
        tidy(panel, grid_axis="x")
        panel.tick_params(axis="y", length=0)
    axes[0].set_xlim(left=min(0.9, axes[0].get_xlim()[0]), right=max(1.1, axes[0].get_xlim()[1]))
    figure.supxlabel("speedup over plain decoding", fontsize="medium")
    return Picture(
        SPEEDUP,
        "Speedup by category",
        f"Speedup over plain decoding, overall and in {len(categories)} categories, with 95 % intervals. "
        f"Overall: {_listed(summary, names)}.",
        f"The line at 1 is plain decoding; bars are 95 % intervals. {DIFFERS} marks candidates with outputs that "
        "differ from plain decoding.",
        figure,
    )


def draw_acceptance(summary: Mapping[str, Any]) -> Picture | None:
    """Draws measured and ideal speedup over acceptance, with curves of SWIFT's equation 6."""
    names = shown(summary, "acceptance_rate")
    if not names:
        return None
    figure = make_figure(5.0)
    panel, styles = figure.subplots(), Styles(summary)
    lengths = [summary["candidates"][name]["overall"]["mean_generated_length"] for name in names]
    length = float(np.median(lengths))
    for name in names:
        overall = summary["candidates"][name]["overall"]
        rate, speedup, ideal = (overall[each] for each in ("acceptance_rate", "speedup", "ideal_speedup"))
        colour = styles.colour(name)
        if ideal is not None and speedup is not None:
            panel.plot([rate, rate], [speedup, ideal], color=colour, linewidth=0.8, linestyle=":")
            panel.plot([rate], [ideal], color=colour, marker="_", markersize=9, markeredgewidth=1.6)
        if speedup is not None:
            label = f"{styles.label(name)} (M {overall['mean_generated_length']:.1f})"
            panel.plot([rate], [speedup], linestyle="", label=label, markersize=7, **styles.marker(name))
    panel.axhline(1, color="black", linewidth=1, zorder=1)
    _draw_ideal_curves(panel, length)
    panel.set(xlabel="acceptance rate", ylabel="speedup over plain decoding", xlim=(0, 1.03), ylim=(0, None))
    tidy(panel)
    panel.legend(loc="upper left", bbox_to_anchor=(1.01, 1.0), frameon=False, fontsize="small")
    return Picture(
        "acceptance",
        "Acceptance against speedup",
        "Speedup over plain decoding against acceptance rate: "
        + "; ".join(_acceptance_text(name, summary["candidates"][name]["overall"]) for name in names)
        + ".",
        "The bar above a marker is the candidate's ideal speedup, if reading memory took all the time. The grey curves "
        f"are SWIFT's equation 6, M α / ((M - 1) c + α), with the median mean generated length M = {length:.2f}, for "
        "draft steps that cost c of a target step. The legend has M of each candidate.",
        figure,
    )


def draw_time(summary: Mapping[str, Any]) -> Picture | None:
    """Draws the time per token by phase, one bar per candidate."""
    names = shown(summary, "measured_tpt", with_plain=True)
    if not names:
        return None
    figure = make_figure(0.24 * len(names) + 1.2)
    panel, styles = figure.subplots(), Styles(summary)
    for place, name in enumerate(names):
        overall = summary["candidates"][name]["overall"]
        milliseconds, left = 1000 / overall["measured_tpt"], 0.0
        if overall["other_share"] is None:
            panel.barh(place, milliseconds, 0.72, facecolor="white", edgecolor=GREY, hatch="xx", linewidth=0.8)
            continue
        for phase, share in _PHASES:
            width = milliseconds * overall[f"{share}_share"]
            panel.barh(place, width, 0.72, left, edgecolor="white", linewidth=0, **PHASE_STYLES[phase])
            left += width
        panel.text(
            milliseconds,
            place,
            f" select {overall['selection_share']:.1%}",
            va="center",
            fontsize="x-small",
            bbox=_PAPER,
        )
    plain = summary["candidates"][PLAIN]["overall"]["measured_tpt"]
    if plain:
        panel.axvline(1000 / plain, color="black", linewidth=1, linestyle="--")
    panel.set_ylim(len(names) - 0.4, -0.6)
    panel.set_yticks(range(len(names)), [styles.label(name) for name in names])
    panel.set_xlabel("time after the first token, ms per token")
    panel.margins(x=0.12)
    tidy(panel)
    _place_phase_legend(panel, any(summary["candidates"][name]["overall"]["other_share"] is None for name in names))
    return Picture(
        "time",
        "Where the time goes",
        "Milliseconds per token by phase: "
        + "; ".join(_time_text(name, summary["candidates"][name]["overall"]) for name in names)
        + ".",
        "All outputs together. The dashed line is plain decoding. Select is the time that choosing what drafts takes, "
        "learning included.",
        figure,
    )


def _draw_interval(
    panel: "Axes", place: int, figures: Mapping[str, Any], colour: str, marker: Mapping[str, Any]
) -> None:
    panel.plot(figures["speedup_interval"], [place, place], color=colour, linewidth=1.6, solid_capstyle="butt")
    panel.plot([figures["speedup"]], [place], markersize=5.5, **marker)


def _draw_ideal_curves(panel: "Axes", length: float) -> None:
    alpha = np.linspace(0.001, 1, 200)
    for cost, line in _COSTS.items():
        speedup = [float(ideal_speedup(length, each, cost)) for each in alpha]
        label = f"ideal for c = {cost:g}"
        panel.plot(alpha, speedup, color=GREY, linewidth=1.1, linestyle=line, zorder=0, label=label)


def _place_phase_legend(panel: "Axes", with_peers: bool) -> None:
    from matplotlib.patches import Patch

    handles = [Patch(edgecolor="white", linewidth=0, label=phase, **PHASE_STYLES[phase]) for phase, _ in _PHASES]
    if with_peers:
        handles.append(Patch(facecolor="white", edgecolor=GREY, hatch="xx", label="not broken down"))
    panel.legend(
        handles=handles, loc="lower left", bbox_to_anchor=(0, 1), ncols=len(handles), frameon=False, fontsize="small"
    )


def _listed(summary: Mapping[str, Any], names: Sequence[str]) -> str:
    return ", ".join(f"{name} {summary['candidates'][name]['overall']['speedup']:.2f}" for name in names)


def _acceptance_text(name: str, overall: Mapping[str, Any]) -> str:
    ideal = "" if overall["ideal_speedup"] is None else f" of ideal {overall['ideal_speedup']:.2f}"
    speedup = "unknown" if overall["speedup"] is None else f"{overall['speedup']:.2f}"
    return f"{name} {overall['acceptance_rate']:.2f}, {speedup}{ideal}"


def _time_text(name: str, overall: Mapping[str, Any]) -> str:
    text = f"{name} {1000 / overall['measured_tpt']:.1f}"
    if overall["other_share"] is None:
        return text
    return text + " (" + ", ".join(f"{phase} {overall[f'{share}_share']:.0%}" for phase, share in _PHASES) + ")"
