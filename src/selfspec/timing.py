"""How times are taken: warmed up, in turns, several times over, with the device's work included."""

import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import TypeVar

import torch

Name = TypeVar("Name", bound=Hashable)


def in_turn(names: Sequence[Name], turn: int) -> list[Name]:
    """The names in their order, another one first each turn, so that a machine that slows down favours none."""
    first = turn % len(names) if names else 0
    return [*names[first:], *names[:first]]


def timed(task: Callable[[], object], device: torch.device) -> float:
    """Seconds that a task takes, the work that it queued on the device included."""
    wait_for(device)
    started = time.perf_counter()
    task()
    wait_for(device)
    return time.perf_counter() - started


def interleaved_samples(
    tasks: Mapping[Name, Callable[[], object]], device: torch.device, *, repeats: int, warm_up: int = 1
) -> dict[Name, list[float]]:
    """Seconds of each task, all of them taking turns.

    Args:
        tasks: by name.
        device: where they run.
        repeats: timed runs of each.
        warm_up: runs of each before that are not timed.

    Returns:
        By name one number a repeat.
    """
    names = list(tasks)
    samples: dict[Name, list[float]] = {name: [] for name in names}
    for turn in range(warm_up + repeats):
        for name in in_turn(names, turn):
            seconds = timed(tasks[name], device)
            if turn >= warm_up:
                samples[name].append(seconds)
    return samples


def wait_for(device: torch.device) -> None:
    """Waits until the device has done what it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    elif device.type == "mps":
        torch.mps.synchronize()
