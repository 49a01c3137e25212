"""The stamp of a result."""

import json
import subprocess
from pathlib import Path

import torch

from selfspec_lab.bench.stamp import git_state, make_stamp

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
