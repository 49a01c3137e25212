"""What a server's processes hold: memory, open files and threads (Linux)."""

from __future__ import annotations

import os
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from serving.servers import processes_of


@dataclass(frozen=True)
class Held:
    """What processes hold at a time.

    Attributes:
        seconds: since the start.
        resident_bytes: memory.
        files: open files, sockets among them.
        threads: of all processes.
    """

    seconds: float
    resident_bytes: int
    files: int
    threads: int


def held(process_id: int, seconds: float) -> Held:
    """What a process and its descendants hold.

    Args:
        process_id: of the first.
        seconds: since the start.
    """
    processes = processes_of(process_id)
    found = [Path(f"/proc/{each}") for each in processes]
    return Held(
        seconds,
        sum(resident_bytes(each) for each in processes),
        sum(len(list((folder / "fd").iterdir())) for folder in found),
        sum(len(list((folder / "task").iterdir())) for folder in found),
    )


def resident_bytes(process_id: int) -> int:
    """The memory of a process, what it shares with others included."""
    return os.sysconf("SC_PAGE_SIZE") * int(Path(f"/proc/{process_id}/statm").read_text().split()[1])


def growth(samples: Sequence[Held], warm_up: float = 0.2, window: float = 0.2) -> float:
    """How much the memory grew from after the warm-up to the end, as a share.

    Args:
        samples: over the whole time.
        warm_up: share of the samples that does not count.
        window: share of the samples at either end whose medians are compared.
    """
    size = max(1, int(window * len(samples)))
    first = int(warm_up * len(samples))
    sizes = [sample.resident_bytes for sample in samples]
    return statistics.median(sizes[-size:]) / statistics.median(sizes[first : first + size]) - 1
