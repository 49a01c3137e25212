"""``benchmarks/load_plot.py``: its formula by hand, files of both kinds, and the committed table and picture."""

import json
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).parents[3]
RESULTS = ROOT / "benchmarks" / "results"


@pytest.fixture
def load_plot(benchmarks: Callable[[str], ModuleType]) -> ModuleType:
    return benchmarks("load_plot")


def test_times_are_on_lines_and_never_above_those_of_more_rows(load_plot: ModuleType) -> None:
    measured = {1: 1.0, 2: 2.0, 4: 1.5, 8: 3.5}
    found = [load_plot.seconds_of(measured, rows) for rows in (1, 2, 3, 4, 6, 8, 12)]
    assert found == [1.0, 1.5, 1.5, 1.5, 2.5, 3.5, 5.5]


def test_the_best_round_by_hand(load_plot: ModuleType) -> None:
    costs = {"16": {1: 1.0, 2: 1.2, 4: 2.0, 8: 3.6}, "4": {1: 0.25, 8: 1.0}}
    one = load_plot.best_round(costs, "low-bit", "4", 0.5, load=1, longest=3)
    assert one == {"load": 1, "draft_tokens": 1, "speedup": pytest.approx(1.5 / 1.45), "extrapolated": False}
    known = load_plot.best_round(costs, "known", "4", 0.5, load=1, longest=3)
    assert (known["draft_tokens"], known["speedup"]) == (1, pytest.approx(1.5 / 1.2))
    assert load_plot.best_round(costs, "0.5", "4", 0.9, load=8, longest=3)["draft_tokens"] == 0
    assert load_plot.best_round(costs, "known", "4", 1.0, load=2, longest=2) == {
        "load": 2,
        "draft_tokens": 2,
        "speedup": pytest.approx(3 * 1.2 / 2.8),
        "extrapolated": False,
    }


def test_rows_of_gguf_files(load_plot: ModuleType) -> None:
    path = RESULTS / "gguf-qwen-q4_k_m.json"
    own, theirs = (load_plot.read_rows(path, name)["16"] for name in ("plain", "llama.cpp"))
    assert sorted(own) == sorted(theirs) == [1, 2, 4, 8, 16]
    assert theirs[8] / theirs[1] > own[8] / own[1]
    with pytest.raises(load_plot.InvalidParameterError, match="has no rows of vllm"):
        load_plot.read_rows(path, "vllm")


def test_measured_points(load_plot: ModuleType, tmp_path: Path) -> None:
    speeds = {"a": {1: [4.0, 6.0, 5.0], 2: [9.0]}, "b": {1: [2.0], 2: [10.0], 4: [1.0]}}
    samples = [
        {"server": server, "clients": clients, "tokens_per_second": speed}
        for server, by_clients in speeds.items()
        for clients, all_speeds in by_clients.items()
        for speed in all_speeds
    ]
    path = tmp_path / "load.json"
    path.write_text(json.dumps({"samples": samples}))
    assert load_plot.measured_points(path, "a", "b") == [{"load": 1, "speedup": 2.5}, {"load": 2, "speedup": 0.9}]
    with pytest.raises(load_plot.InvalidParameterError, match=r"does not have both a and c; it has a, b"):
        load_plot.measured_points(path, "a", "c")


def test_the_table_and_the_picture_of_committed_rows(load_plot: ModuleType, tmp_path: Path) -> None:
    outputs = ["--out", str(tmp_path / "load.json"), "--picture", str(tmp_path / "load.png")]
    rows, measured = RESULTS / "gguf-qwen-q4_k_m.json", RESULTS / "serve-load-smollm2-bf16-cpu.json"
    load_plot.main(["--rows", str(rows), "--measured", str(measured), "--drafts", "known,0.5", *outputs])
    made: Any = json.loads((tmp_path / "load.json").read_text())
    assert made["stamp"]["commit"] == json.loads(rows.read_text())["commit"]
    costs = load_plot.read_rows(rows)
    assert made["table"]["known"]["0.8"][0] == load_plot.best_round(costs, "known", "4", 0.8, load=1, longest=12)
    assert made["table"]["known"]["0.8"][0]["speedup"] > 1.5
    assert [point["load"] for point in made["points"]] == [1, 4, 16]
    assert (tmp_path / "load.png").stat().st_size > 10_000


@pytest.mark.parametrize("committed", sorted(RESULTS.glob("load-*.json")), ids=lambda path: path.stem)
def test_a_committed_table_is_of_the_committed_files(committed: Path, load_plot: ModuleType, tmp_path: Path) -> None:
    known: Any = json.loads(committed.read_text())
    outputs = ["--out", str(tmp_path / "load.json"), "--picture", str(tmp_path / "load.png")]
    load_plot.main(["--rows", str(RESULTS / known["rows"]), "--measured", str(RESULTS / known["measured"]), *outputs])
    assert json.loads((tmp_path / "load.json").read_text()) == known
    assert (ROOT / "docs" / "load.svg").is_file()


def test_missing_bits_are_named(load_plot: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--rows", str(RESULTS / "rows-all-smollm2-bf16-cpu.json"), "--picture", str(tmp_path / "load.png")]
    with pytest.raises(SystemExit):
        load_plot.main(arguments)
    assert "has no rows at 4 bits" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
