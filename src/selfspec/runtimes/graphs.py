"""Fused blocks as CUDA graphs: one for each sublayer, number of rows and span of the cache.

Launching the dozen kernels of a fused block costs the host more time than a device needs for few rows. A graph launches
them at once. Since every sublayer has its own, a kept set is a sequence of replays, and a change of it records nothing
anew. What a replay does depends on nothing but tensors (``static_rows.StaticRows``).
"""

import threading
import warnings
from collections.abc import Callable, Sequence
from typing import Protocol

import torch

from selfspec.model.sublayers import Step, Sublayer
from selfspec.runtimes.arena import Arena, LeasedCache, power_of_two
from selfspec.runtimes.fused import FusedAttention, FusedMLP
from selfspec.runtimes.static_rows import StaticRows

MOST_ROWS = 64
"""Forwards of more rows keep a device busy for longer than their launches take, and run on the fused blocks."""

SHORTEST_SPAN = 256

Replay = Callable[[], None]


class Recorder(Protocol):
    """Makes a replay of what a function does to tensors."""

    def record(self, function: Callable[[], None]) -> Replay:
        """Runs a function, once or several times, and returns what does the same on the same memory.

        Raises:
            RuntimeError: it cannot be recorded.
        """
        ...


_capturing = threading.Lock()


class CudaRecorder:
    """Records CUDA graphs, whose temporary tensors share one pool of memory: they never run side by side.

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
        with _capturing:  # torch can capture one graph at a time
            self._stream.wait_stream(current)
            with torch.cuda.stream(self._stream):
                function()  # libraries get ready, and take their workspaces outside of the pool
                self._stream.synchronize()
                # In this mode what other threads do meanwhile, such as allocating memory, spoils nothing.
                graph.capture_begin(self._pool, capture_error_mode="thread_local")
                try:
                    function()
                finally:
                    graph.capture_end()
            current.wait_stream(self._stream)
        return graph.replay


def find_recorder(device: torch.device) -> Recorder | None:
    """What can record on a device, if anything."""
    return CudaRecorder(device) if device.type == "cuda" else None


class Graphs:
    """The sublayers of a target as replays, recorded when they are first used.

    Replays know the cache by its address. So there is one arena of slots, lent to one sequence at a time; sequences
    that come meanwhile have caches of their own and are not for this class. Whatever goes wrong while recording, the
    forward at hand is finished without replays, and all later ones are left to the fused blocks, with one warning.

    Args:
        sublayers: those of the target. What is not fused among them runs as it is.
        device: where the target is.
        make_slots: see ``Arena``.

    Attributes:
        gave_up: whether something went wrong.
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
        self._arena: Arena | None = None
        self._rows: dict[int, StaticRows] = {}
        self._replays: dict[tuple[int, int, int], Replay] = {}  # by sublayer, number of rows and span
        if not any(isinstance(sublayer, (FusedAttention, FusedMLP)) for sublayer in sublayers):
            self._give_up("no sublayer of this model can be fused")
        elif find_recorder(device) is None:
            self._give_up(f"there are no CUDA graphs on a device of type '{device.type}'")

    @property
    def recorded(self) -> int:
        """How many graphs there are."""
        return len(self._replays)

    def lease(self, capacity: int) -> LeasedCache | None:
        """The cache of a new sequence that may run on graphs, if no other one has it.

        Args:
            capacity: slots that it needs. Where the arena has fewer, a larger one takes its place.
        """
        with self._leasing:
            if self._arena is not None and self._arena.is_leased:
                return None
            if self.gave_up:
                self._forget()
                return None
            if self._arena is None or self._arena.capacity < capacity:
                self._forget()  # first: two arenas would take twice the memory
                # Recorders come and go with what they recorded, since a pool of memory ends with its last graph.
                self._recorder = find_recorder(self._device)
                self._arena = Arena(self._make_slots, capacity)
            return self._arena.lease(capacity)

    def takes(self, step: Step) -> bool:
        """Whether a step can run on graphs."""
        cache = step.sequence.cache
        leased = isinstance(cache, LeasedCache) and cache.arena is self._arena
        return leased and 0 < step.layout.rows <= MOST_ROWS and not self.gave_up and not torch.is_grad_enabled()

    def ends(self, rows: int, slots: int) -> list[int]:
        """Ends of forwards of so many rows, one for each span that the first ``slots`` slots have."""
        if rows > MOST_ROWS or self.gave_up:
            return [rows]
        return [1 << exponent for exponent in range(64) if SHORTEST_SPAN <= 1 << exponent <= slots]

    def load(self, hidden_states: torch.Tensor, step: Step) -> torch.Tensor:
        """The residual stream that ``advance`` changes in place, ``[rows, hidden]``, until the next ``load``."""
        count = power_of_two(step.layout.rows)
        if count not in self._rows:
            assert self._arena is not None
            self._rows[count] = StaticRows(self._arena, count, hidden_states)
        return self._rows[count].load_stream(hidden_states)

    def advance(self, index: int, stream: torch.Tensor, step: Step) -> torch.Tensor:
        """Runs one sublayer.

        Args:
            index: which.
            stream: what ``load`` gave.
            step: the step for which it was loaded.

        Returns:
            The stream.
        """
        sublayer = self._sublayers[index]
        if not isinstance(sublayer, (FusedAttention, FusedMLP)):
            return stream.copy_(sublayer(stream, step))
        rows, span = self._rows[power_of_two(step.layout.rows)], 0
        if isinstance(sublayer, FusedAttention):
            span = max(SHORTEST_SPAN, power_of_two(step.layout.end))
            step.sequence.cache.clear_behind(step.layout.end)  # type: ignore[attr-defined]
            rows.load_step(step, span)
        replay = self._replays.get((index, rows.count, span))
        if replay is not None:
            replay()
        else:
            self._record(index, rows, step, span)
        return stream

    def _record(self, index: int, rows: StaticRows, step: Step, span: int) -> None:
        """Runs a sublayer for the first time with so many rows and this span, and keeps the replay if it is right."""
        sublayer, stand_in, stream = self._sublayers[index], rows.stand_in(step, span), rows.stream

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
            problem = f"recording failed: {error.__context__ or error}"  # a capture ends with an error of its own
        if problem is None:
            self._replays[index, rows.count, span] = replay
            return
        self._give_up(problem)
        stream.copy_(before)
        function()  # for the keys and values too

    def _give_up(self, reason: str) -> None:
        self.gave_up = True
        self._replays.clear()
        warnings.warn(f"the graphs runtime falls back to fused blocks: {reason}", RuntimeWarning, stacklevel=5)

    def _forget(self) -> None:
        self._replays.clear()
        self._rows.clear()
        self._recorder = self._arena = None


def _agree(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether they differ by no more than rounding, relative to the largest entry."""
    tolerance = 16 * torch.finfo(one.dtype).eps
    scale = float(other.nan_to_num(0.0, 0.0, 0.0).abs().max())
    return torch.allclose(one, other, rtol=tolerance, atol=tolerance * scale, equal_nan=True)
