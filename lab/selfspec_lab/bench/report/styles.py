"""How the pictures of a report look: any colour vision tells contenders apart, and so does print without colours."""

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
"""Name of the picture of speedups, which stands beside the table of the same."""

WIDTH = 9.0
"""Inches of every picture."""

GREY = "#999999"
_COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000")
"""Of Okabe and Ito, but for their yellow, which white paper swallows."""
_MARKERS = ("o", "s", "^", "D", "v", "P", "X", "<", ">", "p", "h")
_LONGEST_NAME = 30


@dataclass(frozen=True)
class Picture:
    """A picture of a report.

    Attributes:
        name: short, unique in its report.
        title: over the picture.
        alt: what it shows, for those who cannot see it.
        caption: how to read it.
        figure: the picture, without the global state of pyplot.
    """

    name: str
    title: str
    alt: str
    caption: str
    figure: "Figure"


class Styles:
    """Colour, marker and label of every contender, the same in all pictures.

    Colours and markers come round after numbers of contenders without a common divisor, and markers are hollow the
    second time, so that all pairs differ, and the shapes of the first 22 even without their colours.

    Args:
        summary: of the run.
    """

    def __init__(self, summary: Mapping[str, Any]) -> None:
        self._contenders = summary["contenders"]
        self._places = {name: place for place, name in enumerate(self._contenders)}

    def colour(self, name: str) -> str:
        """Of a contender."""
        return _COLOURS[self._places[name] % len(_COLOURS)]

    def marker(self, name: str) -> dict[str, Any]:
        """What ``Axes.plot`` takes for a contender's marker."""
        place, colour = self._places[name], self.colour(name)
        hollow = place // len(_MARKERS) % 2
        face = "white" if hollow else colour
        return {"marker": _MARKERS[place % len(_MARKERS)], "markerfacecolor": face, "markeredgecolor": colour}

    def label(self, name: str) -> str:
        """The name, marked where outputs differ from those of plain decoding."""
        return plain_text(f"{name} {DIFFERS}" if self._contenders[name]["overall"]["differing"] else name)


def shown(summary: Mapping[str, Any], figure: str = "speedup", *, with_plain: bool = False) -> list[str]:
    """The contenders that have a figure, the fastest first."""
    return [
        name
        for name in by_speedup(summary)
        if summary["contenders"][name]["overall"][figure] is not None and (with_plain or name != PLAIN)
    ]


def plain_text(text: str) -> str:
    """Text as matplotlib takes it without reading formulas into it, cut where it is very long."""
    return textwrap.shorten(text, _LONGEST_NAME, placeholder="…").replace("$", r"\$") or "–"


def grid(panels: int, columns: int, panel_height: float, **options: Any) -> tuple["Figure", list["Axes"]]:
    """A figure of panels in rows and columns; those that are left over in the last row are empty.

    Args:
        panels: how many.
        columns: most of them side by side.
        panel_height: inches of each.
        **options: for ``Figure.subplots``.
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
    """An empty figure of a report's width.

    Args:
        height: in inches.
    """
    from matplotlib.figure import Figure

    return Figure(figsize=(WIDTH, height), layout="constrained")


def tidy(panel: "Axes", *, grid_axis: str | None = None) -> None:
    """Takes away what carries nothing, and draws thin lines across where values are to be compared."""
    panel.spines[["top", "right"]].set_visible(False)
    panel.tick_params(labelsize="small")
    if grid_axis is not None:
        panel.grid(axis=grid_axis, color="#dddddd", linewidth=0.6)  # type: ignore[arg-type]
        panel.set_axisbelow(True)
