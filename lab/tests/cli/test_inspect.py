"""``selfspec inspect``: what is merged, counted, printed and drawn."""

import ast
import io
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from matplotlib.colors import to_hex
from rich.console import Console
from typer.testing import Result

from helpers.commands import run
from helpers.counting import Counting
from helpers.models import build, prompt
from helpers.runs import METHODS_OF_ANY_MODEL
from selfspec import METHODS, Engine
from selfspec.model.kept import KeptSet
from selfspec.types import Generation, PhaseSeconds, Round
from selfspec_lab import plots
from selfspec_lab.cli.inspection_text import MOST_LINES, print_inspection
from selfspec_lab.inspection import Inspection, Stretch, condense, draft_kind, merge_equal, shares
from selfspec_lab.plots import ATTENTION, MLP, SKIPPED, draw, save_picture

FIRST = KeptSet((0, 1, 2, 3), 12)
ATTENTION_SKIPPED = KeptSet((0, 1, 3, 5, 7, 9, 10, 11), 12)
MLP_SKIPPED = KeptSet((0, 1, 2, 4, 6, 8, 10, 11), 12)


def played(
    kept: KeptSet | None = FIRST, drafted: int = 3, accepted: int = 1, threshold: float | None = None, **options: Any
) -> Round:
    options = {"candidates": drafted, "seconds": PhaseSeconds(0.001, 0.004, 0.002, 0.003), **options}
    return Round(drafted, accepted=accepted, token_ids=(7,) * (accepted + 1), kept=kept, threshold=threshold, **options)


FOUND, NOTHING, CUT_SHORT = played(None, 4, 2), played(None, 0, 0), played(FIRST, 0, 0)


def inspection(records: Sequence[Round], sublayers: int = 12, **options: Any) -> Inspection:
    tokens = (1, *(token for record in records for token in record.token_ids))
    generation = Generation(
        text="text",
        token_ids=tokens,
        origins=("prefill",) * len(tokens),
        prompt_token_count=5,
        method="swift",
        settings={"skip_ratio": 0.45},
        finish_reason="length",
        seconds=2.0,
        prefill_seconds=0.5,
        rounds=tuple(records),
        peak_memory_bytes=2**20,
    )
    values = {"model": "tiny", "dtype": "float32", "device": "cpu", **options}
    return Inspection(sublayers=sublayers, generation=generation, **values)


# Merging


def test_kinds_of_drafts() -> None:
    records = (played(), FOUND, NOTHING, CUT_SHORT)
    assert [draft_kind(record) for record in records] == ["layers", "tokens", "none", "none"]


def test_rounds_drafted_by_the_same_sublayers_are_one_stretch() -> None:
    records = [
        *(played(), played(drafted=5), played(KeptSet((0, 1, 2, 3), 12))),
        played(MLP_SKIPPED),
        *(FOUND, played(None, 9, 0)),
        *(NOTHING, CUT_SHORT),
        played(),
    ]
    stretches = merge_equal(records)
    assert [(stretch.first, stretch.last, stretch.kind) for stretch in stretches] == [
        (1, 3, "layers"),
        (4, 4, "layers"),
        (5, 6, "tokens"),
        (7, 8, "none"),
        (9, 9, "layers"),
    ]
    assert merge_equal([]) == []


def test_figures_of_a_stretch() -> None:
    rounds = (
        played(FIRST, 4, 3, 0.6),
        played(FIRST, 4, 0, 0.8),
        played(MLP_SKIPPED, 2, 2),
        played(FIRST, 1, 1),
        FOUND,
        CUT_SHORT,
    )
    stretch = Stretch(11, rounds)
    assert (stretch.first, stretch.last, stretch.kind) == (11, 16, "layers")
    # Three of the four rounds that layers drafted kept FIRST, one MLP_SKIPPED.
    assert stretch.kept_shares == (1, 1, 1, 0.75, 0.25, 0, 0.25, 0, 0.25, 0, 0.25, 0.25)
    assert stretch.attention_share == pytest.approx((1 + 1 + 4 * 0.25) / 6)
    assert stretch.mlp_share == pytest.approx((1 + 0.75 + 0.25) / 6)
    assert stretch.drafted == pytest.approx(15 / 6)
    assert stretch.acceptance_rate == pytest.approx(8 / 15)
    assert stretch.mean_generated_length == pytest.approx(14 / 6)
    assert stretch.threshold == pytest.approx(0.7)


