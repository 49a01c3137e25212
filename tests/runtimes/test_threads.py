"""The number of threads of native calls, on a simulated machine; the bits of calls with any number of threads."""

import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from helpers.clock import HandClock
from helpers.kernels import needs_kernels
from helpers.low_bit_model import random_model
from selfspec import Engine
from selfspec.runtimes import kernels, native
from selfspec.runtimes.precision import Precision
from selfspec.runtimes.target import Target
from selfspec.runtimes.threads import ThreadCount, release_threads


class Machine:
    """Cores, some of them busy with other processes: calls that fit the idle cores are fast, others wait for them."""

    def __init__(self, cores: int) -> None:
        self.cores, self.most, self.busy, self.clock, self.work = cores, cores, 0, HandClock(), 0.01
        self.threads = ThreadCount(lambda: self.most, self.clock)
        self.taken: list[int] = []

    def seconds(self, threads: int, rows: int) -> float:
        work = self.work * (1 + 0.1 * rows) * self.cores
        waits = 3.0 if threads > self.cores - self.busy else 1.0
        return work / threads * waits

    def calls(self, seconds: float, forwards: int = 1) -> None:
        """Calls of one to four rows, one after the other, for some time, each of some forwards."""
        end, call = self.clock.now + seconds, 0
        while self.clock.now < end:
            call += 1
            count, rows = self.threads.take(), 1 + call % 4
            took = forwards * self.seconds(count, rows) * (1.0 + 0.02 * (call % 3))
            self.clock.now += took
            self.taken.append(count)
            self.threads.measured(rows, count, took, forwards)


def test_a_quiet_machine_keeps_all_threads() -> None:
    machine = Machine(2)
    machine.calls(60)
    assert machine.threads.settled == 2
    assert machine.taken.count(1) < 0.03 * len(machine.taken)


def test_beside_a_busy_process_and_back() -> None:
    machine = Machine(2)
    machine.calls(5)
    machine.busy = 1
    machine.calls(2)
    assert machine.threads.settled == 1
    before = len(machine.taken)
    machine.calls(30)
    assert machine.threads.settled == 1
    assert machine.taken[before:].count(2) < 0.05 * (len(machine.taken) - before)
    machine.busy = 0
    machine.calls(20)
    assert machine.threads.settled == 2


def test_the_first_try_beside_a_busy_process_finds_that_fewer_are_faster() -> None:
    machine = Machine(2)
    machine.calls(5)
    machine.busy, before = 1, len(machine.taken)
    machine.calls(0.5)
    assert machine.threads.settled == 1
    assert machine.taken[before:].count(2) <= 3


def test_one_slow_run_of_forwards_and_one_with_fewer_threads_are_enough() -> None:
    machine = Machine(2)
    machine.calls(4, forwards=12)
    machine.busy, before = 1, len(machine.taken)
    machine.calls(5, forwards=12)
    assert machine.taken[before : before + 3] == [2, 1, 1]
    assert machine.threads.settled == 1


@pytest.mark.parametrize("work", [0.01, 0.1], ids=["a small model", "a large one"])
def test_a_single_slow_call_begins_no_try(work: float) -> None:
    machine = Machine(2)
    machine.work = work
    machine.calls(5)
    before = len(machine.taken)
    for busy in [1, 0, 0, 1, 0, 0]:
        machine.busy = busy
        machine.calls(0.001)  # a single one
    assert machine.taken[before:] == [2] * 6


def test_a_machine_that_is_busy_from_the_start() -> None:
    machine = Machine(2)
    machine.busy = 1
    machine.calls(2)
    assert machine.threads.settled == 1


@pytest.mark.parametrize("busy", [1, 4, 6])
def test_many_cores(busy: int) -> None:
    machine = Machine(8)
    machine.busy = busy
    machine.calls(60)
    rates = {count: 1 / machine.seconds(count, 1) for count in (8, 7, 4, 2)}
    assert 1 / machine.seconds(machine.threads.settled, 1) >= 0.7 * max(rates.values())


def test_the_user_sets_the_most() -> None:
    machine = Machine(4)
    machine.calls(1)
    machine.most = 2
    assert machine.threads.take() == 2
    machine.most = 1
    machine.calls(1)
    assert set(machine.taken[-20:]) == {1}
    machine.most = 4
    assert machine.threads.take() == 4


def test_calls_of_unknown_kinds_end_a_try() -> None:
    machine = Machine(2)
    for call in range(10000):
        count = machine.threads.take()
        machine.clock.now += 0.01
        machine.taken.append(count)
        machine.threads.measured(call if call > 100 else 0, count, 0.01)
    assert machine.threads.settled == 2
    assert machine.taken[-1000:].count(2) > 900


def test_it_costs_a_few_microseconds() -> None:
    threads = ThreadCount(lambda: 2)
    start = time.perf_counter()
    for _ in range(2000):
        threads.measured(1, threads.take(), 0.01)
    assert (time.perf_counter() - start) / 2000 < 1e-4


@needs_kernels
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_bits_do_not_depend_on_the_number_of_threads(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    target = Target(random_model(dtype), "compiled")
    for precision in (None, Precision.of(4)):
        found = []
        for count in (1, 2, 3, 5):
            monkeypatch.setattr(native.THREADS, "take", lambda count=count: count)
            view, state, logits = target.at(precision), target.new_sequence(40, 40, 40), []
            for rows in (1, 3, 8, 19):
                tokens = torch.arange(rows) + 3
                with torch.inference_mode():
                    forward = target.lay_out(state, rows)
                    states = view.run(target.embed(tokens), range(target.sublayer_count), forward).hidden_states
                    logits.append(view.logits(states))
                state.cache.commit(range(rows))
            found.append(torch.cat(logits))
        assert all(torch.equal(each, found[0]) for each in found)


@needs_kernels
def test_texts_do_not_depend_on_the_number_of_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    texts = []
    for counts in ([1], [2], [2, 1, 3]):
        calls = iter(range(10**9))
        monkeypatch.setattr(
            native.THREADS, "take", lambda counts=counts, calls=calls: counts[next(calls) % len(counts)]
        )
        engine = Engine(random_model(torch.bfloat16), method="low-bit", runtime="compiled")
        texts.append(engine.generate(torch.arange(1, 20), max_new_tokens=24).token_ids)
    assert texts[0] == texts[1] == texts[2]


@needs_kernels
@pytest.mark.skipif(sys.platform != "linux", reason="threads are counted in /proc")
def test_a_thread_that_has_computed_keeps_no_threads_from_those_that_decode() -> None:
    def compute() -> None:
        torch.set_num_threads(3)
        assert int((torch.arange(4 * 10**6) + 1)[-1]) == 4 * 10**6

    def count(expected: int) -> int:
        """The threads of this process; waits a moment for those that end."""
        until = time.monotonic() + 1
        while (found := len(list(Path("/proc/self/task").iterdir()))) > expected and time.monotonic() < until:
            time.sleep(0.01)
        return found

    kernels.load()
    threads = torch.get_num_threads()
    try:
        with ThreadPoolExecutor(1) as pool:  # its thread stays
            pool.submit(compute).result()
            both = count(0)
            pool.submit(release_threads).result()
            assert count(both - 2) == both - 2
            pool.submit(compute).result()
            assert count(both) == both
    finally:
        torch.set_num_threads(threads)
