"""The pictures of a report that show rounds: kept sublayers, drafted and accepted tokens. Needs matplotlib."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from selfspec.types import Round
from selfspec_lab.bench.report.read import Run
from selfspec_lab.bench.report.styles import Picture, Styles, grid, shown, tidy
from selfspec_lab.bench.run.measurement import Measurement
from selfspec_lab.inspection import draft_kind
from selfspec_lab.plots import ACCEPTED, ATTENTION, DRAFTED, MLP, SKIPPED

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_MOST_COLUMNS = 240
_LONGEST_DRAFT = 32


def draw_kept(run: Run, summary: Mapping[str, Any]) -> Picture | None:
    """Draws the kept sublayers over the rounds of the first repeat, one panel per method that drafts with layers."""
    streams = {name: _stream(run, name) for name in shown(summary, "acceptance_rate")}
    names = [name for name, outputs in streams.items() if any(map(_kept_by_layers, _records(outputs)))]
    if not names:
        return None
    styles = Styles(summary)
    figure, axes = grid(len(names), 1 if len(names) < 3 else 2, 1.25)
    for panel, name in zip(axes, names, strict=True):
        records = _records(streams[name])
        shares = _kept_shares(records, run.sublayers)
        panel.imshow(
            _coloured(shares),
            origin="lower",
            aspect="auto",
            extent=(0.5, len(records) + 0.5, 0, 2),
            interpolation="nearest",
        )
        panel.axhline(1, color="white", linewidth=2)
        panel.set_yticks([0.5, 1.5], ["attention", "MLP"])
        attention, mlp = (_percent(shares[kind]) for kind in (slice(None, None, 2), slice(1, None, 2)))
        title = f"{styles.label(name)}: keeps {attention} attention, {mlp} MLP"
        panel.set_title(title, fontsize="small", loc="left")
        if run.fields["ordered"]:
            _draw_borders(panel, [len(output.rounds or ()) for output in streams[name]], streams[name])
        tidy(panel)
        panel.tick_params(axis="y", length=0, labelsize="x-small")
    figure.supxlabel("round", fontsize="medium")
    layers = run.sublayers // 2
    return Picture(
        "kept",
        "Kept sublayers over time",
        "Heat maps over the rounds of the sublayers that drafted: " + ", ".join(names) + ".",
        f"The first repeat, its prompts one after another. In each half the layers from 0 (below) to {layers - 1} "
        "(above). Coloured: kept; light grey: skipped; in between: several rounds drawn as one; white: no layers "
        "drafted." + (" Dashed: borders of the categories." if run.fields["ordered"] else ""),
        figure,
    )


def draw_draft_lengths(run: Run, summary: Mapping[str, Any]) -> Picture | None:
    """Draws histograms of drafted and accepted tokens per round, one panel per candidate that drafts."""
    names = shown(summary, "acceptance_rate")
    if not names:
        return None
    styles = Styles(summary)
    figure, axes = grid(len(names), 4, 1.35)
    for panel, name in zip(axes, names, strict=True):
        records = [record for each in run.measurements if each.candidate == name for record in each.rounds or ()]
        longest = min(_LONGEST_DRAFT, max(record.drafted for record in records))
        drafted, accepted = (
            _shares_of_lengths([getattr(record, kind) for record in records], longest)
            for kind in ("drafted", "accepted")
        )
        lengths = np.arange(longest + 1)
        panel.bar(lengths, drafted, 0.9, color=DRAFTED, edgecolor="#777777", linewidth=0.5, label="drafted")
        panel.bar(
            lengths, accepted, 0.45, facecolor=ACCEPTED, edgecolor="white", linewidth=0, hatch="////", label="accepted"
        )
        panel.set_title(styles.label(name), fontsize="small", loc="left")
        panel.xaxis.get_major_locator().set_params(integer=True)  # type: ignore[call-arg]
        tidy(panel)
    figure.supxlabel("tokens a round" + (f" ({_LONGEST_DRAFT}: or more)" if _is_cut(run) else ""), fontsize="medium")
    figure.supylabel("% of rounds", fontsize="medium")
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside upper right", ncols=2, frameon=False)
    return Picture(
        "lengths",
        "Draft lengths",
        "Histograms of the tokens that rounds drafted and accepted. Drafted on average: "
        + ", ".join(f"{name} {summary['candidates'][name]['overall']['mean_draft_length']:.1f}" for name in names)
        + ".",
        "Wide bars: draft tokens per round, for a tree of its longest path; narrow, hatched bars: how many of them "
        "were accepted.",
        figure,
    )


def _stream(run: Run, name: str) -> list[Measurement]:
    """Outputs of a candidate's first repeat, in the order of the prompts."""
    outputs = [each for each in run.measurements if each.candidate == name and each.repeat == 0 and each.error is None]
    return sorted(outputs, key=lambda each: each.position)


def _records(outputs: Sequence[Measurement]) -> list[Round]:
    return [record for output in outputs for record in output.rounds or ()]


def _kept_by_layers(record: Round) -> bool:
    return draft_kind(record) == "layers"


def _kept_shares(records: Sequence[Round], sublayers: int) -> np.ndarray:
    """Share of the rounds with a layer draft that kept a sublayer, by sublayer (rows) and group of rounds (columns)."""
    columns = min(len(records), _MOST_COLUMNS)
    kept, rounds = np.zeros((sublayers, columns)), np.zeros(columns)
    for number, record in enumerate(records):
        if _kept_by_layers(record) and record.kept is not None:
            column = number * columns // len(records)
            kept[list(record.kept.sublayers), column] += 1
            rounds[column] += 1
    return np.divide(kept, rounds, out=np.full_like(kept, np.nan), where=rounds > 0)


def _coloured(shares: np.ndarray) -> np.ndarray:
    """Colours of attention (below) and MLP (above), from skipped to kept; white where no layers drafted."""
    from matplotlib.colors import to_rgb

    halves = []
    for kind, colour in ((0, ATTENTION), (1, MLP)):
        share = shares[kind::2, :, None]
        blend = (1 - share) * np.array(to_rgb(SKIPPED)) + share * np.array(to_rgb(colour))
        halves.append(np.where(np.isnan(share), 1.0, blend))
    return np.concatenate(halves)


def _percent(shares: np.ndarray) -> str:
    return f"{np.nanmean(shares):.0%}"


def _draw_borders(panel: "Axes", lengths: Sequence[int], outputs: Sequence[Measurement]) -> None:
    ends = np.cumsum(lengths)
    for end, before, after in zip(ends, outputs, outputs[1:], strict=False):
        if before.category != after.category:
            panel.axvline(end + 0.5, color="black", linewidth=0.8, linestyle="--")


def _shares_of_lengths(lengths: Sequence[int], longest: int) -> np.ndarray:
    counts = Counter(min(length, longest) for length in lengths)
    return np.array([100 * counts[length] / len(lengths) for length in range(longest + 1)])


def _is_cut(run: Run) -> bool:
    return any(record.drafted > _LONGEST_DRAFT for each in run.measurements for record in each.rounds or ())
