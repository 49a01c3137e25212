"""Figures of several panels, as the pictures of the experiments are."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def make_panels(
    columns: int, rows: int = 1, *, width: float = 9.0, height: float = 4.0, **options: Any
) -> "tuple[Figure, list[Axes]]":
    """A figure of empty panels, open at the top and on the right.

    Args:
        columns: panels beside each other.
        rows: panels above each other.
        width: of the figure, in inches.
        height: of the figure, in inches.
        **options: more of what ``Figure.subplots`` takes.

    Returns:
        The figure and its panels, row by row.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    panels: list[Axes] = list(figure.subplots(rows, columns, squeeze=False, **options).flat)
    for panel in panels:
        panel.spines[["top", "right"]].set_visible(False)
    return figure, panels
