"""The picture of a report that shows speed prompt by prompt over a stream. Needs matplotlib."""

from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import TYPE_CHECKING, Any

import numpy as np

from selfspec_lab.bench.options import PLAIN
from selfspec_lab.bench.report.medians import samples_of, speedups_by_prompt
from selfspec_lab.bench.report.read import Run
from selfspec_lab.bench.report.styles import Picture, Styles, grid, plain_text, shown, tidy

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_FEW_PROMPTS = 40
_MOST_NUMBERED = 30
_ROOM_FOR_NAMES = 36


def draw_stream(run: Run, summary: Mapping[str, Any]) -> Picture | None:
    """Draws speed over plain decoding by prompt, one panel per candidate."""
    names = shown(summary)
    prompts = [prompt["key"] for prompt in run.fields["prompts"]]
    lines = {name: _speeds_in_order(run, name, prompts) for name in names}
    if not names:
        return None
    figure, axes = grid(len(names), 3, 1.3, sharex=True, sharey=True)
    styles, places = Styles(summary), np.arange(1, len(prompts) + 1)
    everyone = np.array([_smooth(line) for line in lines.values()])
    stretches = _category_stretches(run)
    for panel, name in zip(axes, names, strict=True):
        panel.fill_between(
            places, np.fmin.reduce(everyone), np.fmax.reduce(everyone), color="#e4e4e4", linewidth=0, zorder=1
        )
        _draw_own_line(panel, places, lines[name], styles, name)
        panel.axhline(1, color="black", linewidth=0.8, zorder=2)
        panel.set_title(styles.label(name), fontsize="small", loc="left", pad=3)
        panel.set_xlim(0.5, len(prompts) + 0.5)
        _draw_category_borders(panel, stretches)
        panel.xaxis.get_major_locator().set_params(integer=True)  # type: ignore[call-arg]
        tidy(panel)
    axes[0].set_ylim(0, 1.15 * axes[0].get_ylim()[1])
    figure.supxlabel("prompt, in the order of the stream" if stretches else "prompt", fontsize="medium")
    figure.supylabel("speedup", fontsize="medium")
    return Picture(
        "stream",
        "Speed over the stream",
        f"Speed over plain decoding for each of {len(prompts)} prompts in their order: {', '.join(names)}.",
        "Tokens per second ÷ those of plain decoding, median over the repeats. The line at 1 is plain decoding; "
        "grey is the range of all candidates shown."
        + (" Dots are prompts, lines running medians." if len(prompts) > _FEW_PROMPTS else "")
        + _explain_borders(stretches),
        figure,
    )


def _speeds_in_order(run: Run, name: str, prompts: Sequence[str]) -> np.ndarray:
    samples, plain = (samples_of(run.measurements, each) for each in (name, PLAIN))
    speedups = speedups_by_prompt(samples, plain)
    return np.array([speedups.get(prompt, np.nan) for prompt in prompts])


def _smooth(values: np.ndarray) -> np.ndarray:
    """A running median over a few prompts if there are many; unchanged if there are few."""
    half = len(values) // (2 * _FEW_PROMPTS)
    if half == 0:
        return values
    windows = [values[max(0, place - half) : place + half + 1] for place in range(len(values))]
    return np.array([np.nanmedian(window) if not np.isnan(window).all() else np.nan for window in windows])


def _draw_own_line(panel: "Axes", places: np.ndarray, values: np.ndarray, styles: Styles, name: str) -> None:
    colour, few = styles.colour(name), len(values) <= _FEW_PROMPTS
    marker: dict[str, Any] = {**styles.marker(name), "markersize": 3.5} if few else {}
    panel.plot(places, _smooth(values), color=colour, linewidth=1.4, zorder=3, **marker)
    if not few:
        panel.plot(places, values, ".", color=colour, markersize=2, alpha=0.5, zorder=2, rasterized=True)


def _category_stretches(run: Run) -> list[tuple[str, int]]:
    """Consecutive prompts of one category in a stream, as category and number; empty without an order."""
    if not run.fields["ordered"]:
        return []
    return [
        (category, len(list(group))) for category, group in groupby(each["category"] for each in run.fields["prompts"])
    ]


def _draw_category_borders(panel: "Axes", stretches: Sequence[tuple[str, int]]) -> None:
    start = 0.5
    for number, (category, length) in enumerate(stretches, start=1):
        if number > 1:
            panel.axvline(start, color="#777777", linewidth=0.8, linestyle="--", zorder=2)
        if len(stretches) <= _MOST_NUMBERED:
            text = plain_text(category) if _room_for_names(stretches) else str(number)
            panel.text(
                start + length / 2,
                0.98,
                text,
                transform=panel.get_xaxis_transform(),
                ha="center",
                va="top",
                fontsize="xx-small",
            )
        start += length


def _explain_borders(stretches: Sequence[tuple[str, int]]) -> str:
    if not stretches:
        return ""
    if _room_for_names(stretches) or len(stretches) > _MOST_NUMBERED:
        return " Dashed: borders of the categories."
    listed = ", ".join(f"{number} {category}" for number, (category, _) in enumerate(stretches, start=1))
    return f" Dashed: borders of the categories: {listed}."


def _room_for_names(stretches: Sequence[tuple[str, int]]) -> bool:
    return len(stretches) * max(len(category) for category, _ in stretches) <= _ROOM_FOR_NAMES
