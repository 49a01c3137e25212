"""Which processors clients and servers run on: with some for each, neither takes time from the other (Linux)."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager


def parse_processors(text: str) -> tuple[int, ...]:
    """Processors by number.

    Args:
        text: numbers and ranges, as in ``0,1`` or ``2-3``.

    Raises:
        ValueError: it is neither, or this process may not use one of them.
    """
    found: set[int] = set()
    for part in text.split(","):
        first, _, last = part.partition("-")
        found |= set(range(int(first), int(last or first) + 1))
    there = set(range(os.cpu_count() or 1))
    if not found or not found <= there:
        raise ValueError(f"'{text}' names processors that are not there; there are 0 to {max(there)}")
    return tuple(sorted(found))


@contextmanager
def on_processors(processors: tuple[int, ...] | None) -> Iterator[None]:
    """Runs a block, and the processes that it starts, on some processors.

    Args:
        processors: by number; ``None`` leaves it to the system.
    """
    if processors is None:
        yield
        return
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, processors)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)
