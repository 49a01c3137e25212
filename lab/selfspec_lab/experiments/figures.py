"""Formats figures that were measured several times."""

import statistics
from collections.abc import Sequence


def with_spread(samples: Sequence[float], form: str = ".2f") -> str:
    """The median, with lowest and highest if there are several samples: ``1.20 (1.15 to 1.31)``.

    Args:
        samples: one number per repeat.
        form: format of a number.
    """
    median = format(statistics.median(samples), form)
    return median if len(samples) == 1 else f"{median} ({min(samples):{form}} to {max(samples):{form}})"


def repeats_text(samples: Sequence[float]) -> str:
    """``one repeat`` or ``3 repeats``."""
    return "one repeat" if len(samples) == 1 else f"{len(samples)} repeats"
