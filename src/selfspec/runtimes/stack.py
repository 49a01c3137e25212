"""Sublayers, final norm and head in the form of a runtime: any subset of them runs over the rows of a forward."""

import sys
from bisect import bisect_left
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import torch
from torch import nn

from selfspec.model.cache import KeyValueCache
from selfspec.model.decoder import Decoder
from selfspec.model.forward import Drawing, Forward, Rows, SequenceState
from selfspec.model.rope import Rope
from selfspec.model.sublayers import Sublayer
from selfspec.runtimes.branches import describe_head
from selfspec.runtimes.device_kernels import DeviceKernels
from selfspec.runtimes.fused import FusedBlock
from selfspec.runtimes.graphs import Graphs
from selfspec.runtimes.logits import Logits
from selfspec.runtimes.native import NativeForward
from selfspec.runtimes.packed import LowBitEmbedding, PackedWeights, look_up
from selfspec.runtimes.products import Function, Product, is_ordinary, is_plain, signature
from selfspec.runtimes.seen_text import SeenText


@dataclass
class StackOutput:
    """The residual stream ``[rows, hidden]`` after the last sublayer that ran, and what else was asked for."""

    hidden_states: torch.Tensor
    captured: dict[int, torch.Tensor] = field(default_factory=dict)
    """By sublayer ``i`` the residual stream before it, ``h[i]``."""
    logits: Logits | None = None

    def split(self, counts: list[int]) -> "list[StackOutput]":
        """The output of several sequences' rows, by sequence; ``counts`` are their rows."""
        if len(counts) == 1:
            return [self]
        states = torch.split(self.hidden_states, counts)
        captured = {index: torch.split(rows, counts) for index, rows in self.captured.items()}
        logits: Sequence[Logits | None] = [None] * len(counts) if self.logits is None else self.logits.split(counts)
        return [
            StackOutput(states[place], {index: rows[place] for index, rows in captured.items()}, logits[place])
            for place in range(len(counts))
        ]


@dataclass(frozen=True)
class _Task:
    """What to run, and which states ``h[i]`` of it to keep: see ``Stack.run``; logits only from native sublayers."""

    sublayers: tuple[int, ...]
    capture: Collection[int]
    last_rows: Mapping[int, torch.Tensor]
    logits: bool
    confidence: bool

    def places(self) -> dict[int, int]:
        """For each state the place in ``sublayers`` before which the stream is that state."""
        return {index: bisect_left(self.sublayers, index) for index in {*self.capture, *self.last_rows}}

    def rows(self, places: Mapping[int, int], rows: int) -> dict[int, int]:
        """By place, how many of the last rows are kept."""
        needed: dict[int, int] = {}
        for index, place in places.items():
            count = rows if index in self.capture else len(self.last_rows[index])
            needed[place] = max(needed.get(place, 0), count)
        return needed


