"""Fused blocks as CUDA graphs: one for a run of sublayers, a number of rows and a span of the cache.

Launching the dozen kernels of a fused block takes the host longer than the device needs to run them on few rows. A
graph launches them at once. The whole model is one graph, and so is a run of sublayers that comes again and again;
until then each of its sublayers is a graph of its own, so that a new kept set needs no recording. A replay depends on
tensors at fixed addresses only: cache slots (``arena.py``), and rows with their rotations and masks
(``static_rows.py``).
"""

import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch

from selfspec.errors import FallbackWarning
from selfspec.model.forward import Forward
from selfspec.model.sublayers import BranchSublayer, Sublayer
from selfspec.runtimes.arena import Arenas, LeasedCache, power_of_two
from selfspec.runtimes.fused import FusedAttention, FusedMLP
from selfspec.runtimes.recorder import Recorder, Replay, find_recorder
from selfspec.runtimes.static_rows import LONGEST_PATH, FindTree, StaticRows

MOST_ROWS = 64
"""Forwards of more rows keep a device busy for longer than their launches take, and run on the fused blocks."""

SHORTEST_SPAN = 256

_OFTEN = 3
"""Times that a run of sublayers, not of all, is replayed one by one before it becomes one graph."""

_MOST_RUNS, _MOST_COUNTED = 128, 10_000
"""Graphs of such runs that are kept, and runs that are counted."""


class _Run(NamedTuple):
    """What a graph replays: sublayers, rows and span of the cache (0 where none attends), and whether a tree's rows."""

    sublayers: tuple[int, ...]
    rows: int
    span: int
    is_tree: bool


