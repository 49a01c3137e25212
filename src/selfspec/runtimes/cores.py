"""Which cores the threads of native calls run on where a processor has fast and slow ones, chosen by a trial there.

A step ends with its slowest thread, so that slow cores may cost more than they bring. They are tried once for a
processor and a model, as ways of reading are (``reading.py``), and the choice is kept in the cache folder. The bits of
the results are the same.
"""

import ctypes
import os
import sys
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from selfspec.runtimes.kept_file import KeptFile
from selfspec.runtimes.kernels import find
from selfspec.runtimes.products import CompiledProduct, Product
from selfspec.runtimes.reading import describe_sample, product_seconds, split_sample, take_sample
from selfspec.runtimes.threads import THREADS

_DEVICES = Path("/sys/devices")

_SLOW = 0.7
"""Share of a core's speed below which the slowest is of another kind: 0.65 is Zen 5c's of Zen 5's, Arm's is far less,
while cores of one kind that may run a little faster than others are less apart."""

_PLACING = ("OMP_PROC_BIND", "OMP_PLACES", "GOMP_CPU_AFFINITY", "KMP_AFFINITY")
"""Environment variables by which a user places threads; then nothing is tried."""

_ROWS = (1, 1, 3, 6)
"""Rows of the products of a turn; the first is not counted, because threads move meanwhile."""

_SECONDS = 0.2
"""After which a trial ends."""

_ROUNDS, _FEWEST = 7, 3

_WORTHWHILE = 0.97
"""Times as long as all cores at most, for the fast ones to be chosen."""


@dataclass(frozen=True)
class CoreChoice:
    """What a trial found.

    Attributes:
        threads: that fast cores take.
        gain: time with all cores divided by that with the fast ones alone.
    """

    threads: int
    gain: float

    @property
    def fast_alone(self) -> bool:
        """Whether threads run on fast cores alone."""
        return self.gain * _WORTHWHILE >= 1

    def __str__(self) -> str:
        return f"{'fast' if self.fast_alone else 'all'} ({self.threads} threads on fast ones: {self.gain:.2f})"


def choose_cores(products: Sequence[CompiledProduct]) -> CoreChoice | None:
    """Places the threads of this process where the largest products of a model are fastest: kept, or measured now.

    ``None``, and nothing is set, where all cores that this process may use are alike, where the user has placed
    threads, for models that nearly fit the caches, and where a trial could not end in time.
    """
    own, most = _own_processors(), torch.get_num_threads()
    fast = fast_processors(own)
    sample = take_sample(products) if fast and most > 1 and not any(map(os.environ.get, _PLACING)) else []
    if not sample:
        return None
    threads = min(most, count_cores(fast))
    choice = KeptFile("cores", {**describe_sample(sample), "level": find().level, "all": [*own], "fast": [*fast]})
    gain = (choice.read() or {}).get("gain")
    if not isinstance(gain, float):
        gain = measure_cores(sample, {own: most, fast: threads})
        if gain is None:
            return None
        choice.write({"gain": gain})
    found = CoreChoice(threads, gain)
    run_on(fast if found.fast_alone else own)
    THREADS.limit = threads if found.fast_alone else None
    return found


def measure_cores(
    sample: Sequence[Product], threads: Mapping[frozenset[int], int], clock: Callable[[], float] = time.perf_counter
) -> float | None:
    """The time of products on the first processors divided by that on the second ones, each with its threads.

    They are measured in turns; ``None`` if there was no time for a few of each. Threads run on the first ones then.
    """
    end, parts, (own, _) = clock() + _SECONDS, split_sample(sample), threads
    seconds: dict[tuple[frozenset[int], int], list[float]] = {
        (processors, index): [] for processors in threads for index in range(len(_ROWS))
    }
    try:
        for (processors, index), times in _ROUNDS * list(seconds.items()):
            if clock() > end:
                break
            if index == 0:
                run_on(processors)
            times.append(product_seconds(find(), next(parts), _ROWS[index], threads[processors], clock))
    finally:
        run_on(own)
    if min(map(len, seconds.values())) < _FEWEST:
        return None
    every, fast = (sum(min(seconds[each, index]) for index in range(1, len(_ROWS))) for each in threads)
    return every / fast


def run_on(processors: Collection[int]) -> None:
    """Moves the threads of native calls to processors, each at its next call; those that call stay where they are."""
    find().library.run_on((ctypes.c_int * len(processors))(*processors), len(processors))


def _own_processors() -> frozenset[int]:
    """The processors that this process may use, by number; empty where the system does not say."""
    return frozenset(os.sched_getaffinity(0)) if sys.platform == "linux" else frozenset()


def fast_processors(own: Collection[int], devices: Path = _DEVICES) -> frozenset[int]:
    """Those of some processors that are not of the slowest kind; empty where all are alike or nothing is known."""
    for find_fast in (_of_intel, _of_capacity, _of_frequency):
        try:
            found = find_fast(own, devices) & frozenset(own)
        except (OSError, ValueError):
            continue
        if found and len(found) < len(own):
            return found
    return frozenset()


def count_cores(processors: Collection[int], devices: Path = _DEVICES) -> int:
    """The cores of some processors: the threads of a core count once, where the system says which they are."""
    try:
        return len({_read(devices, number, "topology/thread_siblings_list") for number in processors})
    except OSError:
        return len(processors)


def _of_intel(own: Collection[int], devices: Path) -> frozenset[int]:
    """Performance cores, which have counters of their own."""
    ranges = (each.partition("-") for each in (devices / "cpu_core/cpus").read_text(encoding="ascii").split(","))
    return frozenset(number for first, _, last in ranges for number in range(int(first), int(last or first) + 1))


def _of_capacity(own: Collection[int], devices: Path) -> frozenset[int]:
    """By what Linux goes by when it places threads, 1024 for the fastest."""
    return _faster(own, lambda number: _read(devices, number, "cpu_capacity"))


def _of_frequency(own: Collection[int], devices: Path) -> frozenset[int]:
    return _faster(own, lambda number: _read(devices, number, "cpufreq/cpuinfo_max_freq"))


def _faster(own: Collection[int], speed: Callable[[int], str]) -> frozenset[int]:
    speeds = {number: int(speed(number)) for number in own}
    return frozenset(number for number, each in speeds.items() if _SLOW * each > min(speeds.values()))


def _read(devices: Path, number: int, name: str) -> str:
    return (devices / f"system/cpu/cpu{number}/{name}").read_text(encoding="ascii")
