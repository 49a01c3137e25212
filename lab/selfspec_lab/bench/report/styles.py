"""Styles of a report's pictures; candidates differ with any colour vision and in grey print."""

import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from selfspec_lab.bench.options import PLAIN
from selfspec_lab.bench.report.tables import DIFFERS, by_speedup

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

SPEEDUP = "speedup"
"""Name of the picture of speedups, which is placed after the main table."""

WIDTH = 9.0
"""Width of every picture, in inches."""

GREY = "#999999"
_COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000")
"""The palette of Okabe and Ito without yellow, which is hard to see on white."""
_MARKERS = ("o", "s", "^", "D", "v", "P", "X", "<", ">", "p", "h")
_LONGEST_NAME = 30


@dataclass(frozen=True)
class Picture:
    """A picture of a report.

    Attributes:
        name: short name, unique in its report.
        title: title above the picture.
        alt: alternative text.
        caption: explanation below the picture.
        figure: the matplotlib figure, made without pyplot.
    """

    name: str
    title: str
    alt: str
    caption: str
    figure: "Figure"


class Styles:
    """Colour, marker and label of every candidate, the same in all pictures.

    The numbers of colours and of markers have no common divisor, so all pairs differ. The second cycle of markers is
    hollow, so the first 22 differ in shape alone.

    Args:
        summary: the run's summary.
    """

    def __init__(self, summary: Mapping[str, Any]) -> None:
        self._candidates = summary["candidates"]
        self._places = {name: place for place, name in enumerate(self._candidates)}

    def colour(self, name: str) -> str:
        """Colour of a candidate."""
        return _COLOURS[self._places[name] % len(_COLOURS)]

    def marker(self, name: str) -> dict[str, Any]:
        """Keyword arguments of ``Axes.plot`` for a candidate's marker."""
        place, colour = self._places[name], self.colour(name)
        hollow = place // len(_MARKERS) % 2
        face = "white" if hollow else colour
        return {"marker": _MARKERS[place % len(_MARKERS)], "markerfacecolor": face, "markeredgecolor": colour}

    def label(self, name: str) -> str:
        """Name of a candidate, marked if outputs differ from plain decoding."""
        return plain_text(f"{name} {DIFFERS}" if self._candidates[name]["overall"]["differing"] else name)


def shown(summary: Mapping[str, Any], figure: str = "speedup", *, with_plain: bool = False) -> list[str]:
    """Candidates that have a figure, fastest first."""
    return [
        name
        for name in by_speedup(summary)
        if summary["candidates"][name]["overall"][figure] is not None and (with_plain or name != PLAIN)
    ]


def plain_text(text: str) -> str:
    """Escapes text for matplotlib, which would read ``$`` as a formula, and shortens it."""
    return textwrap.shorten(text, _LONGEST_NAME, placeholder="…").replace("$", r"\$") or "–"


def grid(panels: int, columns: int, panel_height: float, **options: Any) -> tuple["Figure", list["Axes"]]:
    """A figure with a grid of panels; unused places in the last row are empty.

    Args:
        panels: number of panels.
        columns: most panels in a row.
        panel_height: height of a panel, in inches.
        **options: passed to ``Figure.subplots``.
    """
    columns = min(columns, panels)
    rows = -(-panels // columns)
    figure = make_figure(rows * panel_height + 0.5)
    axes: Sequence[Axes] = figure.subplots(rows, columns, squeeze=False, **options).flat
    for left_over in axes[panels:]:
        left_over.set_axis_off()
    for lowest in axes[max(0, panels - columns) : panels]:
        lowest.tick_params(labelbottom=True)
    return figure, list(axes[:panels])


def make_figure(height: float) -> "Figure":
    """An empty figure of ``WIDTH``.

    Args:
        height: height in inches.
    """
    from matplotlib.figure import Figure

    return Figure(figsize=(WIDTH, height), layout="constrained")


def tidy(panel: "Axes", *, grid_axis: str | None = None) -> None:
    """Removes the upper and right spines and draws a thin grid along an axis."""
    panel.spines[["top", "right"]].set_visible(False)
    panel.tick_params(labelsize="small")
    if grid_axis is not None:
        panel.grid(axis=grid_axis, color="#dddddd", linewidth=0.6)  # type: ignore[arg-type]
        panel.set_axisbelow(True)
