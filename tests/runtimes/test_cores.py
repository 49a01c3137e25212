"""Fast and slow cores: what Linux says of them, the trial that chooses, where threads run then, and their bits."""

import os
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from helpers.kernels import needs_kernels
from helpers.low_bit_model import random_model
from selfspec.runtimes import cores, kept_file, reading
from selfspec.runtimes.cores import CoreChoice, choose_cores, count_cores, fast_processors, measure_cores, run_on
from selfspec.runtimes.kernels import find
from selfspec.runtimes.products import CompiledProduct, join
from selfspec.runtimes.target import Target
from selfspec.runtimes.threads import THREADS

ALL, FAST = frozenset(range(6)), frozenset({0, 1, 2})


def tree(folder: Path, processors: Mapping[int, Mapping[str, str]], files: Mapping[str, str] | None = None) -> Path:
    """A folder like /sys/devices with files of processors, and others."""
    own = {f"system/cpu/cpu{number}/{name}": text for number, each in processors.items() for name, text in each.items()}
    for name, text in {**own, **(files or {})}.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{text}\n")
    return folder


def intel(folder: Path) -> Path:
    """Two performance cores of two threads each and four efficient cores, of nearly the same frequency."""
    siblings = {
        **{number: f"{number // 2 * 2}-{number // 2 * 2 + 1}" for number in range(4)},
        **{n: str(n) for n in range(4, 8)},
    }
    processors = {
        number: {
            "topology/thread_siblings_list": text,
            "cpu_capacity": "1024",
            "cpufreq/cpuinfo_max_freq": "4900000" if number < 4 else "3800000",
        }
        for number, text in siblings.items()
    }
    return tree(folder, processors, {"cpu_core/cpus": "0-1,2-3", "cpu_atom/cpus": "4-7"})


def test_performance_cores_of_intel_are_the_fast_ones(tmp_path: Path) -> None:
    devices = intel(tmp_path)
    assert fast_processors(range(8), devices) == {0, 1, 2, 3}
    assert count_cores({0, 1, 2, 3}, devices) == 2
    assert fast_processors({1, 3, 4, 6}, devices) == {1, 3}
    assert count_cores({1, 3}, devices) == 2


def test_cores_that_a_process_may_not_use_do_not_count(tmp_path: Path) -> None:
    devices = intel(tmp_path)
    assert fast_processors({0, 1, 2}, devices) == frozenset()
    assert fast_processors({4, 5}, devices) == frozenset()
    assert fast_processors((), devices) == frozenset()


@pytest.mark.parametrize(
    ("name", "speeds", "fast"),
    [
        ("cpu_capacity", [380, 380, 380, 1024, 1024], {3, 4}),
        ("cpu_capacity", [1024, 790, 790, 320, 320], {0, 1, 2}),
        ("cpu_capacity", [1024] * 4, set()),
        ("cpufreq/cpuinfo_max_freq", [5100000, 5100000, 3300000], {0, 1}),
        ("cpufreq/cpuinfo_max_freq", [5700000, 5550000, 5250000], set()),
        ("cpu_capacity", ["many", 1024], set()),
        ("cpufreq/other", [1, 2], set()),
    ],
    ids=["big.LITTLE", "three kinds", "uniform", "Zen 5c", "favoured", "no number", "no file"],
)
def test_cores_are_told_apart_by_capacity_or_frequency(
    name: str, speeds: list[object], fast: set[int], tmp_path: Path
) -> None:
    devices = tree(tmp_path, {number: {name: str(speed)} for number, speed in enumerate(speeds)})
    assert fast_processors(range(len(speeds)), devices) == fast
    assert count_cores(range(len(speeds)), devices) == len(speeds), "nothing is known of threads"


def test_what_cannot_be_read_is_uniform(tmp_path: Path) -> None:
    assert fast_processors(ALL, tmp_path) == frozenset()
    tree(tmp_path, {}, {"cpu_core/cpus": "all of them"})
    assert fast_processors(ALL, tmp_path) == frozenset()


def products(outputs: int = 1024, inputs: int = 512) -> list[CompiledProduct]:
    return [CompiledProduct(join([nn.Linear(inputs, outputs, bias=False, dtype=torch.bfloat16)]))]


@pytest.fixture
def placed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[list[frozenset[int]]]:
    """As if this process had six processors, three of them fast, with where its threads were placed."""
    where: list[frozenset[int]] = []
    monkeypatch.setattr(cores, "run_on", lambda processors: where.append(frozenset(processors)))
    monkeypatch.setattr(cores, "_own_processors", lambda: ALL)
    monkeypatch.setattr(cores, "fast_processors", lambda own: FAST)
    monkeypatch.setattr(cores, "count_cores", lambda processors: len(processors) - 1)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 5)
    monkeypatch.setattr(THREADS, "_most", lambda: 5)
    monkeypatch.setattr(reading, "_SMALLEST", 0)
    monkeypatch.setattr(kept_file, "cache_folder", lambda: tmp_path)
    for name in cores._PLACING:
        monkeypatch.delenv(name, raising=False)
    yield where
    THREADS.limit = None


