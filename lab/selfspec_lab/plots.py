"""Pictures of an inspection."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from selfspec.errors import InvalidParameterError, MissingPackageError
from selfspec.types import Round
from selfspec_lab.inspection import PHASES, Inspection, Stretch, merge_equal, shares

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

SUFFIXES = (".png", ".pdf", ".svg")

ATTENTION, MLP, SKIPPED = "#e69f00", "#0072b2", "#ebebeb"
DRAFTED, ACCEPTED = "#cccccc", "#009e73"
PHASE_STYLES: dict[str, dict[str, Any]] = {
    "draft": {"facecolor": "#56b4e9"},
    "verify": {"facecolor": "#444444"},
    "select": {"facecolor": "#d55e00", "hatch": "////"},
    "other": {"facecolor": "#cccccc"},
}
"""Colours of Okabe and Ito, distinguishable with any colour vision and, by their brightness, in greyscale."""

WITHOUT_LAYERS: dict[str, dict[str, Any]] = {
    "tokens": {"facecolor": "white", "edgecolor": "#cc79a7", "hatch": "////", "linewidth": 0, "label": "token lookup"},
    "none": {"facecolor": "white", "edgecolor": "#bbbbbb", "hatch": "..", "linewidth": 0, "label": "no draft"},
}

_ROOM_FOR_CANDIDATES = 4


def check_picture(path: Path) -> None:
    """Refuses a picture that cannot be saved. Called before the model is loaded."""
    if path.suffix.lower() not in SUFFIXES:
        raise InvalidParameterError(f"a picture is saved as {', '.join(SUFFIXES)}, but this is '{path.name}'")
    if not path.parent.is_dir():
        raise InvalidParameterError(f"there is no folder '{path.parent}' for the picture; make it first")
    if path.is_dir():
        raise InvalidParameterError(f"'{path}' is a folder; name a file for the picture")
    check_drawing()


def check_drawing() -> None:
    """Checks that matplotlib is installed."""
    try:
        import matplotlib.figure  # noqa: F401 - only tests whether it is installed
    except ImportError as error:
        raise MissingPackageError("a picture needs matplotlib; run: pip install matplotlib") from error


def save_picture(inspection: Inspection, path: Path) -> None:
    """Draws an inspection and saves it in the format of the suffix; an existing file is replaced."""
    check_picture(path)
    try:
        draw(inspection).savefig(path, dpi=150)
    except OSError as error:
        raise InvalidParameterError(f"the picture cannot be written to '{path}': {error.strerror or error}") from error


def draw(inspection: Inspection) -> "Figure":
    """Draws kept sublayers, drafts, threshold and time over the rounds, in panels from top to bottom."""
    from matplotlib.figure import Figure

    records = inspection.generation.rounds
    if not records:
        figure = Figure(figsize=(9.0, 1.2))
        figure.text(0.01, 0.2, "no rounds: the output ended with its first token")
        figure.suptitle(_title(inspection), x=0.01, ha="left", fontsize="medium")
        return figure
    with_threshold = any(record.threshold is not None for record in records)
    layers = inspection.sublayers // 2
    by_layers = any(stretch.kind == "layers" for stretch in merge_equal(records))
    heights = [min(3.2, max(1.3, 0.1 * layers)) if by_layers else 0.6] * 2 + [1.5] + [1.0] * with_threshold + [1.8]
    figure = Figure(figsize=(9.0, sum(heights) + 1.2), layout="constrained")
    figure.suptitle(_title(inspection), x=0.01, ha="left", fontsize="medium")
    panels: list[Axes] = list(figure.subplots(len(heights), sharex=True, height_ratios=heights))
    _draw_kept(panels[0], inspection, "attention", ATTENTION)
    _draw_kept(panels[1], inspection, "MLP", MLP)
    _draw_drafts(panels[2], records)
    if with_threshold:
        _draw_threshold(panels[3], records)
    _draw_time(panels[-1], inspection)
    panels[-1].set_xlabel("round")
    panels[-1].set_xlim(0.5, len(records) + 0.5)
    _use_whole_numbers(panels[-1].xaxis)
    for panel in panels:
        panel.spines[["top", "right"]].set_visible(False)
    return figure


def _title(inspection: Inspection) -> str:
    result = inspection.generation
    return (
        f"{result.method} on {inspection.model} ({inspection.dtype}, {inspection.device})\n"
        f"{result.new_token_count} tokens, {result.round_count} rounds, {result.accepted} of {result.drafted} draft "
        f"tokens accepted ({result.acceptance_rate:.0%}), mean generated length {result.mean_generated_length:.2f}"
    )


def _draw_kept(panel: "Axes", inspection: Inspection, kind: str, colour: str) -> None:
    """Draws one kind of sublayer: one row per layer, one column per round, hatched where no layers drafted."""
    import numpy as np
    from matplotlib.colors import to_rgb
    from matplotlib.patches import Patch

    records, layers = inspection.generation.rounds, inspection.sublayers // 2
    right = len(records) + 0.5
    picture = np.full((layers, len(records), 3), to_rgb(SKIPPED))
    legend: dict[str, Patch] = {}
    for stretch in merge_equal(records):
        if stretch.kind == "layers":
            kept = np.array(stretch.kept_shares[0 if kind == "attention" else 1 :: 2]) > 0
            picture[kept, stretch.first - 1 : stretch.last] = to_rgb(colour)
        else:
            span = panel.axvspan(stretch.first - 0.5, stretch.last + 0.5, zorder=3, **WITHOUT_LAYERS[stretch.kind])
            legend[stretch.kind] = span
    panel.imshow(picture, origin="lower", aspect="auto", extent=(0.5, right, -0.5, layers - 0.5))
    panel.hlines([layer - 0.5 for layer in range(1, layers)], 0.5, right, "white", linewidth=0.6)
    panel.set_ylabel(f"{kind}\nof layer")
    _use_whole_numbers(panel.yaxis)
    share = _kept_share(records, kind)
    if share is not None:
        legend = {"kept": Patch(color=colour, label=f"kept ({share:.0%})"), "skipped": _skipped(), **legend}
    _place_legend(panel, list(legend.values()))


def _kept_share(records: Sequence[Round], kind: str) -> float | None:
    whole = Stretch(1, tuple(records))
    return whole.attention_share if kind == "attention" else whole.mlp_share


def _skipped() -> Any:
    from matplotlib.patches import Patch

    return Patch(color=SKIPPED, label="skipped")


def _draw_drafts(panel: "Axes", records: Sequence[Round]) -> None:
    drafted, accepted = (sum(getattr(record, name) for record in records) for name in ("drafted", "accepted"))
    rate = f" ({accepted / drafted:.0%})" if drafted else ""
    _draw_steps(panel, [record.drafted for record in records], facecolor=DRAFTED, label="drafted")
    _draw_steps(panel, [record.accepted for record in records], facecolor=ACCEPTED, label=f"accepted{rate}")
    candidates = [record.candidates for record in records]
    if sum(candidates) > drafted:
        # The candidates of a wide tree would compress the rest of the panel.
        shown = max(candidates) <= _ROOM_FOR_CANDIDATES * max(record.drafted for record in records)
        label = f"{sum(candidates) / len(records):.0f} candidates per round"
        values = candidates if shown else [float("nan")] * len(records)
        _draw_steps(panel, values, fill=False, color="black", linestyle=":" if shown else "", label=label)
    panel.set_ylabel("draft\ntokens")
    panel.set_ylim(0, max(1.0, panel.get_ylim()[1]))
    _use_whole_numbers(panel.yaxis)
    _place_legend(panel)


def _draw_threshold(panel: "Axes", records: Sequence[Round]) -> None:
    thresholds = [float("nan") if record.threshold is None else record.threshold for record in records]
    panel.stairs(thresholds, _edges(records), baseline=None, color="black", linewidth=1.2)
    low, high = panel.get_ylim()
    panel.set_ylim(min(low, high - 0.05), high + 0.005)
    panel.set_ylabel("confidence\nthreshold")


def _draw_time(panel: "Axes", inspection: Inspection) -> None:
    records = inspection.generation.rounds
    below = [0.0] * len(records)
    by_phase = shares(inspection.seconds)
    for phase in PHASES:
        spent = [1000 * float(getattr(record.seconds, phase)) for record in records]
        top = [lower + more for lower, more in zip(below, spent, strict=True)]
        label = f"{phase} ({by_phase[phase]:.0%}, {sum(spent) / 1000:.2f} s)"
        _draw_steps(panel, top, baseline=below, label=label, **PHASE_STYLES[phase])
        below = top
    panel.set_ylabel("time\nms per round")
    panel.set_ylim(bottom=0)
    _place_legend(panel, panel.patches[::-1])


def _draw_steps(panel: "Axes", values: Sequence[float], *, fill: bool = True, **style: Any) -> None:
    if fill:
        style = {"edgecolor": "white", "linewidth": 0, **style}
    panel.stairs(values, _edges(values), fill=fill, **style)


def _edges(rounds: Sequence[Any]) -> list[float]:
    """Edges of the rounds on the x axis: round 1 spans 0.5 to 1.5, and so on."""
    return [index + 0.5 for index in range(len(rounds) + 1)]


def _use_whole_numbers(axis: Any) -> None:
    axis.get_major_locator().set_params(integer=True, steps=[1, 2, 5, 10])


def _place_legend(panel: "Axes", handles: Sequence[Any] | None = None) -> None:
    panel.legend(handles=handles, loc="upper left", bbox_to_anchor=(1.005, 1.05), frameon=False, fontsize="small")
