"""The folder of a run."""

import json
from pathlib import Path
from typing import Any

import pytest

from measured_runs import measure, options
from selfspec.errors import InvalidParameterError
from selfspec_lab.bench.run import folder as folder_module
from selfspec_lab.bench.run.folder import RunFolder


def test_a_folder_with_a_run_is_not_touched_unless_asked(run_folder: Path, tmp_path: Path) -> None:
    before = (run_folder / "results.jsonl").read_bytes()
    with pytest.raises(InvalidParameterError, match=r"already holds a run.*--resume.*--overwrite"):
        RunFolder(run_folder)
    with pytest.raises(InvalidParameterError, match="choose one"):
        RunFolder(run_folder, resume=True, overwrite=True)
    assert (run_folder / "results.jsonl").read_bytes() == before


def test_overwrite_replaces_the_run_and_leaves_other_files(tmp_path: Path) -> None:
    out = tmp_path / "out"
    measure(out, options(peers=("none",), repeats=1))
    (out / "notes.txt").write_text("mine")
    (out / "report.md").write_text("old")
    measured = measure(out, options(peers=("none",), repeats=1, methods=("uniform",), settings={}), overwrite=True)
    assert {each.candidate for each in measured} == {"autoregressive", "uniform"}
    assert (out / "notes.txt").read_text() == "mine"
    assert not (out / "report.md").exists()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"max_new_tokens": 13}, "max_new_tokens was 8, is 13"),
        ({"methods": ("uniform",), "settings": {}}, "methods was"),
        ({"temperature": 0.5}, "temperature was 0.0, is 0.5"),
        ({"chat": True}, "chat was None, is True"),
    ],
)
def test_another_run_is_not_resumed(run_folder: Path, changes: dict[str, Any], message: str) -> None:
    stamp = json.loads((run_folder / "run.json").read_text(encoding="utf-8"))["stamp"]
    RunFolder(run_folder, resume=True).check_same(options().to_dict(), stamp)
    with pytest.raises(InvalidParameterError, match=message):
        RunFolder(run_folder, resume=True).check_same(options(**changes).to_dict(), stamp)


def test_a_run_of_another_machine_is_not_resumed(run_folder: Path) -> None:
    stamp = json.loads((run_folder / "run.json").read_text(encoding="utf-8"))["stamp"]
    other = {**stamp, "threads": 99}
    with pytest.raises(InvalidParameterError, match=r"threads was .*, is 99"):
        RunFolder(run_folder, resume=True).check_same(options().to_dict(), other)


@pytest.mark.parametrize("content", ["", "[]", "{", '{"options": {}}'])
def test_a_broken_description_is_refused(tmp_path: Path, content: str) -> None:
    (tmp_path / "run.json").write_text(content)
    with pytest.raises(InvalidParameterError, match=r"run\.json.*use --overwrite"):
        RunFolder(tmp_path, resume=True).describe()


def test_a_broken_line_is_named(tmp_path: Path) -> None:
    out, chosen = tmp_path / "out", options(peers=("none",), repeats=1)
    measure(out, chosen)
    path = out / "results.jsonl"
    path.write_bytes(path.read_bytes().replace(b'"prompt"', b'"promt"', 1))
    with pytest.raises(InvalidParameterError, match=r"results\.jsonl, line 1: not a measurement"):
        measure(out, chosen, resume=True)


def test_a_full_disk_is_noticed_before_anything_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folder_module, "LEAST_FREE_BYTES", 2**70)
    with pytest.raises(InvalidParameterError, match="MiB free for --out"):
        RunFolder(tmp_path / "out")
