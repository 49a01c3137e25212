"""Fused blocks as CUDA graphs: one for a run of sublayers, a number of rows and a span of the cache.

Launching the dozen kernels of a fused block takes the host longer than the device needs to run them on few rows. A
graph launches them at once. The whole model is one graph, and so is a run of sublayers that comes again and again;
until then each of its sublayers is a graph of its own, so that a new kept set needs no recording. A replay depends on
tensors at fixed addresses only: cache slots (``Arena``), and the rows with their rotations and masks (``StaticRows``).
"""

import threading
import warnings
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import torch

from selfspec.errors import FallbackWarning
from selfspec.model.cache import KeyValueCache
from selfspec.model.forward import Forward, Rows, SequenceState
from selfspec.model.rope import CosSin
from selfspec.model.sublayers import BranchSublayer, Sublayer
from selfspec.runtimes.fused import FusedAttention, FusedMLP

MOST_ROWS = 64
"""Forwards of more rows keep a device busy for longer than their launches take, and run on the fused blocks."""

SHORTEST_SPAN = 256

FEWEST_SLOTS = 1024
"""A smaller arena would be replaced, and with it everything recorded, at the first request of usual length."""

_OFTEN = 3
"""Times that a run of sublayers, not of all, is replayed one by one before it becomes one graph."""

_MOST_RUNS, _MOST_COUNTED = 128, 10_000
"""Graphs of such runs that are kept, and runs that are counted."""

_PATH = 256
"""Most slots after the prefix that a row of a tree sees, where a kernel attends."""

Replay = Callable[[], None]


class Tree(NamedTuple):
    """Where the rows of a tree find their ancestors, for kernels that attend.

    Attributes:
        prefix: int32 ``[1]``, leading slots that every row sees, whose positions are their numbers.
        slots: int32 ``[rows, n]``, by row the slots it sees after the prefix, counted from it, by ascending position,
            its own last; what follows that is not read.
    """

    prefix: torch.Tensor
    slots: torch.Tensor


FindTree = Callable[[Rows], Tree | None]
"""The tree of rows; ``None`` for a chain."""


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


class Arena:
    """Keys and values at a fixed address, leased to one sequence at a time.

    ``make_slots`` gives zeros ``[layers, 2, key_value_heads, slots, head_dim]``. The capacity is a power of two, at
    least the one asked for. The slot after it is written by padding rows and never read.
    """

    def __init__(self, make_slots: Callable[[int], torch.Tensor], capacity: int) -> None:
        self.capacity = power_of_two(max(capacity, FEWEST_SLOTS))
        with torch.inference_mode(mode=False):  # whichever mode the first request runs in, later ones write to it too
            self.slots = make_slots(self.capacity + 1)
        self._lessee: weakref.ref[LeasedCache] | None = None

    @property
    def is_leased(self) -> bool:
        """Whether a sequence has it: the cache that it got is still alive."""
        return self._lessee is not None and self._lessee() is not None

    def lease(self, capacity: int) -> "LeasedCache":
        """An empty cache in this arena, which is released when the cache is garbage collected."""
        assert not self.is_leased
        self.slots.zero_()
        cache = LeasedCache(self, capacity)
        self._lessee = weakref.ref(cache)
        return cache


