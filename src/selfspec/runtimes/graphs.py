"""Fused blocks as CUDA graphs: one for each sublayer, number of rows and span of the cache.

Launching the dozen kernels of a fused block takes the host longer than the device needs to run them on few rows. A
graph launches them at once. Every sublayer has its own graphs, so a kept set is a sequence of replays, and another kept
set needs no new recording. A replay depends on tensors only (``static_rows.StaticRows``).
"""

import threading
import warnings
from collections.abc import Callable, Sequence
from typing import Protocol

import torch

from selfspec.model.forward import Forward
from selfspec.model.sublayers import Sublayer
from selfspec.runtimes.arena import Arena, LeasedCache, power_of_two
from selfspec.runtimes.fused import FusedAttention, FusedMLP
from selfspec.runtimes.static_rows import StaticRows

MOST_ROWS = 64
"""Forwards of more rows keep a device busy for longer than their launches take, and run on the fused blocks."""

SHORTEST_SPAN = 256

Replay = Callable[[], None]


class Recorder(Protocol):
    """Records what a function does to tensors."""

    def record(self, function: Callable[[], None]) -> Replay:
        """Runs a function, once or several times.

        Args:
            function: reads and writes tensors only.

        Returns:
            Does the same on the same memory.

        Raises:
            RuntimeError: it cannot be recorded.
        """
        ...


capturing = threading.Lock()
"""Held while a graph is captured; torch can capture one at a time."""


class CudaRecorder:
    """Records CUDA graphs. Their temporary tensors share one pool of memory, since they never run at the same time.

    Args:
        device: the CUDA device.
    """

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


