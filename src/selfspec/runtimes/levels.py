"""The level of instructions that a process runs, chosen by a trial with the weights of its first model.

A higher level is not the faster one on every processor: some take several cycles for its wider vectors and for products
of bfloat16. Levels round differently, so a process has one. It is tried once for a processor and a model, within those
whose kernels need not be built, and kept in the cache folder; ``SELFSPEC_KERNELS`` names one without a trial.
"""

import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from threading import Lock
from typing import TypeAlias

import torch
from torch import nn

from selfspec.runtimes.kept_file import KeptFile
from selfspec.runtimes.kernel_build import LEVEL_VARIABLE, KernelBuildError
from selfspec.runtimes.kernels import DTYPES, Kernels, find, find_all, use
from selfspec.runtimes.packed import LowBitLinear
from selfspec.runtimes.products import Product, can_join, join
from selfspec.runtimes.reading import (
    WAYS,
    default_ways,
    describe_sample,
    product_seconds,
    set_ways,
    split_sample,
    take_sample,
)

_SHARES = {1: 64, 3: 32, 6: 32, 32: 8}
"""How many products of as many rows a request has: forwards of an answer, and parts of a prompt of 256 tokens."""

_SECONDS = 0.3
"""After which a trial ends."""

_ROUNDS, _FEWEST = 7, 2
_MOST = 4
"""Levels that are tried."""

_WORTHWHILE = 0.9
"""Times as long as the highest level at most, for another one to be chosen."""

_PROMPT = 32
"""Rows from which on the way of reading weights does not matter."""


@dataclass(frozen=True)
class LevelChoice:
    """A level, and the speed of each that was tried, the highest level's being 1."""

    level: str
    speeds: Mapping[str, float]

    def __str__(self) -> str:
        return ", ".join(f"{name} ({speed:.2f})" for name, speed in self.speeds.items())


_lock, _settled = Lock(), list[LevelChoice | None]()
"""What was chosen for this process, once it was."""


Kinds: TypeAlias = tuple[type[nn.Module], ...]

LINEAR: Kinds = (nn.Linear, LowBitLinear)
"""The layers that kernels multiply. In a model that transformers' modules run they are those of few bits alone."""


def settle_level(model: nn.Module, kinds: Kinds = LINEAR) -> LevelChoice | None:
    """Chooses the level of this process by its first model that has layers of these kinds.

    Later models get what was chosen then. ``None``, and the level is the highest or that of ``SELFSPEC_KERNELS``, where
    it was not tried: by its name, with a model that nearly fits the caches, kernels of one level, or no time.
    """
    with _lock:
        if not _settled:
            products = find_products(model, kinds)
            if not products:
                return None
            found = _choose(take_sample(products))
            if found is not None:
                use(found.level)
            _settled.append(found)
        return _settled[0]


def _choose(sample: Sequence[Product]) -> LevelChoice | None:
    if not sample or os.environ.get(LEVEL_VARIABLE):
        return None
    try:
        find()  # builds the highest one if there is none
    except KernelBuildError:
        return None
    candidates = find_all()[:_MOST]
    if len(candidates) < 2:
        return None
    names = [each.level for each in candidates]
    choice = KeptFile("levels", {**describe_sample(sample), "levels": names})
    speeds = (choice.read() or {}).get("speeds")
    if not isinstance(speeds, dict) or [*speeds] != names or {*map(type, speeds.values())} != {float}:
        speeds = measure_levels(sample, candidates, torch.get_num_threads())
        if speeds is None:
            return None
        choice.write({"speeds": speeds})
    best = max(names, key=lambda name: speeds[name])
    return LevelChoice(best if speeds[best] * _WORTHWHILE >= 1 else names[0], speeds)


def find_products(model: nn.Module, kinds: Kinds = LINEAR) -> list[Product]:
    """The products of a model that have kernels, each of one layer, whose weights stay where they are."""
    linears = [module for module in model.modules() if isinstance(module, kinds)]
    products = [join([linear]) for linear in linears if can_join([linear])]
    return [product for product in products if product.dtype in DTYPES]


def measure_levels(
    sample: Sequence[Product],
    candidates: Sequence[Kernels],
    threads: int,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, float] | None:
    """The speeds of levels beside that of the first, measured in turns; ``None`` if there was no time for it."""
    end, dtype, parts = clock() + _SECONDS, sample[0].dtype, split_sample(sample)
    seconds: dict[tuple[int, int, int], list[float]] = {
        (index, rows, way): []
        for rows in _SHARES
        for way in (WAYS[:1] if rows >= _PROMPT or all(product.bits for product in sample) else WAYS)
        for index in range(len(candidates))
    }
    try:
        for (index, rows, way), times in _ROUNDS * list(seconds.items()):
            if clock() > end:
                break
            set_ways(dtype, [way] * 3, candidates[index])
            times.append(product_seconds(candidates[index], next(parts), rows, threads, clock))
    finally:
        for each in candidates:
            set_ways(dtype, default_ways(dtype, each), each)
    if min(map(len, seconds.values())) < _FEWEST:
        return None
    totals = [
        sum(
            share * min(min(times) for key, times in seconds.items() if key[:2] == (index, rows))
            for rows, share in _SHARES.items()
        )
        for index in range(len(candidates))
    ]
    return {each.level: totals[0] / total for each, total in zip(candidates, totals, strict=True)}