class LeasedCache(KeyValueCache):
    """A cache in the first slots of an arena. All slots from ``written`` on hold zeros."""

    def __init__(self, arena: Arena, capacity: int) -> None:
        assert capacity <= arena.capacity
        self._hold([pair[:, :, :capacity] for pair in arena.slots])
        self.arena = arena
        self.written = 0

    def write(self, layer: int, start: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Writes the rows of one layer, see ``KeyValueCache.write``."""
        self.written = max(self.written, start + keys.shape[2])
        super().write(layer, start, keys, values)

    def slots_for(self, layer: int, start: int, rows: int) -> torch.Tensor:
        """Keys and values of one layer to write to, see ``KeyValueCache.slots_for``."""
        self.written = max(self.written, start + rows)
        return super().slots_for(layer, start, rows)

    def clear_from(self, end: int) -> None:
        """Sets the written slots from ``end`` on, the end of the coming forward, to zero.

        Recorded attention reads hidden slots too, with a weight of zero, and a draft may have left non-finite numbers
        there. All layers are cleared at once, and only when a forward ends before an earlier one did.
        """
        if self.written > end:
            self.arena.slots[:, :, :, end : self.written].zero_()
        self.written = end


def power_of_two(number: int) -> int:
    """The smallest power of two that is at least a positive number."""
    return 1 << (number - 1).bit_length()


class StaticRows:
    """The rows of a forward, padded to a fixed number, with their cache slots, rotations and masks.

    Slots, rotations and masks are tensors, filled once for a forward; a recording depends on no number of the host. The
    rows added as padding write their keys and values to the arena's last slot, which is never read. The residual
    stream, ``[count, hidden]``, is changed in place from sublayer to sublayer.
    """

    def __init__(self, arena: Arena, count: int, hidden_states: torch.Tensor) -> None:
        self.count = count
        self._arena = arena
        with torch.inference_mode(mode=False):
            self.stream = hidden_states.new_zeros(count, hidden_states.shape[1])
            self._slots, self._positions = hidden_states.new_zeros(2, count, dtype=torch.long)
            self._tree = Tree(
                hidden_states.new_zeros(1, dtype=torch.int32), hidden_states.new_zeros(count, _PATH, dtype=torch.int32)
            )
        self._turns: dict[str | None, CosSin] = {}
        self._masks: dict[tuple[int | None, int, int], torch.Tensor] = {}  # by window, repeats and span
        self._loaded: weakref.ref[Forward] | None = None  # weak, or it would hold its sequence's lease

    def load_stream(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Copies a residual stream ``[rows, hidden]`` into ``stream``; returns the rows of it that are not padding."""
        own, spare = self.stream[: len(hidden_states)], self.stream[len(hidden_states) :]
        own.copy_(hidden_states)
        if len(spare):
            spare.zero_()
        return own

    def load(self, forward: Forward, span: int, tree: Tree | None) -> None:
        """Fills slots, rotations, masks and paths for a forward of one sequence, unless it is loaded already.

        Attention reads ``span`` slots, at least up to the forward's end.
        """
        if self._loaded is not None and self._loaded() is forward:
            return
        (rows,) = forward.parts
        torch.arange(rows.start, rows.end, out=self._slots[: rows.count])
        self._slots[rows.count :].fill_(self._arena.capacity)
        self._positions[: rows.count].copy_(rows.positions)  # what is added sees slots before the rows alone
        self._positions[rows.count :].zero_()
        if tree is not None:
            length = min(_PATH, tree.slots.shape[1])
            self._tree.prefix.copy_(tree.prefix)
            self._tree.slots[: rows.count, :length].copy_(tree.slots[:, :length])
        for kind, turn in forward.turns().items():
            for static, given in zip(self._static_turn(kind, turn), turn, strict=True):
                static[: rows.count].copy_(given)
        self._loaded = weakref.ref(forward)
        for (window, repeats, slots), mask in self._masks.items():
            if slots == span:
                rows.fill(window, mask.view(self.count, repeats, -1))

    def stand_in(self, forward: Forward, span: int, *, is_tree: bool) -> Forward:
        """The forward that is given to the fused blocks while they are recorded, with the rope of any other one."""
        rows = _RowsAnywhere(
            SequenceState(_StaticCache(self._arena, self._slots)),
            start=span - self.count,
            count=self.count,
            prefix=0,
            memo={"tree": self._tree},
            seen_positions=self._positions,
            is_tree=is_tree,
            masks=self,
        )
        return Forward((rows,), forward.rope, forward.like, _turns=self._turns)

    def mask(self, window: int | None, repeats: int, span: int) -> torch.Tensor:
        """The mask of the loaded forward, bool ``[1, 1, count * repeats, span]``, at the same address every time."""
        key = window, repeats, span
        if key not in self._masks:
            with torch.inference_mode(mode=False):
                self._masks[key] = self.stream.new_zeros(1, 1, self.count * repeats, span, dtype=torch.bool)
            loaded = None if self._loaded is None else self._loaded()
            assert loaded is not None, "a mask is made for the forward that is running"
            loaded.parts[0].fill(window, self._masks[key].view(self.count, repeats, -1))
        return self._masks[key]

    def _static_turn(self, kind: str | None, like: CosSin) -> CosSin:
        if kind not in self._turns:
            with torch.inference_mode(mode=False):
                cosine, sine = (part.new_zeros(self.count, *part.shape[1:]) for part in like)
            self._turns[kind] = cosine, sine
        return self._turns[kind]


@dataclass(frozen=True, eq=False)
class _RowsAnywhere(Rows):
    """Rows at any of the first ``end`` slots; attention reads all of these."""

    seen_positions: torch.Tensor = field(kw_only=True)
    is_tree: bool = field(kw_only=True)
    masks: StaticRows = field(kw_only=True)

    @property
    def positions(self) -> torch.Tensor:
        """Long ``[count]``, on the device, changed before each replay."""
        return self.seen_positions

    @property
    def is_chain(self) -> bool:
        """Kernels attend for rows that are no tree by their positions."""
        return not self.is_tree

    def mask(
        self, window: int | None, dtype: torch.dtype, *, additive: bool, causal_kernel: bool, repeats: int = 1
    ) -> torch.Tensor:
        """See ``Rows.mask``; there always is one, since the slots after the rows are read too."""
        assert not additive
        return self.masks.mask(window, repeats, self.end)


class _StaticCache(KeyValueCache):
    """An arena's slots, written at the slots that a tensor names."""

    def __init__(self, arena: Arena, slots: torch.Tensor) -> None:
        self._hold(list(arena.slots))
        self._slots = slots

    def write_pairs(self, layer: int, start: int, pairs: torch.Tensor) -> None:
        """Writes keys and values of all rows, see ``KeyValueCache.write_pairs``."""
        pair = self._pairs[layer]
        pair.index_copy_(2, self._slots, pairs.view(len(pairs), *pair.shape[:2], -1).permute(1, 2, 0, 3))


class Arenas:
    """The arena of a model, which is replaced by a larger one where a sequence needs it.

    Attributes:
        current: the slots that replays read and write; ``None`` before the first lease.
    """

    def __init__(self, make_slots: Callable[[int], torch.Tensor]) -> None:
        self._make_slots, self._leasing = make_slots, threading.Lock()
        self.current: Arena | None = None
        self.users: weakref.WeakSet[Graphs] = weakref.WeakSet()
        """What has recorded on it."""

    def lease(self, capacity: int) -> LeasedCache | None:
        """The cache of a new sequence; ``None`` while another one has the arena."""
        with self._leasing:
            if self.current is not None and self.current.is_leased:
                return None
            if self.current is None or self.current.capacity < capacity:
                self._drop()  # first, or two arenas would be held at once
                self.current = Arena(self._make_slots, capacity)
            return self.current.lease(capacity)

    def drop(self) -> None:
        """Forgets the arena, unless a sequence has it."""
        with self._leasing:
            if self.current is not None and not self.current.is_leased:
                self._drop()

    def _drop(self) -> None:
        for each in list(self.users):
            each.forget()
        self.current = None


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
        problem: why there are no replays any more; ``None`` while there are.
    """

    def __init__(
        self, sublayers: Sequence[Sublayer], device: torch.device, arenas: Arenas, find_tree: FindTree | None = None
    ) -> None:
        self.problem: str | None = None
        self._sublayers = sublayers
        self._device = device
        self._arenas, self._find_tree = arenas, find_tree
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
        return Graphs(sublayers, self._device, self._arenas, self._find_tree)

    @property
    def arena(self) -> Arena | None:
        """The slots that replays read and write; ``None`` before the first lease."""
        return self._arenas.current

    @property
    def recordings(self) -> set[tuple[tuple[int, ...], int, int]]:
        """The sublayers, number of rows and span (0 where none of them attends) of each graph."""
        return {(run.sublayers, run.rows, run.span) for run in self._replays}

    def lease(self, capacity: int) -> LeasedCache | None:
        """The cache of a new sequence that may run on graphs; an arena with fewer slots is replaced by a larger one.

        ``None`` while another sequence has the arena, or once recording has failed.
        """
        if self.problem is not None:
            self._arenas.drop()
            return None
        return self._arenas.lease(capacity)

    def takes(self, forward: Forward) -> bool:
        """Whether a forward can run on graphs: it is small, and of the one sequence that has the arena."""
        if len(forward.parts) > 1 or forward.adapting is not None:
            return False
        (rows,) = forward.parts
        if not isinstance(rows.sequence.cache, LeasedCache) or rows.sequence.cache.arena is not self.arena:
            return False
        has_room = self._find_tree is None or rows.depths is None or max(rows.depths) < _PATH
        return 0 < rows.count <= MOST_ROWS and self.problem is None and not torch.is_grad_enabled() and has_room

    def ends(self, rows: int, slots: int) -> list[int]:
        """Where forwards of as many rows end that record a graph for each span up to ``slots``."""
        if rows > MOST_ROWS or self.problem is not None:
            return [rows]
        return [1 << exponent for exponent in range(64) if SHORTEST_SPAN <= 1 << exponent <= slots]

    def load(self, hidden_states: torch.Tensor, forward: Forward) -> torch.Tensor:
        """Copies the residual stream to where ``run`` changes it, ``[rows, hidden]``; valid until the next time."""
        arena, count = self.arena, power_of_two(forward.rows)
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
