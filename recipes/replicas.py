"""Data parallelism over processes of one machine: on a few CPU cores faster than one process with as many threads.

Every process reads its share of a step's rows with the same subset of sublayers, the gradients are averaged, and every
process then makes the same update, so that the weights stay equal.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, distributed, multiprocessing


def launch(processes: int, work: Callable[..., None], *arguments: object) -> None:
    """Call ``work(*arguments)`` in several processes at once, with the cores divided among them.

    Args:
        processes: 1 calls it in this process.
        work: a function of a module.
        arguments: must be picklable.
    """
    if processes == 1:
        work(*arguments)
        return
    with tempfile.TemporaryDirectory() as folder:
        meeting_point = f"file://{Path(folder) / 'meeting-point'}"
        multiprocessing.spawn(_member, (processes, meeting_point, work, arguments), nprocs=processes)


def rank() -> int:
    """Rank of this process, 0 ... `count` - 1; process 0 writes logs and checkpoints."""
    return distributed.get_rank() if distributed.is_initialized() else 0


def count() -> int:
    """Number of processes."""
    return distributed.get_world_size() if distributed.is_initialized() else 1


def own_rows(batch: Tensor) -> Tensor:
    """Return this process's share of the rows of a batch ``[rows, ...]``; the rows must divide evenly."""
    return batch.chunk(count())[rank()]


def average(tensors: list[Tensor]) -> None:
    """Replace each tensor by its mean over the processes, summed in float32 (bfloat16 is slow in gloo)."""
    if count() > 1:
        for tensor in tensors:
            total = tensor.float()
            distributed.all_reduce(total)
            tensor.copy_(total / count())


def _member(
    number: int, processes: int, meeting_point: str, work: Callable[..., None], arguments: tuple[object, ...]
) -> None:
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // processes))
    distributed.init_process_group("gloo", init_method=meeting_point, rank=number, world_size=processes)
    work(*arguments)
    distributed.destroy_process_group()
