"""What benchmarks make of what they measured several times: medians and spreads."""

import statistics
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from selfspec.timing import Name, interleaved_samples


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


def interleaved_seconds(
    tasks: Mapping[Name, Callable[[], object]], device: torch.device, *, repeats: int, warm_up: int = 1
) -> dict[Name, float]:
    """Median seconds of each task, all of them taking turns; see ``interleaved_samples``."""
    samples = interleaved_samples(tasks, device, repeats=repeats, warm_up=warm_up)
    return {name: statistics.median(seconds) for name, seconds in samples.items()}
