"""Timing: warmed up, interleaved, repeated, and synchronised with the device."""

import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import TypeVar

import torch

Name = TypeVar("Name", bound=Hashable)


def in_turn(names: Sequence[Name], turn: int) -> list[Name]:
    """The names, rotated by one each turn (from 0), so that a drift of the machine's speed favours none of them."""
    first = turn % len(names) if names else 0
    return [*names[first:], *names[:first]]


def now() -> float:
    """Seconds of ``time.perf_counter``."""
    return time.perf_counter()


def timed(task: Callable[[], object], device: torch.device, clock: Callable[[], float] = now) -> float:
    """Wall-clock seconds of a task, including the work that it queues on the device."""
    wait_for(device)
    started = clock()
    task()
    wait_for(device)
    return clock() - started


def interleaved_samples(
    tasks: Mapping[Name, Callable[[], object]],
    device: torch.device,
    *,
    repeats: int,
    warm_up: int = 1,
    clock: Callable[[], float] = now,
) -> dict[Name, list[float]]:
    """Times several tasks in turns, after untimed runs; for each name the seconds of its repeats."""
    names = list(tasks)
    samples: dict[Name, list[float]] = {name: [] for name in names}
    for turn in range(warm_up + repeats):
        for name in in_turn(names, turn):
            seconds = timed(tasks[name], device, clock)
            if turn >= warm_up:
                samples[name].append(seconds)
    return samples


def wait_for(device: torch.device) -> None:
    """Waits until the device has finished all queued work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    elif device.type == "xpu":
        torch.xpu.synchronize(device)
    elif device.type == "mps":
        torch.mps.synchronize()