def test_figures_where_nothing_was_drafted() -> None:
    stretch = Stretch(1, (NOTHING, CUT_SHORT))
    assert (stretch.kind, stretch.kept_shares, stretch.drafted) == ("none", (), 0)
    assert stretch.attention_share is stretch.mlp_share is stretch.acceptance_rate is stretch.threshold is None


ROUNDS = st.lists(st.sampled_from([played(), played(MLP_SKIPPED), FOUND, NOTHING]), min_size=1, max_size=60)


@given(ROUNDS, st.integers(1, 10))
def test_merged_and_condensed_rounds_are_all_rounds_in_order(records: list[Round], most: int) -> None:
    merged = merge_equal(records)
    condensed = condense(merged, most)
    for stretches in (merged, condensed):
        assert [record for stretch in stretches for record in stretch.rounds] == records
        assert [stretch.first for stretch in stretches] == [1, *(stretch.last + 1 for stretch in stretches[:-1])]
    assert len(condensed) <= max(most, min(len(merged), 2 * most + 1))
    assert condensed == merged or len(merged) > most
    assert {stretch for stretch in merged if len(stretch.rounds) * most >= len(records)} <= set(condensed)


def test_shares_of_time() -> None:
    assert shares(PhaseSeconds(select=1, draft=2, verify=4, other=1)) == {
        "draft": 0.25,
        "verify": 0.5,
        "select": 0.125,
        "other": 0.125,
    }
    assert set(shares(PhaseSeconds()).values()) == {0.0}


# JSON


def test_json_fields() -> None:
    tree = played(MLP_SKIPPED, 3, 2, 0.5, candidates=9)
    described = inspection([tree, FOUND, CUT_SHORT]).to_dict()
    assert described["sublayers"] == 12
    assert (described["model"], described["dtype"], described["device"]) == ("tiny", "float32", "cpu")
    assert (described["round_count"], described["drafted"], described["accepted"]) == (3, 7, 4)
    assert (described["attention_share"], described["mlp_share"]) == (1.0, pytest.approx(2 / 6))
    assert described["prefill_seconds"] == 0.5
    assert described["phase_seconds"] == pytest.approx(
        {"select": 0.003, "draft": 0.012, "verify": 0.006, "other": 0.009}
    )
    assert described["rounds"][0] == {
        "kind": "layers",
        "kept": [0, 1, 2, 4, 6, 8, 10, 11],
        "drafted": 3,
        "candidates": 9,
        "accepted": 2,
        "token_ids": [7, 7, 7],
        "threshold": 0.5,
        "seconds": {"select": 0.001, "draft": 0.004, "verify": 0.002, "other": 0.003},
        "guessed": 0,
        "drafted_by": None,
        "precision": None,
        "forecast": None,
        "probes": 0,
    }
    assert [(record["kind"], record["kept"]) for record in described["rounds"][1:]] == [
        ("tokens", None),
        ("none", None),
    ]
    assert json.loads(json.dumps(described, allow_nan=False)) == described


# Text


def printed(shown: Inspection, width: int = 100, encoding: str = "utf-8", **options: Any) -> str:
    stream = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
    console = Console(file=stream, width=width, highlight=False, color_system=None, **options)
    print_inspection(console, shown)
    stream.flush()
    stream.seek(0)
    return stream.read()


def cells(text: str) -> dict[str, list[str]]:
    """The table of kept sublayers, by its first column."""
    lines = [line.split() for line in text.split("time")[0].splitlines()]
    return {line[0]: line[1:] for line in lines if len(line) > 3 and line[0][0].isdigit()}


MIXED = [
    *(played(threshold=0.6) for _ in range(16)),
    *(played(ATTENTION_SKIPPED, threshold=0.7) for _ in range(4)),
    played(MLP_SKIPPED, 2, 2, threshold=0.9),
    FOUND,
    NOTHING,
]


def test_text_shows_the_kept_sublayers_of_all_rounds() -> None:
    rows = cells(printed(inspection(MIXED)))
    assert rows["1-16"] == ["██····", "3.00", "33%", "2.00", "0.600"]
    assert rows["17-20"] == ["█▄▄▄▄█", "3.00", "33%", "2.00", "0.700"]
    assert rows["21"] == ["█▀▀▀▀█", "2.00", "100%", "3.00", "0.900"]
    assert rows["22"] == ["token", "lookup", "4.00", "50%", "3.00", "-"]
    assert rows["23"] == ["no", "draft", "0.00", "-", "1.00", "-"]