class Stack:
    """Runs sublayers, final norm and LM head over rows of any sequences, at one precision.

    Neighbouring sublayers that the kernels take run in one native call. Whether they take rows is decided here, by the
    limits of ``kernels.row_limit``: parts of a forward with more rows than a limit run by themselves, so that each row
    gets what it gets with the rows of its own sequence.

    Args:
        decoder: the model.
        rope: computes the rotations of positions.
        sublayers: all ``2L``, each in the runtime's form or, where there is none, a slower one.
        norm: the final norm.
        head: the LM head.
        compiled: there are kernels.
        any_rows: they run whatever the number of rows.
        device_kernels: the kernels of an accelerator that choose tokens, if there are any.

    Attributes:
        native: runs several of the sublayers in one call, if there are kernels.
        embedding: the weights of the embedding, ``[vocab, hidden]``, perhaps of few bits, where there are kernels, and
            it does nothing but take rows of them and scale them.
        embedding_scale: what these rows are multiplied by.
        graphs: replays of the sublayers, if the runtime has them.
        final_norm: the final norm, as it runs where rows do not run natively.
    """

    def __init__(
        self,
        decoder: Decoder,
        rope: Rope,
        sublayers: Sequence[Sublayer],
        norm: Function,
        head: Function,
        *,
        compiled: bool,
        any_rows: bool = False,
        device_kernels: DeviceKernels | None = None,
    ) -> None:
        self._decoder, self.rope, self.device_kernels = decoder, rope, device_kernels
        self.sublayers, self.final_norm, self.head = list(sublayers), norm, head
        self.graphs: Graphs | None = None
        self._every = tuple(range(len(self.sublayers)))
        self._modules = [decoder.final_norm, decoder.head, decoder.embedding]
        self._signature = signature(self._modules)
        self.embedding, self.embedding_scale = _embedding_table(decoder) if compiled else (None, 1.0)
        self.native: NativeForward | None = None
        if compiled:
            self.native = NativeForward(
                self.sublayers,
                decoder.like,
                describe_head(norm, head, decoder),
                self.embedding,
                embedding_scale=self.embedding_scale,
                any_rows=any_rows,
            )
        self._most_rows = min(self._limits(), default=sys.maxsize)

    @property
    def problem(self) -> str | None:
        """Why the runtime runs on what it falls back to; ``None`` while it runs as it should."""
        return None if self.graphs is None else self.graphs.problem

    def new_cache(self, capacity: int, *, packed: bool = False) -> KeyValueCache:
        """An empty cache of a new sequence: at fixed addresses, where the runtime needs them and they are free.

        ``packed`` keeps keys and values in 8 bits.
        """
        leased = None if self.graphs is None or packed else self.graphs.lease(capacity)
        return self._decoder.new_cache(capacity, packed=packed) if leased is None else leased

    @property
    def independent_rows(self) -> int:
        """See ``Target.independent_rows``."""
        if self.device_kernels is not None:
            return self.device_kernels.independent_rows
        return self.native.most_rows if self.native is not None and self.native.is_whole else 0

    def is_current(self) -> bool:
        """Whether the model's modules still are those, with those weights, that this was made of."""
        return self._signature == signature(self._modules) and all(each.is_current() for each in self.sublayers)

    def lay_out(
        self,
        sequence: SequenceState,
        rows: int,
        *,
        start: int | None = None,
        prefix: int | None = None,
        depths: Iterable[int] | None = None,
        visible: torch.Tensor | None = None,
        drawing: Drawing | None = None,
        settled: bool = False,
        seen: SeenText | None = None,
    ) -> Forward:
        """Lays out the rows of one sequence in a forward.

        Args:
            sequence: the sequence.
            rows: number of rows.
            start: cache slot of the first row; the end of the committed slots if not given.
            prefix: leading slots that every row sees; ``start`` if not given.
            depths: position of each row, counted from ``prefix``; ``0, 1, 2 …`` if not given.
            visible: bool ``[rows, start + rows - prefix]``, which slots from ``prefix`` on each row sees; if not given,
                the rows of this forward up to itself.
            drawing: how the tokens that the rows choose are drawn, where a native forward computes their logits
                (``Logits.drawn``).
            settled: all rows will be committed, whatever they give, as those of a prompt.
            seen: what of the text the rows see where they run natively; all of it if not given.
        """
        like = self._decoder.like
        assert (visible is None and depths is None and prefix in (None, start)) or self._decoder.tree_refusal is None
        start = sequence.cache.length if start is None else start
        prefix = start if prefix is None else prefix
        part = Rows(
            sequence,
            start,
            rows,
            prefix,
            None if depths is None else tuple(depths),
            visible,
            drawing,
            settled,
            seen,
        )
        self.rope.reserve(like, part.end)
        return Forward((part,), self.rope, like)

    def embed(self, token_ids: torch.Tensor, forward: Forward | None = None) -> torch.Tensor:
        """The residual stream before sublayer 0, ``h[0]``: long ``[rows]`` to ``[rows, hidden]``.

        ``forward`` has the rows' positions; see ``Decoder.embed``.
        """
        table = self.embedding
        if table is None:
            return self._decoder.embed(token_ids, forward)
        if isinstance(table, PackedWeights):
            rows = look_up([table], token_ids, self._decoder.like.dtype)
        else:
            rows = table.index_select(0, token_ids)
        return rows if self.embedding_scale == 1.0 else rows * self.embedding_scale

    def run(
        self,
        hidden_states: torch.Tensor,
        sublayers: Iterable[int],
        forward: Forward,
        capture: Collection[int] = (),
        last_rows: Mapping[int, torch.Tensor] | None = None,
        *,
        logits: bool = False,
        confidence: bool = False,
    ) -> StackOutput:
        """Runs sublayers over the rows of a forward and writes their keys and values into the caches.

        Args:
            hidden_states: ``[rows, hidden]``, the residual stream before the first of them.
            sublayers: ascending indices; those not named are skipped.
            forward: the rows.
            capture: sublayers ``i`` (0 to ``2L``) before which to keep the residual stream ``h[i]``; a skipped sublayer
                leaves the stream as it is.
            last_rows: by sublayer ``i`` (0 to ``2L``) a tensor ``[k, hidden]`` that receives the last ``k`` rows of
                ``h[i]``, without the others being held.
            logits: whether final norm and LM head follow, in the same call where all of it runs natively.
            confidence: compute the rows' confidences with the logits, if that is cheap here.
        """
        scored, groups = logits and self.native is not None and self.native.has_head, self._groups(forward)
        task = _Task(tuple(sublayers), capture, last_rows or {}, scored, confidence)
        if len(groups) > 1:
            output = self._run_groups(groups, hidden_states, forward, task)
        else:
            output = self._run(hidden_states, forward, task)
        if logits and output.logits is None:
            output.logits = self.score(output.hidden_states, forward.widest, forward, confidence=confidence)
        return output

    def logits(self, hidden_states: torch.Tensor, widest: int | None = None) -> torch.Tensor:
        """Final norm and LM head: ``[rows, hidden]`` to ``[rows, vocab]``, in the model's dtype.

        With ``widest``, the largest number of rows that one sequence has among them, rows of several sequences get
        what they get in each alone.
        """
        if (native := self._native_head(len(hidden_states) if widest is None else widest)) is not None:
            return native.score(hidden_states).values
        normed, head = self.final_norm(hidden_states), self.head
        logits = self._decoder.scale_logits(head(normed, widest) if isinstance(head, Product) else head(normed))
        return logits.to(hidden_states.device)

    def norm(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """The final norm, bit for bit as a few rows get it from ``logits``: ``[rows, hidden]`` in and out."""
        native = self._native_head(1)
        return self.final_norm(hidden_states) if native is None else native.norm(hidden_states)

    def score(
        self, hidden_states: torch.Tensor, widest: int, forward: Forward | None = None, *, confidence: bool = False
    ) -> Logits:
        """``logits`` with what is chosen from them, bit for bit as in a forward that goes on to them.

        Kernels of a device choose for the rows of ``forward``.
        """
        if self.device_kernels is not None and forward is not None:
            return self.device_kernels.choose(self.logits(hidden_states, widest), forward)
        native = self._native_head(widest)
        if native is None:
            return Logits(self.logits(hidden_states, widest))
        return native.score(hidden_states, confidence=confidence)

    def _native_head(self, rows: int) -> NativeForward | None:
        """The native forward, if it can run norm and head of as many rows of a sequence."""
        native = self.native
        return native if native is not None and native.has_head and rows <= native.most_rows else None

    def _limits(self) -> Iterator[int]:
        """The row limits of all sublayers that have any."""
        for index, sublayer in enumerate(self.sublayers):
            if self.native is not None and self.native.limits[index]:
                yield self.native.limits[index]
            elif isinstance(sublayer, FusedBlock):
                yield from (each.limit for each in sublayer.products if each.limit is not None)

    def _groups(self, forward: Forward) -> list[list[int]]:
        """Divides the parts of a forward: those within all limits together, each of the others by itself."""
        parts, most = forward.parts, self._most_rows
        if len(parts) == 1 or forward.widest <= most:
            return [list(range(len(parts)))]
        small = [index for index, part in enumerate(parts) if part.count <= most]
        large = [[index] for index, part in enumerate(parts) if part.count > most]
        return [small, *large] if small else large

    def _segments(
        self, hidden_states: torch.Tensor, sublayers: tuple[int, ...], forward: Forward
    ) -> list[tuple[bool, int, int]]:
        """Where runs of native sublayers, and of others, begin and end in ``sublayers``."""
        native, widest, count = self.native, forward.widest, len(sublayers)
        if native is None or not native.takes(hidden_states, forward):
            return [(False, 0, count)]
        if widest <= native.limit(sublayers):
            return [(True, 0, count)]
        fits = [widest <= native.limits[index] for index in sublayers]
        starts = [place for place in range(count) if place == 0 or fits[place] != fits[place - 1]]
        return [(fits[start], start, stop) for start, stop in pairwise([*starts, count])]

    def _run(self, hidden_states: torch.Tensor, forward: Forward, task: _Task) -> StackOutput:
        """Runs sublayers segment by segment."""
        sublayers, places = task.sublayers, task.places()
        rows = task.rows(places, len(hidden_states)) if places else {}
        stream, scored = hidden_states, None
        states: dict[int, torch.Tensor] = {}
        for is_native, start, stop in self._segments(hidden_states, sublayers, forward):
            needed = {place - start: count for place, count in rows.items() if start <= place < stop}
            if is_native:
                assert self.native is not None
                stream = stream.clone(memory_format=torch.contiguous_format)
                found = {place: stream.new_empty(count, stream.shape[1]) for place, count in needed.items()}
                last = task.logits and stop == len(sublayers)
                run = sublayers if stop - start == len(sublayers) else sublayers[start:stop]
                scored = self.native.run(stream, run, forward, found, logits=last, confidence=task.confidence)
            else:
                stream, found = self._run_blocks(stream, sublayers[start:stop], forward, needed)
            states |= {start + place: state for place, state in found.items()}
        for index, copy in task.last_rows.items():
            copy.copy_(_last(states.get(places[index], stream), len(copy)))
        captured = {index: states.get(places[index], stream) for index in task.capture}
        return StackOutput(stream, captured, scored)

    def _run_blocks(
        self, stream: torch.Tensor, sublayers: tuple[int, ...], forward: Forward, needed: Mapping[int, int]
    ) -> tuple[torch.Tensor, dict[int, torch.Tensor]]:
        """Runs sublayers one after the other. By place, ``needed`` says how many last rows of the stream to keep."""
        if self.graphs is not None and self.graphs.takes(forward):
            return self._replay_blocks(stream, sublayers, forward, needed)
        home = stream.device
        states: dict[int, torch.Tensor] = {}
        for place, index in enumerate(sublayers):
            if place in needed:
                whole = needed[place] == len(stream)
                states[place] = stream.to(home) if whole else _last(stream, needed[place]).to(home, copy=True)
            stream = self.sublayers[index](stream, forward)
        return stream.to(home), states

    def _replay_blocks(
        self, stream: torch.Tensor, sublayers: tuple[int, ...], forward: Forward, needed: Mapping[int, int]
    ) -> tuple[torch.Tensor, dict[int, torch.Tensor]]:
        """The same by replays, of all sublayers between two places at once."""
        graphs = self.graphs
        assert graphs is not None
        stream, states = graphs.load(stream, forward), {}
        for start, stop in pairwise(sorted({0, len(sublayers), *needed})):
            if start in needed:
                states[start] = _last(stream, needed[start]).clone()
            graphs.run(sublayers[start:stop], stream, forward)
        return stream.clone(), states

    def _run_groups(
        self, groups: Sequence[Sequence[int]], hidden_states: torch.Tensor, forward: Forward, task: _Task
    ) -> StackOutput:
        """Runs groups of a forward's parts one after the other."""
        output = StackOutput(torch.empty_like(hidden_states))
        output.captured = {index: torch.empty_like(hidden_states) for index in task.capture}
        for group in groups:
            places = torch.cat([torch.arange(forward.rows)[forward.slices[index]] for index in group])
            last_rows = dict(_shares(task.last_rows, places, forward.rows))
            ran = self._run(
                hidden_states[places], forward.only(group), replace(task, last_rows=last_rows, logits=False)
            )
            output.hidden_states[places] = ran.hidden_states
            for index, states in ran.captured.items():
                output.captured[index][places] = states
            for index, copy in last_rows.items():
                own = _last(places, len(copy))
                task.last_rows[index][own - (forward.rows - len(task.last_rows[index]))] = copy
        return output


def _shares(
    last_rows: Mapping[int, torch.Tensor], places: torch.Tensor, rows: int
) -> Iterator[tuple[int, torch.Tensor]]:
    """For each copy of last rows, an empty tensor for those of them that are among some rows."""
    for index, copy in last_rows.items():
        count = int((places >= rows - len(copy)).sum())
        yield index, copy.new_empty(count, copy.shape[1])


def _last(rows: torch.Tensor, count: int) -> torch.Tensor:
    return rows[len(rows) - count :]


def _embedding_table(decoder: Decoder) -> tuple[torch.Tensor | PackedWeights | None, float]:
    """The weights of an embedding that takes rows of them and scales them, and the scale; ``None`` for another one."""
    module: Any = decoder.embedding
    own = getattr(module, "scalar_embed_scale", getattr(module, "embed_scale", 1.0))  # the tensor may be on `meta`
    scale = torch.tensor(float(own)).to(decoder.like.dtype)
    factor = float(scale) * float(1.0 if decoder.embedding_scale is None else decoder.embedding_scale)
    if type(module) is LowBitEmbedding:
        return (module.packed if is_plain(module) else None), factor
    known = type(module) is nn.Embedding or decoder.family.owns(module, "TextScaledWordEmbedding")
    if not known or not is_plain(module) or module.max_norm is not None or not is_ordinary(module.weight):
        return None, factor
    return module.weight.detach(), factor