class Graphs:
    """The sublayers of a target as replays, recorded when they are first used.

    A replay reads and writes the cache at a fixed address. So there is one arena of slots, leased to one sequence at a
    time; meanwhile other sequences have caches of their own and run on the fused blocks, and so do forwards of several
    sequences. If recording fails, the current forward is finished without replays, and all later ones run on the fused
    blocks, with one warning. Sublayers that are not fused run as they are.

    Args:
        sublayers: of one precision of a model.
        device: that records.
        arenas: those of the model, which its precisions share.
        find_tree: gives kernels that attend the paths of a tree's rows; ``None`` where torch attends, by masks.

    Attributes:
        arenas: see above.
        problem: why there are no replays any more; ``None`` while there are.
    """

    def __init__(
        self, sublayers: Sequence[Sublayer], device: torch.device, arenas: Arenas, find_tree: FindTree | None = None
    ) -> None:
        self.problem: str | None = None
        self._sublayers = sublayers
        self._device = device
        self.arenas, self._find_tree = arenas, find_tree
        self._recorder: Recorder | None = None
        self._rows: dict[int, StaticRows] = {}
        self._replays: dict[_Run, Replay] = {}
        self._uses: Counter[_Run] = Counter()
        arenas.users.add(self)
        if not any(isinstance(sublayer, (FusedAttention, FusedMLP)) for sublayer in sublayers):
            self._give_up("no sublayer of this model can be fused")
        elif find_recorder(device) is None:
            self._give_up(f"there are no CUDA graphs on a device of type '{device.type}'")

    def of(self, sublayers: Sequence[Sublayer]) -> "Graphs":
        """Those of the same model at another precision, whose sequences are the same."""
        return Graphs(sublayers, self._device, self.arenas, self._find_tree)

    @property
    def recordings(self) -> set[tuple[tuple[int, ...], int, int]]:
        """The sublayers, number of rows and span (0 where none of them attends) of each graph."""
        return {(run.sublayers, run.rows, run.span) for run in self._replays}

    def lease(self, capacity: int) -> LeasedCache | None:
        """The cache of a new sequence that may run on graphs; an arena with fewer slots is replaced by a larger one.

        ``None`` while another sequence has the arena, or once recording has failed.
        """
        if self.problem is not None:
            self.arenas.drop()
            return None
        return self.arenas.lease(capacity)

    def takes(self, forward: Forward) -> bool:
        """Whether a forward can run on graphs: it is small, and of the one sequence that has the arena."""
        if len(forward.parts) > 1 or forward.adapting is not None:
            return False
        (rows,) = forward.parts
        if not isinstance(rows.sequence.cache, LeasedCache) or rows.sequence.cache.arena is not self.arenas.current:
            return False
        has_room = self._find_tree is None or rows.depths is None or max(rows.depths) < LONGEST_PATH
        return 0 < rows.count <= MOST_ROWS and self.problem is None and not torch.is_grad_enabled() and has_room

    def ends(self, rows: int, slots: int) -> list[int]:
        """Where forwards of as many rows end that record a graph for each span up to ``slots``."""
        if rows > MOST_ROWS or self.problem is not None:
            return [rows]
        return [1 << exponent for exponent in range(64) if SHORTEST_SPAN <= 1 << exponent <= slots]

    def load(self, hidden_states: torch.Tensor, forward: Forward) -> torch.Tensor:
        """Copies the residual stream to where ``run`` changes it, ``[rows, hidden]``; valid until the next time."""
        arena, count = self.arenas.current, power_of_two(forward.rows)
        assert arena is not None
        if self._recorder is None:
            # A recorder's pool of memory is freed with its last graph, so each arena has a recorder of its own.
            self._recorder = find_recorder(self._device)
        if count not in self._rows:
            self._rows[count] = StaticRows(arena, count, hidden_states)
        return self._rows[count].load_stream(hidden_states)

    def run(self, sublayers: tuple[int, ...], stream: torch.Tensor, forward: Forward) -> None:
        """Runs sublayers over the stream that ``load`` returned for a forward, in place."""
        for some in self._stretches(sublayers):
            if isinstance(self._sublayers[some[0]], (FusedAttention, FusedMLP)):
                self._replay(some, forward)
            else:
                stream.copy_(self._sublayers[some[0]](stream, forward))

    def _stretches(self, sublayers: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
        """Neighbours that are fused, and each of the others by itself."""
        first = 0
        for place, index in enumerate(sublayers):
            if not isinstance(self._sublayers[index], (FusedAttention, FusedMLP)):
                if first < place:
                    yield sublayers[first:place]
                yield (index,)
                first = place + 1
        if first < len(sublayers):
            yield sublayers[first:] if first else sublayers

    def _replay(self, sublayers: tuple[int, ...], forward: Forward) -> None:
        rows, run = self._rows[power_of_two(forward.rows)], self._prepared(sublayers, forward)
        replay = self._replays.get(run)
        if replay is not None:
            replay()
        elif len(sublayers) == 1 or self._is_frequent(run):
            self._record(run, rows, forward)
        else:
            for index in sublayers:
                self._replay((index,), forward)

    def _prepared(self, sublayers: tuple[int, ...], forward: Forward) -> _Run:
        """What is to be replayed, after what the sublayers read has been filled in."""
        rows, (part,) = self._rows[power_of_two(forward.rows)], forward.parts
        if not any(isinstance(self._sublayers[index], FusedAttention) for index in sublayers):
            return _Run(sublayers, rows.count, 0, False)
        span = max(SHORTEST_SPAN, power_of_two(part.end))
        tree = None if self._find_tree is None else self._find_tree(part)
        part.sequence.cache.clear_from(part.end)  # type: ignore[attr-defined]
        rows.load(forward, span, tree)
        return _Run(sublayers, rows.count, span, tree is not None)

    def _is_frequent(self, run: _Run) -> bool:
        """Whether several sublayers become one graph: all of them at once, others when they come again and again."""
        if len(run.sublayers) == len(self._sublayers):
            return True
        if len(self._uses) >= _MOST_COUNTED:
            self._uses.clear()
        self._uses[run] += 1
        return self._uses[run] > _OFTEN and sum(len(each.sublayers) > 1 for each in self._replays) < _MOST_RUNS

    def _record(self, run: _Run, rows: StaticRows, forward: Forward) -> None:
        """Runs sublayers for the first time with a number of rows and a span; keeps the replay if it is correct."""
        sublayers, stand_in, stream = (
            [self._sublayers[index] for index in run.sublayers],
            rows.stand_in(forward, run.span, is_tree=run.is_tree),
            rows.stream,
        )

        def function() -> None:
            for sublayer in sublayers:
                assert isinstance(sublayer, BranchSublayer)
                stream.add_(sublayer._branch(stream, stand_in))

        before = stream.clone()
        function()
        if self.problem is not None or self._recorder is None:
            return
        expected = stream.clone()
        try:
            replay = self._recorder.record(function)
            stream.copy_(before)
            replay()
            problem = (
                None if _agree(stream, expected, len(sublayers)) else "a replay does not compute what was recorded"
            )
        except RuntimeError as error:
            problem = f"recording failed: {error.__context__ or error}"  # ending the capture raises an error of its own
        if problem is None:
            self._replays[run] = replay
            self.arenas.recorded += 1
            return
        self._give_up(problem)
        stream.copy_(before)
        function()  # writes the keys and values again too

    def _give_up(self, reason: str) -> None:
        self.problem = reason
        self._replays.clear()
        warnings.warn(f"the graphs runtime falls back to fused blocks: {reason}", FallbackWarning, stacklevel=5)

    def forget(self) -> None:
        """Drops all that was recorded on an arena that ends."""
        self._replays.clear()
        self._rows.clear()
        self._uses.clear()
        self._recorder = None


def _agree(one: torch.Tensor, other: torch.Tensor, sublayers: int) -> bool:
    """Whether they differ by no more than the rounding of some sublayers, relative to the largest entry."""
    tolerance = min(0.25, 16 * sublayers * torch.finfo(one.dtype).eps)
    scale = float(other.nan_to_num(0.0, 0.0, 0.0).abs().max())
    return torch.allclose(one, other, rtol=tolerance, atol=tolerance * scale, equal_nan=True)
