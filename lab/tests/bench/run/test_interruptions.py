"""Failures, interruptions and resumed runs."""

import errno
import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from measured_runs import METHODS_TRIED, Watcher, lines, measure, options
from selfspec import METHODS
from selfspec.errors import InvalidParameterError, UnsupportedModelError
from selfspec_lab.bench.report.markdown import to_markdown
from selfspec_lab.bench.report.read import read_run
from selfspec_lab.bench.report.summary import summarise
from selfspec_lab.bench.run import folder as folder_module
from selfspec_lab.bench.run.options import RunOptions
from selfspec_lab.bench.run.peers import TRANSFORMERS_PEERS


def test_a_crash_of_a_method_is_a_line_and_the_others_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begin: Any = METHODS["uniform"].begin

    def broken(method: Any, prefill: Any) -> Any:
        if len(prefill.prompt_ids) < 25:
            raise ValueError("broken")
        return begin(method, prefill)

    monkeypatch.setattr(METHODS["uniform"], "begin", broken)
    chosen = options(peers=("none",), repeats=1, settings={"layerskip": {"exit_layer": 60}})
    measured = measure(tmp_path / "out", chosen)
    assert [(each.prompt, each.candidate) for each in measured if each.error] == [("a-1", "uniform")]
    assert next(each.error for each in measured if each.error) == "ValueError: broken"
    assert {each.candidate for each in measured} == {"autoregressive", "uniform", "swift"}
    failures = json.loads((tmp_path / "out" / "run.json").read_text(encoding="utf-8"))["failures"]
    assert "exit layer 60 is out of range" in failures["layerskip"]


@pytest.fixture(scope="module")
def interrupted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run that was interrupted after 17 measurements; tests copy it."""
    folder = tmp_path_factory.mktemp("interrupted") / "out"
    with pytest.raises(KeyboardInterrupt):
        measure(folder, watcher=Watcher(interrupt_after=17))
    return folder


@pytest.mark.parametrize("cut", [False, True])
def test_an_interrupted_run_goes_on_where_it_was(
    run_folder: Path, interrupted: Path, tmp_path: Path, cut: bool
) -> None:
    out = shutil.copytree(interrupted, tmp_path / "out")
    kept = (out / "results.jsonl").read_bytes()
    assert len(kept.splitlines()) == 17
    if cut:
        with (out / "results.jsonl").open("ab") as file:
            file.write(b'{"prompt": "b-1/1", "categ')
    watcher = Watcher()
    measured = measure(out, watcher=watcher, resume=True)
    assert (out / "results.jsonl").read_bytes().startswith(kept)
    assert (watcher.total, watcher.done, len(watcher.seen)) == (42, 17, 25)
    assert [each.key for each in measured] == [each.key for each in lines(run_folder)]
    again = {each.key: each for each in measured}
    for each in lines(run_folder):  # what a method had learned before the interruption, it has learned again
        assert again[each.key].token_ids == each.token_ids
        assert [(r.kept, r.drafted, r.accepted) for r in again[each.key].rounds or ()] == [
            (r.kept, r.drafted, r.accepted) for r in each.rounds or ()
        ]


def test_a_finished_run_has_nothing_left_to_do(tmp_path: Path) -> None:
    chosen = options(peers=("none",), repeats=1)
    first = measure(tmp_path / "out", chosen)
    watcher = Watcher()
    assert measure(tmp_path / "out", chosen, watcher, resume=True) == first
    assert watcher.seen == []


def test_no_space_ends_the_run_and_keeps_whole_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out, write = tmp_path / "out", folder_module.write_line
    written: list[str] = []

    def full(file: Any, line: str) -> None:
        if len(written) == 5:
            file.write(line[:40])
            file.flush()
            raise OSError(errno.ENOSPC, "No space left on device")
        written.append(line)
        write(file, line)

    monkeypatch.setattr(folder_module, "write_line", full)
    with pytest.raises(InvalidParameterError, match=r"No space left on device; the measurements .* --resume"):
        measure(out, options(peers=("none",), repeats=1))
    monkeypatch.undo()
    assert len(measure(out, options(peers=("none",), repeats=1), resume=True)) == 12


def test_a_peer_that_cannot_be_made_is_reported_and_the_others_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any) -> Any:
        raise UnsupportedModelError("no words for it")

    monkeypatch.setattr("selfspec_lab.bench.run.peers.WeightsFile", refuse)
    monkeypatch.setattr("selfspec_lab.bench.run.options.obstacle", lambda *_: None)
    monkeypatch.setattr(RunOptions, "packages", ("torch",))
    measured = measure(tmp_path / "out", options(peers=("transformers", "llama-cpp"), repeats=1))
    assert {each.candidate for each in measured} == {"autoregressive", *METHODS_TRIED, "transformers"}
    described = json.loads((tmp_path / "out" / "run.json").read_text(encoding="utf-8"))
    assert described["failures"] == {"llama-cpp": "UnsupportedModelError: no words for it"}
    assert described["llama_cpp"] is None
    report = to_markdown(summarise(read_run(tmp_path / "out")))
    assert "llama-cpp could not be set up: UnsupportedModelError: no words for it" in report


def test_all_peers_are_those_that_are_there_and_the_run_says_what_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("selfspec_lab.bench.run.options.obstacle", lambda *_: "llama-cpp-python is not installed")
    chosen = options(peers=("all",))
    assert chosen.peer_names == list(TRANSFORMERS_PEERS)
    assert chosen.left_out == "llama-cpp, llama-cpp-prompt-lookup left out: llama-cpp-python is not installed"
    assert options(peers=("all",), temperature=1.0).peer_names == list(TRANSFORMERS_PEERS)
    assert options(peers=("transformers",)).left_out is None
    with pytest.raises(InvalidParameterError, match="llama-cpp cannot be measured: llama-cpp-python is not installed"):
        options(peers=("llama-cpp",))
