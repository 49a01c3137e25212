"""Limits of control groups, of both versions: processors' time, and memory without the pages of files."""

from collections.abc import Mapping
from pathlib import Path

import pytest
import torch

from selfspec import memory
from selfspec.control_group import memory_left, processor_limit
from selfspec.runtimes import threads


def write(folder: Path, files: Mapping[str, str]) -> Path:
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder


SECOND = {"own": "0::/user.slice/one.service\n"}
FIRST = {"own": "3:cpuset:/\n2:memory:/docker/1\n1:cpu,cpuacct:/docker/1\n0::/\n"}


@pytest.mark.parametrize(
    ("files", "limit"),
    [
        ({**SECOND, "user.slice/one.service/cpu.max": "150000 100000\n"}, 1.5),
        ({**SECOND, "user.slice/cpu.max": "200000 100000\n", "user.slice/one.service/cpu.max": "max 100000\n"}, 2.0),
        ({**SECOND, "cpu.max": "50000 100000\n", "user.slice/cpu.max": "200000 100000\n"}, 0.5),
        ({"own": "0::/../other\n", "cpu.max": "300000 100000\n"}, 3.0),
        ({**SECOND, "user.slice/one.service/cpu.max": "max 100000\n"}, None),
        ({**SECOND, "user.slice/one.service/cpu.max": "many\n"}, None),
        ({**SECOND, "user.slice/one.service/cpu.max": "100000 0\n"}, None),
        ({**FIRST, "cpu/docker/1/cpu.cfs_quota_us": "400000\n", "cpu/docker/1/cpu.cfs_period_us": "100000\n"}, 4.0),
        ({**FIRST, "cpu/cpu.cfs_quota_us": "250000\n", "cpu/cpu.cfs_period_us": "100000\n"}, 2.5),
        ({**FIRST, "cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"}, None),
        ({"own": "nothing\n"}, None),
        ({}, None),
    ],
)
def test_processors(files: Mapping[str, str], limit: float | None, tmp_path: Path) -> None:
    write(tmp_path, files)
    assert processor_limit(tmp_path, tmp_path / "own") == limit


@pytest.mark.parametrize(
    ("limit", "used", "files", "left"),
    [
        ("8000", "7000", "inactive_file 4000\nactive_file 2000", 7000),
        ("8000", "9000", "file 1", 0),
        ("max", "7000", "file 1", None),
    ],
)
def test_memory_without_the_pages_of_files(limit: str, used: str, files: str, left: int | None, tmp_path: Path) -> None:
    """A file that is mapped counts as used, and is given back where memory is needed."""
    group = {"memory.max": f"{limit}\n", "memory.current": f"{used}\n", "memory.stat": f"anon 900\n{files}\n"}
    write(tmp_path, {**SECOND, **{f"user.slice/{name}": text for name, text in group.items()}})
    assert memory_left(tmp_path, tmp_path / "own") == left
    assert memory_left(tmp_path, tmp_path / "none") is None


def test_memory_of_the_first_version(tmp_path: Path) -> None:
    group = {"limit_in_bytes": "5000\n", "usage_in_bytes": "3000\n", "stat": "cache 9\ntotal_inactive_file 500\n"}
    write(tmp_path, {**FIRST, **{f"memory/docker/1/memory.{name}": text for name, text in group.items()}})
    assert memory_left(tmp_path, tmp_path / "own") == 2500


@pytest.mark.parametrize(("left", "expected"), [(1000, 1000), (10**18, None), (None, None)])
def test_the_least_of_machine_and_group(
    left: int | None, expected: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    of_machine = memory.available_bytes()
    monkeypatch.setattr(memory, "memory_left", lambda: left)
    found = memory.available_bytes()
    if of_machine is not None and found is not None:
        assert found == expected if expected is not None else found > 1000


@pytest.mark.parametrize(
    ("limit", "chosen", "expected"),
    [(1.5, "", 2), (0.2, "", 1), (64.0, "", 3), (None, "", 3), (1.0, "3", 3)],
)
def test_threads_keep_to_the_limit_once(
    limit: float | None, chosen: str, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = torch.get_num_threads()
    monkeypatch.setattr(threads, "processor_limit", lambda: limit)
    monkeypatch.setenv("OMP_NUM_THREADS", chosen)
    threads.keep_to_limit.cache_clear()
    try:
        torch.set_num_threads(3)
        assert threads.keep_to_limit() == (expected if expected < 3 else None)
        assert torch.get_num_threads() == expected
        torch.set_num_threads(4)  # by the user, later
        threads.keep_to_limit()
        assert torch.get_num_threads() == 4
    finally:
        torch.set_num_threads(before)
        threads.keep_to_limit.cache_clear()
