"""The stamp of a result."""

import argparse
import json
import subprocess
from pathlib import Path

import pytest
import torch

from helpers.commands import run
from selfspec_lab.bench import stamp as stamp_module
from selfspec_lab.bench.stamp import commit_text, git_state, make_stamp, parse_and_check, shown_command

CPU = torch.device("cpu")


def test_stamp() -> None:
    stamp = make_stamp(CPU)
    assert stamp["threads"] == torch.get_num_threads()
    assert stamp["versions"]["torch"] == torch.__version__
    assert stamp["hardware"]["device"] == "cpu"
    assert stamp["date"].endswith("+00:00")
    json.dumps(stamp, allow_nan=False)


def test_commit_is_that_of_the_package_and_changes_make_it_dirty(tmp_path: Path) -> None:
    def git(*arguments: str) -> str:
        identity = ("-c", "user.name=x", "-c", "user.email=x@example.com", "-c", "commit.gpgsign=false")
        command = ["git", "-C", str(tmp_path), *identity, *arguments]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()

    file = tmp_path / "package.py"
    file.write_text("")
    assert git_state(file) == (None, None)
    git("init", "--quiet")
    assert git_state(file) == (None, None)  # in another checkout
    git("add", "package.py")
    git("commit", "--quiet", "--no-verify", "--message", "first")
    assert git_state(file) == (git("rev-parse", "HEAD"), False)
    (tmp_path / "new.py").write_text("")
    assert git_state(file) == (git("rev-parse", "HEAD"), True)
    (tmp_path / "new.py").unlink()
    (tmp_path / "benchmarks" / "results").mkdir(parents=True)
    (tmp_path / "benchmarks" / "results" / "run.json").write_text("{}")
    assert git_state(file) == (git("rev-parse", "HEAD"), False), "a result is no change of what is measured"


@pytest.fixture
def _changed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stamp_module, "git_state", lambda _: ("a" * 40, True))


@pytest.mark.usefixtures("_changed")
@pytest.mark.parametrize(
    "command",
    [
        ("bench", "run", "--out", "results"),
        ("bench", "overhead", "--out", "result.json"),
        ("bench", "batches", "--out", "result.json"),
        ("experiments", "run", "all", "--out", "results"),
    ],
)
def test_no_command_writes_a_result_of_uncommitted_changes(
    command: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    result = run(*command, "--model", "./no-such-model")
    assert result.exit_code == 2
    assert "uncommitted changes" in result.stderr
    assert "--dirty" in result.stderr
    assert not list(tmp_path.iterdir())
    insisting = run(*command, "--model", "./no-such-model", "--dirty")
    assert "uncommitted changes" not in insisting.stderr
    assert "no-such-model" in insisting.stderr


@pytest.mark.usefixtures("_changed")
def test_scripts_refuse_too_unless_they_only_print(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse_and_check(argparse.ArgumentParser(), [])
    assert "insist with --dirty" in capsys.readouterr().err
    assert parse_and_check(argparse.ArgumentParser(), ["--dirty"]).dirty
    assert not parse_and_check(argparse.ArgumentParser(), [], lambda _: False).dirty


def test_every_script_that_stamps_results_checks_the_checkout() -> None:
    folder = Path(__file__).parents[3] / "benchmarks"
    scripts = [path for path in folder.rglob("*.py") if "make_stamp(" in path.read_text(encoding="utf-8")]
    assert len(scripts) > 6
    assert all("parse_and_check(" in path.read_text(encoding="utf-8") for path in scripts)


def test_pages_name_the_commit_and_uncommitted_changes() -> None:
    stamp = {"commit": "0123456789abcdef", "dirty": True}
    assert commit_text(stamp) == "0123456789ab, with uncommitted changes"
    assert commit_text({**stamp, "dirty": False}, 9) == "012345678"
    assert commit_text({"commit": None, "dirty": None}) == "none (not a checkout)"


def test_the_command_names_no_folder_of_the_machine() -> None:
    arguments = ["/a/bin/selfspec", "bench", "run", "--suite", "spec-bench:/b/c/q.jsonl", "--model", "OWNER/NAME"]
    assert shown_command(arguments) == "selfspec bench run --suite spec-bench:q.jsonl --model OWNER/NAME"
    assert shown_command(["benchmarks/rows.py", "--out=/tmp/x.json"]) == "benchmarks/rows.py --out=x.json"
    assert shown_command(["/a/selfspec/__main__.py", "bench", "overhead"]) == "selfspec bench overhead"
