"""How benchmarks take times: warmed up, in turns, several times over, with the device's work included."""

import statistics
import time
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

Name = TypeVar("Name", bound=Hashable)


@dataclass(frozen=True)
class Measured:
    """A figure that was measured several times.

    Attributes:
        samples: one number a repeat; a repeat in which the figure has no meaning leaves none.
    """

    samples: tuple[float, ...]

    @classmethod
    def of(cls, samples: Iterable[float | None]) -> "Measured":
        """The numbers among some samples."""
        return cls(tuple(sample for sample in samples if sample is not None))

    @property
    def median(self) -> float | None:
        """The middle one; ``None`` without any."""
        return statistics.median(self.samples) if self.samples else None

    @property
    def spread(self) -> list[float] | None:
        """The lowest and the highest; ``None`` without any."""
        return [min(self.samples), max(self.samples)] if self.samples else None

    def fields(self, name: str) -> dict[str, Any]:
        """The figure as a report has it: its median by its name, and its ``…_spread`` beside it."""
        return {name: self.median, f"{name}_spread": self.spread}


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


def interleaved_seconds(
    tasks: Mapping[Name, Callable[[], object]], device: torch.device, *, repeats: int, warm_up: int = 1
) -> dict[Name, float]:
    """Median seconds of each task, all of them taking turns.

    Args:
        tasks: by name.
        device: where they run.
        repeats: timed runs of each.
        warm_up: runs of each before that are not timed.
    """
    names = list(tasks)
    seconds: dict[Name, list[float]] = {name: [] for name in names}
    for turn in range(warm_up + repeats):
        for name in in_turn(names, turn):
            elapsed = timed(tasks[name], device)
            if turn >= warm_up:
                seconds[name].append(elapsed)
    return {name: statistics.median(samples) for name, samples in seconds.items()}


def wait_for(device: torch.device) -> None:
    """Waits until the device has done what it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    elif device.type == "mps":
        torch.mps.synchronize()