def test_text_says_what_each_part_drafted() -> None:
    copied = played(None, 4, 2, drafted_by="suffix")
    low = played(FIRST, 3, 3, drafted_by="low-bit", guessed=1)
    rows = [line.split() for line in printed(inspection([copied, low, low])).splitlines()]
    assert ["suffix", "1", "5.00", "4.00", "0.00", "50%", "3.00", "0.01", "3.33"] in rows
    assert ["low-bit", "2", "4.00", "3.00", "1.00", "100%", "4.00", "0.02", "2.50"] in rows
    assert not any("guessed" in line.split() for line in printed(inspection(MIXED)).splitlines())


def test_text_has_curves_and_times() -> None:
    lines = {line.split("  ")[0].strip(): line for line in printed(inspection(MIXED)).splitlines()}
    # From 0 (blank) over eight levels to the longest draft, 4.
    assert "▆" * 20 + "▅█ " in lines["drafted"]
    assert lines["drafted"].rstrip().endswith("0 to 4")
    assert "▁" * 16 + "▃▃▃▃█" in lines["threshold"]
    assert lines["threshold"].rstrip().endswith("0.600 to 0.900")
    assert lines["draft ms"].split()[-3:] == ["4.0", "to", "4.0"]
    times = [line.split() for line in printed(inspection(MIXED)).splitlines()]
    assert ["verify", "0.046", "20.0%", "2.00"] in times
    assert ["all", "rounds", "0.230", "100.0%", "10.00"] in times
    assert ["prefill", "0.500"] in times


def test_text_of_drafts_without_layers_has_no_legend_and_no_threshold() -> None:
    text = printed(inspection([FOUND, NOTHING]))
    assert "kept" not in text
    assert "threshold" not in text
    assert "drafted" not in printed(inspection([NOTHING])).split("one column")[1]


