"""Medians and spreads of repeated measurements."""

import statistics
from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from selfspec_lab.measuring import interleaved_samples

Name = TypeVar("Name", bound=Hashable)


@dataclass(frozen=True)
class Measured:
    """A figure that was measured several times.

    Attributes:
        samples: one number per repeat, repeats without a number left out.
    """

    samples: tuple[float, ...]

    @classmethod
    def of(cls, samples: Iterable[float | None]) -> "Measured":
        """Drops the samples that are ``None``."""
        return cls(tuple(sample for sample in samples if sample is not None))

    @property
    def median(self) -> float | None:
        """The median; ``None`` without samples."""
        return statistics.median(self.samples) if self.samples else None

    @property
    def spread(self) -> list[float] | None:
        """Lowest and highest sample; ``None`` without samples."""
        return [min(self.samples), max(self.samples)] if self.samples else None

    def fields(self, name: str) -> dict[str, Any]:
        """Fields of a report: ``name`` with the median, ``name_spread`` with lowest and highest."""
        return {name: self.median, f"{name}_spread": self.spread}


def median_seconds(
    tasks: Mapping[Name, Callable[[], object]], device: torch.device, *, repeats: int, warm_up: int = 1
) -> dict[Name, float]:
    """Median seconds of each task, timed in turns; arguments as in ``interleaved_samples``."""
    samples = interleaved_samples(tasks, device, repeats=repeats, warm_up=warm_up)
    return {name: statistics.median(seconds) for name, seconds in samples.items()}
