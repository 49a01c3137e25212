"""What is recorded once and replayed: CUDA graphs, or what a test plays them with."""

import threading
from collections.abc import Callable
from typing import Protocol

import torch

Replay = Callable[[], None]


class Recorder(Protocol):
    """Records what a function does to tensors."""

    def record(self, function: Callable[[], None]) -> Replay:
        """Runs a function of tensors; what it returns does the same on the same memory. Raises ``RuntimeError``."""


capturing = threading.Lock()
"""Held while a graph is captured; torch can capture one at a time."""


class CudaRecorder:
    """Records CUDA graphs. Their temporary tensors share one pool of memory, since they never run at the same time."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call, unused-ignore]

    def record(self, function: Callable[[], None]) -> Replay:
        """See ``Recorder``. Runs the function once, then captures it.

        ``torch.cuda.graph`` empties the allocator's caches every time, too slow for some thousand small graphs.
        """
        graph = torch.cuda.CUDAGraph()
        current = torch.cuda.current_stream(self._device)
        with capturing:
            self._stream.wait_stream(current)
            with torch.cuda.stream(self._stream):
                function()  # libraries initialise, and allocate their workspaces outside of the pool
                self._stream.synchronize()
                # In this mode other threads may do what cannot be captured, such as allocating memory.
                graph.capture_begin(self._pool, capture_error_mode="thread_local")
                try:
                    function()
                finally:
                    graph.capture_end()
            current.wait_stream(self._stream)
        return graph.replay


def find_recorder(device: torch.device) -> Recorder | None:
    """The recorder for a device, or ``None`` where there is none."""
    return CudaRecorder(device) if device.type == "cuda" else None