class Graphs:
    """The sublayers of a target as replays, recorded when they are first used.

    A replay reads and writes the cache at a fixed address. So there is one arena of slots, leased to one sequence at a
    time; meanwhile other sequences have caches of their own and run on the fused blocks, and so do forwards of several
    sequences. If recording fails, the current forward is finished without replays, and all later ones run on the fused
    blocks, with one warning.

    Args:
        sublayers: those of the target. Those that are not fused run as they are.
        device: where the target is.
        make_slots: see ``Arena``.

    Attributes:
        gave_up: recording is not possible, or has failed.
        arena: the cache slots that the replays use, once a sequence has leased them.
    """

    def __init__(
        self, sublayers: Sequence[Sublayer], device: torch.device, make_slots: Callable[[int], torch.Tensor]
    ) -> None:
        self.gave_up = False
        self._sublayers = sublayers
        self._device = device
        self._make_slots = make_slots
        self._leasing = threading.Lock()
        self._recorder: Recorder | None = None
        self.arena: Arena | None = None
        self._rows: dict[int, StaticRows] = {}
        self._replays: dict[tuple[int, int, int], Replay] = {}  # by sublayer, number of rows and span
        if not any(isinstance(sublayer, (FusedAttention, FusedMLP)) for sublayer in sublayers):
            self._give_up("no sublayer of this model can be fused")
        elif find_recorder(device) is None:
            self._give_up(f"there are no CUDA graphs on a device of type '{device.type}'")

    @property
    def recorded(self) -> int:
        """Number of graphs."""
        return len(self._replays)

    @property
    def recordings(self) -> set[tuple[int, int, int]]:
        """The sublayer, number of rows and span (0 for an MLP) of each graph."""
        return set(self._replays)

    def lease(self, capacity: int) -> LeasedCache | None:
        """The cache of a new sequence that may run on graphs.

        Args:
            capacity: slots that it needs. An arena with fewer is replaced by a larger one.

        Returns:
            The cache, or ``None`` while another sequence has the arena, or once recording has failed.
        """
        with self._leasing:
            if self.arena is not None and self.arena.is_leased:
                return None
            if self.gave_up:
                self._forget()
                return None
            if self.arena is None or self.arena.capacity < capacity:
                self._forget()  # first, or two arenas would be held at once
                # A recorder's pool of memory is freed with its last graph, so each arena has a recorder of its own.
                self._recorder = find_recorder(self._device)
                self.arena = Arena(self._make_slots, capacity)
            return self.arena.lease(capacity)

    def takes(self, forward: Forward) -> bool:
        """Whether a forward can run on graphs: it is small, and of the one sequence that has the arena."""
        if len(forward.parts) > 1:
            return False
        cache = forward.parts[0].sequence.cache
        leased = isinstance(cache, LeasedCache) and cache.arena is self.arena
        return leased and 0 < forward.rows <= MOST_ROWS and not self.gave_up and not torch.is_grad_enabled()

    def ends(self, rows: int, slots: int) -> list[int]:
        """Ends of the forwards that record every graph for a number of rows.

        Args:
            rows: number of rows.
            slots: cache slots in which the forwards lie.

        Returns:
            One end for each span up to ``slots``; ``rows`` alone where no graph is used.
        """
        if rows > MOST_ROWS or self.gave_up:
            return [rows]
        return [1 << exponent for exponent in range(64) if SHORTEST_SPAN <= 1 << exponent <= slots]

    def load(self, hidden_states: torch.Tensor, forward: Forward) -> torch.Tensor:
        """Copies the residual stream to where ``advance`` changes it in place.

        Args:
            hidden_states: ``[rows, hidden]``.
            forward: the rows; ``takes`` has returned true for it.

        Returns:
            ``[rows, hidden]``, valid until the next ``load``.
        """
        count = power_of_two(forward.rows)
        if count not in self._rows:
            assert self.arena is not None
            self._rows[count] = StaticRows(self.arena, count, hidden_states)
        return self._rows[count].load_stream(hidden_states)

    def advance(self, index: int, stream: torch.Tensor, forward: Forward) -> torch.Tensor:
        """Runs one sublayer.

        Args:
            index: its index.
            stream: what ``load`` returned.
            forward: the forward for which it was loaded.

        Returns:
            The stream.
        """
        sublayer = self._sublayers[index]
        if not isinstance(sublayer, (FusedAttention, FusedMLP)):
            return stream.copy_(sublayer(stream, forward))
        rows, span = self._rows[power_of_two(forward.rows)], 0
        if isinstance(sublayer, FusedAttention):
            part = forward.parts[0]
            span = max(SHORTEST_SPAN, power_of_two(part.end))
            part.sequence.cache.clear_from(part.end)  # type: ignore[attr-defined]
            rows.load(forward, span)
        replay = self._replays.get((index, rows.count, span))
        if replay is not None:
            replay()
        else:
            self._record(index, rows, forward, span)
        return stream

    def _record(self, index: int, rows: StaticRows, forward: Forward, span: int) -> None:
        """Runs a sublayer for the first time with a number of rows and a span; keeps the replay if it is correct."""
        sublayer, stand_in, stream = self._sublayers[index], rows.stand_in(forward, span), rows.stream

        def function() -> None:
            stream.add_(sublayer._branch(stream, stand_in))

        before = stream.clone()
        function()
        if self.gave_up or self._recorder is None:
            return
        expected = stream.clone()
        try:
            replay = self._recorder.record(function)
            stream.copy_(before)
            replay()
            problem = None if _agree(stream, expected) else "a replay does not compute what was recorded"
        except RuntimeError as error:
            problem = f"recording failed: {error.__context__ or error}"  # ending the capture raises an error of its own
        if problem is None:
            self._replays[index, rows.count, span] = replay
            return
        self._give_up(problem)
        stream.copy_(before)
        function()  # writes the keys and values again too

    def _give_up(self, reason: str) -> None:
        self.gave_up = True
        self._replays.clear()
        warnings.warn(f"the graphs runtime falls back to fused blocks: {reason}", RuntimeWarning, stacklevel=5)

    def _forget(self) -> None:
        self._replays.clear()
        self._rows.clear()
        self._recorder = self.arena = None


def _agree(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether they differ by no more than rounding, relative to the largest entry."""
    tolerance = 16 * torch.finfo(one.dtype).eps
    scale = float(other.nan_to_num(0.0, 0.0, 0.0).abs().max())
    return torch.allclose(one, other, rtol=tolerance, atol=tolerance * scale, equal_nan=True)