@pytest.mark.parametrize("width", [60, 80, 133, 250])
@pytest.mark.parametrize("layers", [2, 16, 80])
def test_text_fits_the_terminal(width: int, layers: int) -> None:
    kept = KeptSet.early_exit(layers // 2, 2 * layers)
    records = [played(kept, threshold=0.5)] * 200 + [NOTHING] + [played(KeptSet.full(2 * layers))] * 99
    text = printed(inspection(records, 2 * layers), width)
    assert max(map(len, text.splitlines())) <= width
    glyphs = cells(text)["1-200"][0]
    each = -(-layers // len(glyphs))
    parts = [range(layers)[first : first + each] for first in range(0, layers, each)]
    assert glyphs == "".join(
        "█" if 2 * sum(layer < layers // 2 for layer in part) >= len(part) else "·" for part in parts
    )
    assert len(glyphs) == layers or (
        f"one column is {-(-layers // len(glyphs))} layers" in text and width < layers + 50
    )
    assert "…" not in text
    assert cells(text)["202-300"][1:4] == ["3.00", "33%", "2.00"]


def test_text_of_many_changes_is_condensed() -> None:
    changing = [played((FIRST, MLP_SKIPPED)[index % 2]) for index in range(400)]
    rows = cells(printed(inspection([*changing, *[FOUND] * 100])))
    assert len(rows) <= 2 * MOST_LINES + 1
    assert "401-500" in rows
    # Half of the rounds kept either set: what at least half of them kept is drawn.
    assert rows["1-21"][0] in ("██▀▀▀█", "██····")


def test_text_in_ascii() -> None:
    text = printed(inspection(MIXED), encoding="ascii")
    assert text.isascii()
    rows = cells(text)
    assert (rows["1-16"][0], rows["17-20"][0], rows["21"][0]) == ("##....", "#MMMM#", "#AAAA#")


def test_colours_add_nothing_but_colours() -> None:
    def coloured(**options: Any) -> str:
        console = Console(file=io.StringIO(), width=100, highlight=False, **options)
        print_inspection(console, inspection(MIXED))
        return console.file.getvalue()  # type: ignore[attr-defined,no-any-return]

    assert "\x1b" not in coloured(color_system=None)
    text = coloured(force_terminal=True, color_system="256")
    assert "\x1b[38;5;214;48;5;33m▀" in text
    assert "█" not in text.split("one column")[0]


def test_an_output_of_one_token_has_no_rounds(tmp_path: Path) -> None:
    empty = inspection([])
    assert "no rounds" in printed(empty)
    assert empty.to_dict()["rounds"] == []
    save_picture(empty, tmp_path / "empty.png")


def test_accelerators_queue_their_work() -> None:
    note = "A phase ends when its work is queued"
    assert note in printed(inspection(MIXED, device="cuda:0"))
    assert note not in printed(inspection(MIXED))


# Pictures


def test_the_picture_shows_every_round() -> None:
    figure = draw(inspection(MIXED))
    attention, mlp, drafts, threshold, times = figure.axes
    for panel, offset, colour in ((attention, 0, ATTENTION), (mlp, 1, MLP)):
        picture = np.asarray(panel.images[0].get_array())
        for layer in range(6):
            for index, record in enumerate(MIXED):
                kept = record.kept is not None and 2 * layer + offset in record.kept.sublayers
                assert to_hex(picture[layer, index]) == (colour if kept else SKIPPED), (layer, index)
        hatched = [patch for patch in panel.patches if patch.get_hatch()]
        assert [(patch.get_x(), patch.get_width(), patch.get_label()) for patch in hatched] == [
            (21.5, 1, "token lookup"),
            (22.5, 1, "no draft"),
        ]
    assert list(drafts.patches[0].get_data().values) == [record.drafted for record in MIXED]
    assert list(drafts.patches[1].get_data().values) == [record.accepted for record in MIXED]
    values = threshold.patches[0].get_data().values
    assert list(values[:21]) == [record.threshold for record in MIXED[:21]]
    assert np.isnan(values[21:]).all()
    tops = [patch.get_data().values for patch in times.patches]
    assert tops[-1] == pytest.approx([10.0] * len(MIXED))
    assert tops[0] == pytest.approx([4.0] * len(MIXED))


@pytest.mark.parametrize(("candidates", "drawn"), [(11, True), (13, False)])
def test_a_tree_shows_all_candidates(candidates: int, drawn: bool) -> None:
    shown = inspection([played(candidates=candidates), NOTHING])
    panel = draw(shown).axes[2]
    labels = [text.get_text() for text in panel.get_legend().get_texts()]
    assert labels == ["drafted", "accepted (33%)", f"{candidates / 2:.0f} candidates per round"]
    assert np.isnan(panel.patches[2].get_data().values).any() != drawn
    assert ["candidates", "█", "0", "to", str(candidates)] in [line.split() for line in printed(shown).splitlines()]
    assert "candidates" not in printed(inspection(MIXED))


@pytest.mark.parametrize(("suffix", "start"), [(".png", b"\x89PNG"), (".PDF", b"%PDF"), (".svg", b"<?xml")])
def test_formats(suffix: str, start: bytes, tmp_path: Path) -> None:
    path = tmp_path / f"picture{suffix}"
    save_picture(inspection(MIXED), path)
    assert path.read_bytes().startswith(start)


# The command


def inspect(model: str, *arguments: str, **options: Any) -> Result:
    return run("inspect", "--model", model, "--max-new-tokens", "24", *arguments, **options)


LAYERSKIP = ("--method", "layerskip-dv", "--set", "exit_layer=3", "--set", "threshold=0.2")


def test_json_is_what_the_engine_did(checkpoint: str) -> None:
    result = inspect(checkpoint, "def double", *LAYERSKIP, "--json")
    assert (result.exit_code, result.stderr) == (0, "")
    shown = json.loads(result.stdout)
    engine = Engine.from_pretrained(checkpoint, "layerskip-dv", settings={"exit_layer": 3, "threshold": 0.2})
    wanted = engine.generate("def double", max_new_tokens=24)
    assert wanted.accepted > 0
    assert shown["token_ids"] == list(wanted.token_ids)
    assert shown["sublayers"] == 12
    for record, played_round in zip(shown["rounds"], wanted.rounds, strict=True):
        assert record["kept"] == ([0, 1, 2, 3, 4, 5] if played_round.drafted else None)
        for name in ("drafted", "candidates", "accepted", "threshold"):
            assert record[name] == getattr(played_round, name)
        assert all(seconds >= 0 for seconds in record["seconds"].values())
    assert sum(shown["phase_seconds"].values()) <= shown["seconds"] - shown["prefill_seconds"]


def test_text_and_picture(checkpoint: str, tmp_path: Path) -> None:
    file = tmp_path / "prompt.txt"
    file.write_text("def double")
    result = inspect(checkpoint, "--prompt-file", str(file), *LAYERSKIP, "--out", str(tmp_path / "rounds.png"))
    assert (result.exit_code, result.stderr) == (0, "")
    assert result.stdout.startswith("layerskip-dv: 24 tokens, ")
    assert "███···" in result.stdout
    assert "\x1b" not in result.stdout
    assert result.stdout.endswith(f"picture: {tmp_path / 'rounds.png'}\n")
    assert (tmp_path / "rounds.png").stat().st_size > 10_000


@pytest.mark.parametrize("method", [*METHODS_OF_ANY_MODEL, "adaptive-cosine", "jacobi", "lookahead"])
def test_every_method_can_be_shown(method: str) -> None:
    generation = Engine(build("llama"), method=method).generate(prompt(17), max_new_tokens=12)
    shown = Inspection("llama", "float32", "cpu", 12, generation)
    assert "all rounds" in printed(shown)
    assert json.dumps(shown.to_dict(), allow_nan=False)
    assert len(draw(shown).axes) in (4, 5)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--out", "picture.jpg"), "a picture is saved as .png, .pdf, .svg, but this is 'picture.jpg'"),
        (("--out", "picture"), "but this is 'picture'"),
        (("--out", "nowhere/picture.png"), "there is no folder 'nowhere' for the picture"),
        (("--state", "nowhere"), "there is no state file 'nowhere'"),
        (("--method", "uniform", "--state", "s"), "uniform learns nothing"),
        (("--method", "unifrm"), "did you mean 'uniform'?"),
        (("--set", "skip"), "--set takes KEY=VALUE"),
        (("--prompt-file", "y"), "not both"),
    ],
)
def test_mistakes_are_told_before_the_model_is_loaded(
    arguments: tuple[str, ...], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(METHODS, "counting", Counting)
    for form in ((), ("--json",)):
        result = inspect("./no-such-model", "x", "--method", "counting", *arguments, *form)
        assert (result.exit_code, result.stdout) == (2, "")
        assert result.stderr.startswith("error: ")
        assert message in result.stderr
        assert result.stderr.count("\n") == 1


def test_without_matplotlib(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    result = inspect("./no-such-model", "x", "--method", "uniform", "--out", str(tmp_path / "a.png"))
    assert result.exit_code == 2
    assert result.stderr == "error: a picture needs matplotlib; run: pip install matplotlib\n"


def test_a_picture_that_cannot_be_written(checkpoint: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("matplotlib.figure.Figure.savefig", fail)
    result = inspect(checkpoint, "x", *LAYERSKIP, "--out", str(tmp_path / "a.png"))
    assert result.exit_code == 2
    assert "a.png': No space left on device\n" in result.stderr
    assert result.stdout.startswith("layerskip-dv: 24 tokens")


def test_a_state_is_only_read(checkpoint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(METHODS, "counting", Counting)
    engine = Engine.from_pretrained(checkpoint, "counting")
    engine.generate("x", max_new_tokens=4)
    engine.save_state(tmp_path / "state")
    before = (tmp_path / "state").read_bytes()
    restored: list[Any] = []
    monkeypatch.setattr(Counting, "restore", lambda _, state: restored.append(state.values))
    result = inspect(checkpoint, "x", "--method", "counting", "--state", str(tmp_path / "state"))
    assert result.exit_code == 0, result.stderr
    assert restored == [{"requests": 1}]
    assert (tmp_path / "state").read_bytes() == before


def test_matplotlib_is_imported_only_for_pictures_and_pyplot_never() -> None:
    """Of the laboratory's other modules ``test_report_pages.py`` checks it."""
    tree = ast.parse(Path(plots.__file__).read_text(encoding="utf-8"))
    at_once = [ast.unparse(node) for node in tree.body if isinstance(node, (ast.Import, ast.ImportFrom))]
    everywhere = [ast.unparse(node) for node in ast.walk(tree) if isinstance(node, (ast.Import, ast.ImportFrom))]
    assert not [text for text in at_once if "matplotlib" in text]
    assert not [text for text in everywhere if "pyplot" in text]