def simulate(
    monkeypatch: pytest.MonkeyPatch, placed: list[frozenset[int]], every: float, fast: float
) -> Callable[[], float]:
    """A clock that each product moves by what it takes where threads are, and ten times as much while they move."""
    now, before = [0.0], list[frozenset[int]]()

    def measure(kernels: Any, products: Any, rows: int, threads: int, clock: Any) -> float:
        assert threads == {ALL: 5, FAST: 2}[placed[-1]]
        took = {ALL: every, FAST: fast}[placed[-1]] * (1 if before == placed else 10)
        before[:] = placed
        now[0] += took
        return took

    monkeypatch.setattr(cores, "product_seconds", measure)
    return lambda: now[0]


@needs_kernels
def test_the_trial_compares_fast_cores_with_all(placed: list[frozenset[int]], monkeypatch: pytest.MonkeyPatch) -> None:
    clock = simulate(monkeypatch, placed, 0.0012, 0.001)
    assert measure_cores(products(), {ALL: 5, FAST: 2}, clock) == pytest.approx(1.2)
    assert placed[-1] == ALL
    assert clock() < 1
    clock = simulate(monkeypatch, placed, 0.05, 0.05)
    assert measure_cores(products(), {ALL: 5, FAST: 2}, clock) is None, "no time"
    assert placed[-1] == ALL
    assert clock() < 1


@needs_kernels
@pytest.mark.parametrize(("gain", "where", "most"), [(1.3, FAST, 2), (1.02, ALL, 5), (0.6, ALL, 5)])
def test_the_choice_is_kept_and_threads_follow_it(
    gain: float, where: frozenset[int], most: int, placed: list[frozenset[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    trials: list[Mapping[frozenset[int], int]] = []
    monkeypatch.setattr(cores, "measure_cores", lambda sample, threads: trials.append(threads) or gain)
    for _ in range(2):
        placed.clear()
        found = choose_cores(products())
        assert found == CoreChoice(2, gain)
        assert placed == [where]
        assert THREADS.take() == THREADS.most == most
    assert trials == [{ALL: 5, FAST: 2}]
    assert str(found) == f"{'fast' if where == FAST else 'all'} (2 threads on fast ones: {gain:.2f})"


@needs_kernels
@pytest.mark.parametrize("reason", ["alike", "one thread", "placed by the user", "small", "no time"])
def test_without_a_choice_nothing_is_set(
    reason: str, placed: list[frozenset[int]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    if reason == "alike":
        monkeypatch.setattr(cores, "fast_processors", lambda own: frozenset())
    elif reason == "one thread":
        monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    elif reason == "placed by the user":
        monkeypatch.setenv("OMP_PROC_BIND", "close")
    elif reason == "small":
        monkeypatch.setattr(reading, "_SMALLEST", 1 << 40)
    monkeypatch.setattr(cores, "measure_cores", lambda *_: None if reason == "no time" else pytest.fail("tried"))
    assert choose_cores(products()) is None
    assert placed == []
    assert THREADS.most == 5
    assert not list(tmp_path.iterdir())


@needs_kernels
def test_nothing_is_chosen_where_cores_are_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cores, "fast_processors", lambda own: frozenset())
    assert Target(random_model(), "compiled").cores is None


@needs_kernels
@pytest.mark.skipif(sys.platform != "linux", reason="processors of threads are asked of Linux")
def test_threads_of_calls_move_and_the_caller_and_all_bits_stay() -> None:
    own = os.sched_getaffinity(0)
    if len(own) < 2:
        pytest.skip("one processor alone")
    (multiply,), rows = products(), torch.randn(3, 512).bfloat16()
    call, found = find().library.product_bfloat16, []

    def processors_of_threads(processors: set[int]) -> set[frozenset[int]]:
        """Where threads may run after a call of two."""
        run_on(processors)
        out = torch.empty(3, 1024, dtype=torch.bfloat16)
        call(multiply.linear, rows.data_ptr(), out.data_ptr(), 3, 512, 1024, 2)
        found.append(out)
        assert os.sched_getaffinity(0) == own
        return {frozenset(os.sched_getaffinity(int(each.name))) for each in Path("/proc/self/task").iterdir()}

    one, other = ({number} for number in sorted(own)[:2])
    try:
        for chosen in (one, other):
            assert frozenset(chosen) in processors_of_threads(chosen)
    finally:
        assert not {frozenset(one), frozenset(other)} & processors_of_threads(own)
    assert all(torch.equal(each, found[0]) for each in found)
