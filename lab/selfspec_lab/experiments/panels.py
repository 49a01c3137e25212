"""Figures with several panels."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def make_panels(
    columns: int, rows: int = 1, *, width: float = 9.0, height: float = 4.0, **options: Any
) -> "tuple[Figure, list[Axes]]":
    """A figure of empty panels without upper and right spines.

    Args:
        columns: panels per row.
        rows: number of rows.
        width: width of the figure, in inches.
        height: height of the figure, in inches.
        **options: passed to ``Figure.subplots``.

    Returns:
        The figure and its panels, row by row.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    panels: list[Axes] = list(figure.subplots(rows, columns, squeeze=False, **options).flat)
    for panel in panels:
        panel.spines[["top", "right"]].set_visible(False)
    return figure, panels
