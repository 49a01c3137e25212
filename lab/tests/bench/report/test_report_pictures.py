"""Pictures of a run: room for everybody, and everything drawn where it is."""

from collections.abc import Sequence
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.text import Text

from selfspec.model.kept import KeptSet
from selfspec_lab.bench.report.plots import draw_pictures
from selfspec_lab.bench.report.read import read_run
from selfspec_lab.bench.report.styles import Picture
from selfspec_lab.bench.report.summary import summarise
from selfspec_lab.bench.run.measurement import Measurement
from selfspec_lab.plots import ATTENTION, SKIPPED
from written_runs import PICTURES, many, measured, played, three_prompts, write_run


def pictures_of(folder: Path, measurements: Sequence[Measurement], **options: Any) -> dict[str, Picture]:
    run = read_run(write_run(folder, measurements, **options))
    return {picture.name: picture for picture in draw_pictures(run, summarise(run))}


def texts_of(picture: Picture) -> list[tuple[str, Any]]:
    """The text that a picture shows, with where it stands."""
    canvas = FigureCanvasAgg(picture.figure)
    canvas.draw()
    legends = list(picture.figure.legends)
    artists = list(picture.figure.texts)
    for panel in picture.figure.axes:
        if not panel.axison:
            continue
        legends += [panel.get_legend()] if panel.get_legend() else []
        artists += [*panel.texts, *(child for child in panel.get_children() if isinstance(child, Text))]
        for axis in (panel.xaxis, panel.yaxis):
            low, high = sorted(axis.get_view_interval())
            artists += [axis.label, *(tick.label1 for tick in axis.get_major_ticks() if low <= tick.get_loc() <= high)]
    artists += [text for legend in legends for text in legend.get_texts()]
    drawn = {id(artist): artist for artist in artists if artist.get_text().strip() and artist.get_visible()}
    renderer = canvas.get_renderer()
    return [(artist.get_text(), artist.get_window_extent(renderer)) for artist in drawn.values()]


@pytest.mark.parametrize(
    ("candidates", "categories", "kept", "ordered"),
    [
        (3, 1, True, False),
        (3, 13, False, True),
        (9, 3, True, True),
        pytest.param(18, 13, True, True, marks=pytest.mark.slow),
    ],
)
def test_pictures_have_room_for_all_candidates(
    tmp_path: Path, candidates: int, categories: int, kept: bool, ordered: bool
) -> None:
    pictures = pictures_of(tmp_path, many(candidates, categories, kept=kept, prompts=1), ordered=ordered)
    assert list(pictures) == [name for name in PICTURES if kept or name != "kept"]
    for name, picture in pictures.items():
        width, height = picture.figure.get_size_inches() * picture.figure.dpi
        shown = texts_of(picture)
        for text, box in shown:
            assert box.x0 > -1, (name, text)
            assert box.y0 > -1, (name, text)
            assert box.x1 < width + 1, (name, text)
            assert box.y1 < height + 1, (name, text)
        for (one, first), (other, second) in combinations(shown, 2):
            across = min(first.x1, second.x1) - max(first.x0, second.x0)
            along = min(first.y1, second.y1) - max(first.y0, second.y0)
            assert across <= 1 or along <= 1, (name, one, other)


def test_speedups_are_drawn_where_they_are(tmp_path: Path) -> None:
    measurements = three_prompts()
    panel = pictures_of(tmp_path, measurements)["speedup"].figure.axes[0]
    assert [label.get_text() for label in panel.get_yticklabels()] == ["layerskip ≠", "transformers"]
    points = {
        (float(line.get_xdata()[0]), int(line.get_ydata()[0])) for line in panel.lines if len(line.get_xdata()) == 1
    }
    assert sorted(points) == [(pytest.approx(0.25), 1), (pytest.approx(3), 0)]


def test_kept_sublayers_are_drawn_where_they_drafted(tmp_path: Path) -> None:
    records = [played(1, 0), played(1, 0, KeptSet((0, 1, 2), 4)), played(1, 0, None), played(0, 0)]
    measurements = [measured("autoregressive"), measured("layerskip", records=records)]
    panel = pictures_of(tmp_path, measurements)["kept"].figure.axes[0]
    picture = np.asarray(panel.images[0].get_array())
    kept, skipped = (
        np.array([int(colour[place : place + 2], 16) / 255 for place in (1, 3, 5)]) for colour in (ATTENTION, SKIPPED)
    )
    # From below: attention of both layers, then their MLPs. The last two rounds were not drafted by layers.
    np.testing.assert_allclose(picture[:2, 0], [kept, skipped])
    np.testing.assert_allclose(picture[:2, 1], [kept, kept])
    np.testing.assert_allclose(picture[2, 0], skipped)
    np.testing.assert_allclose(picture[:, 2:], 1.0)
    assert "keeps 75% attention, 50% MLP" in panel.get_title(loc="left")


def test_the_ideal_is_drawn_over_the_measured(tmp_path: Path) -> None:
    panel = pictures_of(tmp_path, three_prompts())["acceptance"].figure.axes[0]
    bars = [line for line in panel.lines if line.get_linestyle() == ":" and len(line.get_xdata()) == 2]
    assert [(list(bar.get_xdata()), list(bar.get_ydata())) for bar in bars] == [([1 / 3] * 2, [pytest.approx(3), 2])]


def test_times_add_up(tmp_path: Path) -> None:
    panel = pictures_of(tmp_path, three_prompts())["time"].figure.axes[0]
    ends = {round(bar.get_y() + bar.get_height() / 2): bar.get_x() + bar.get_width() for bar in panel.patches}
    # 16 tokens each: 12 rounds of 0.8 seconds, which here are more than the output took; 20 seconds; 4 seconds a token.
    assert ends == {0: pytest.approx(600), 1: pytest.approx(1250), 2: pytest.approx(4000)}


def test_the_stream_has_its_borders(tmp_path: Path) -> None:
    pictures = pictures_of(tmp_path, many(3, 13), ordered=True)
    assert "1 category_0_of_many, 2 category_1_of_many" in pictures["stream"].caption
    dashed = [line for line in pictures["stream"].figure.axes[0].lines if line.get_linestyle() == "--"]
    assert [line.get_xdata()[0] for line in dashed] == [2.5 + 2 * number for number in range(12)]
    assert "borders" not in pictures_of(tmp_path, many(3, 13))["stream"].caption
