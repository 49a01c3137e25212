"""A native forward: sublayers one after the other in a single call, by one team of threads.

Between sublayers there is neither Python nor a thread that has to be woken. The rows may be those of several sequences:
each row gets the same bits whichever rows run with it.
"""

import ctypes
import time
from collections.abc import Mapping, Sequence
from ctypes import Array, addressof, c_bool, c_int, c_long, c_void_p
from functools import lru_cache
from typing import Any, NamedTuple

import torch

from selfspec.model.forward import Forward, Rows
from selfspec.model.rope import CosSin, Rope
from selfspec.model.sublayers import AttentionSublayer, Sublayer
from selfspec.runtimes.branches import describe_block, describe_weights
from selfspec.runtimes.chain import (
    NATIVE,
    PROBE,
    Chained,
    Drafted,
    DraftRequest,
    Path,
    RunningHead,
    VerifyRequest,
    describe_drawing,
    native_adapter,
)
from selfspec.runtimes.kernels import DTYPES, load, row_limit
from selfspec.runtimes.logits import Chosen, Logits
from selfspec.runtimes.packed import PackedWeights, describe
from selfspec.runtimes.structures import (
    ChainSequence,
    Follow,
    NativeCall,
    NativeChain,
    NativeCosSin,
    NativeDrawing,
    NativeHead,
    NativeSublayer,
    Part,
    PlanForward,
    View,
)
from selfspec.runtimes.threads import THREADS, start_overlapped

_FEW_ROWS = 16
"""Most rows of a call whose time counts for the number of threads: with more it depends on the rows before them."""

_KEPT_SETS = 256
"""Number of sets of sublayers that are remembered in the form that a forward takes."""


class AttentionShape(NamedTuple):
    """Of all layers: heads, key heads, and how many of the layers see a whole text."""

    heads: int
    key_heads: int
    unbounded: int


class NativeForward:
    """Sublayers that can run in a native forward.

    Args:
        sublayers: all of the model; those that ``branches.compile_block`` made take part.
        like: a tensor with the model's dtype, and its hidden size in the last dimension.
        head: final norm and LM head, if they can take part.
        embedding: ``[vocab, hidden]``, perhaps of few bits, if embedding takes rows of it and scales them: what
            chains need.
        embedding_scale: what these rows are multiplied by.
        any_rows: take any number of rows; so does a forward with low-bit weights, which nothing else can multiply.

    Attributes:
        limits: by sublayer, most rows of one sequence in a forward (``kernels.row_limit``); 0 where it is not native.
        most_rows: the smallest limit of native sublayers; 0 where there are none.
        is_whole: all sublayers and the head can take part.
        attention: the shape of all layers' attention; ``None`` where layers differ, or have none.
    """

    def __init__(
        self,
        sublayers: Sequence[Sublayer],
        like: torch.Tensor,
        head: NativeHead | None = None,
        embedding: torch.Tensor | PackedWeights | None = None,
        *,
        embedding_scale: float = 1.0,
        any_rows: bool = False,
    ) -> None:
        self._held = [(block, describe_weights(block)) for block in sublayers]  # the C++ code reads both
        native: list[Any] = [block for block, weights in self._held if weights is not None]
        attention: list[Any] = [block for block in native if isinstance(block, AttentionSublayer)]
        self._windows = list(dict.fromkeys(block.window for block in attention))
        turned = [(block.rope, block.turned) for block in attention if block.turns]
        self._turned = {kind: min(size for other, size in turned if other == kind) for kind, _ in turned}
        self._kinds = list(self._turned)
        self.attention = _attention_of(native)
        self._window_sizes = (c_long * len(self._windows))(*(window or 0 for window in self._windows))
        structures = (
            NativeSublayer() if weights is None else describe_block(block, weights, self._windows, self._kinds)
            for block, weights in self._held
        )
        self._sublayers = (NativeSublayer * len(sublayers))(*structures)
        self._indices = lru_cache(_KEPT_SETS)(lambda indices: (c_int * len(indices))(*indices))
        self.limit = lru_cache(_KEPT_SETS)(self._limit)
        self._head, self._embedding, self._like = head if native else None, embedding, like
        self._embedding_scale = embedding_scale
        self.has_head = self._head is not None
        self._all = tuple(range(len(sublayers)))
        self.is_whole = self.has_head and len(native) == len(sublayers)
        self._dtype, self.most_rows, self.limits = None, 0, [0] * len(sublayers)
        if native:
            self._dtype = native[0].products[0].dtype
            any_rows = any_rows or any(product.bits for block in native for product in block.products)
            for index, (block, weights) in enumerate(self._held):
                if weights is not None:
                    attends = isinstance(block, AttentionSublayer)
                    self.limits[index] = row_limit(self._dtype, attends=attends, low_bit=any_rows)
            self.most_rows = min(limit for limit in self.limits if limit)
            self._call = getattr(load(), f"forward_{DTYPES[self._dtype]}")
            self._draft = getattr(load(), f"draft_{DTYPES[self._dtype]}")
            self._verify = getattr(load(), f"verify_{DTYPES[self._dtype]}")
        self._no_chains = self._find_obstacle()

    def _limit(self, sublayers: tuple[int, ...]) -> int:
        """Most rows of one sequence with which all of some sublayers run natively."""
        return min((self.limits[index] for index in sublayers), default=self.most_rows)

    def takes(self, hidden_states: torch.Tensor, forward: Forward) -> bool:
        """Whether the dtypes of a forward's rows and rotations are those that the kernels take, and heads as long."""
        return hidden_states.dtype == self._dtype and all(
            cosine.dtype in (self._dtype, torch.float32)
            and cosine.is_contiguous()
            and sine.is_contiguous()
            and cosine.shape[-1] <= most
            for ((cosine, sine), _), most in zip(map(forward.table, self._kinds), self._turned.values(), strict=True)
        )

    def run(
        self,
        stream: torch.Tensor,
        sublayers: tuple[int, ...],
        forward: Forward,
        kept: Mapping[int, torch.Tensor] | None = None,
        *,
        logits: bool = False,
        confidence: bool = False,
    ) -> Logits | None:
        """Runs sublayers over the rows of a forward that it ``takes``; the logits, where they are asked for.

        The stream, ``[rows, hidden]`` and contiguous, is changed in place. By place in ``sublayers``, ``kept`` has a
        contiguous tensor ``[k, hidden]`` that gets the last ``k`` rows of the stream before that sublayer. Tokens of
        parts with a drawing are drawn.
        """
        assert stream.is_contiguous()
        assert stream.shape[0] == forward.rows
        tables = [forward.table(kind) for kind in self._kinds]  # held until the call returns
        parts = (Part * len(forward.parts))(
            *(self._part(part, rows.start) for part, rows in zip(forward.parts, forward.slices, strict=True))
        )
        call = self._describe(sublayers, tables, packed=forward.parts[0].sequence.cache.packed)
        call.parts, call.part_count = parts, len(parts)
        if kept:
            addresses, lengths = (c_void_p * len(sublayers))(), (c_long * len(sublayers))()
            for place, tensor in kept.items():
                addresses[place], lengths[place] = tensor.data_ptr(), tensor.shape[0]
            call.kept, call.kept_rows = addresses, lengths
        if not logits:
            self._start(call, stream)
            return None
        drawings = None
        if any(part.drawing is not None for part in forward.parts):
            drawings = (NativeDrawing * forward.rows)(*(describe_drawing(*row) for row in forward.drawings))
        return self._score(call, stream, confidence=confidence, drawings=drawings)

    def _describe(
        self, sublayers: tuple[int, ...], tables: Sequence[tuple[CosSin, int]], *, packed: bool
    ) -> NativeCall:
        """A forward through some sublayers, without its rows; the tables are to be held: a rope may replace its own."""
        return NativeCall(
            sublayers=self._sublayers,
            which=self._indices(sublayers),
            count=len(sublayers),
            turns=(NativeCosSin * len(tables))(*map(_rotation, tables)),
            threads=THREADS.take(),
            packed=packed,
        )

    def _find_obstacle(self) -> Path | None:
        """What of the embedding or the LM head keeps drafts and verifications from running as one call."""
        if self._head is None:
            return Path("the LM head has no kernel")
        if self._embedding is None:
            return Path("the embedding does more than take rows of a table, or a hook changes it")
        table = self._embedding
        tokens, dtype = (
            (table.outputs, self._like.dtype) if isinstance(table, PackedWeights) else (len(table), table.dtype)
        )
        if self._head.outputs > tokens:
            return Path("the LM head has more tokens than the embedding")
        return None if dtype == self._dtype else Path("the embedding has another dtype")

    def chain_path(self, sublayers: tuple[int, ...], rope: Rope) -> Path:
        """Whether drafts through these sublayers can run as one call, or be verified in one."""
        if self.limit(sublayers) == 0:
            return Path("a sublayer has no kernel")
        if self._no_chains is not None:
            return self._no_chains
        return NATIVE if rope.is_fixed else Path("rotations depend on the length of the text")

    def chain(self, requests: Sequence[DraftRequest], rope: Rope, head: RunningHead | None = None) -> list[Drafted]:
        """Drafts tokens of sequences through the same sublayers, one after the other, in forwards that they share.

        ``chain_path`` is native for the sublayers; ``head`` drafts rows of the forwards, where ``Rows`` ask for it.
        Raises what ``stop`` or ``guess`` of a request raised.
        """
        sublayers = requests[0].sublayers
        chained = [Chained(each) for each in requests]
        sequences = (ChainSequence * len(chained))(*(each.structure for each in chained))
        rope.reserve(
            self._like, max(each.state.cache.length + each.limit + 1 for each in requests)
        )  # 1: a probe at the end

        structures = list(sequences)

        def follow(index: int, token_id: int, confidence: float) -> int:
            return chained[index].follow(token_id, confidence)

        def plan() -> None:
            going = [index for index, each in enumerate(chained) if each.goes_on]
            for index in going:
                chained[index].note()
            for index in going:
                chained[index].lay_out().set(structures[index])
                if head is not None:
                    head.limit(index, chained[index].head_limit)

        chain, held = self.describe_chain(rope, sequences, sublayers, packed=requests[0].state.cache.packed)
        chain.follow, chain.plan = Follow(follow), PlanForward(plan)
        if head is not None:
            for index, each in enumerate(chained):
                head.limit(index, each.head_limit)
            chain.head = ctypes.pointer(head.begin(lambda *drafted: chained[drafted[0]].follow_head(*drafted[1:])))
        start_overlapped()
        start = time.perf_counter()
        self._draft(ctypes.byref(chain))
        seconds = time.perf_counter() - start
        del held
        forwards = max(1, *(each.drafted - each.guessed for each in sequences))
        rows = sum(sum(each.forwards) for each in chained)  # those of a run differ from forward to forward
        kind = ("draft", len(sublayers), len(requests), round(rows / forwards), head is not None)
        THREADS.measured(kind, chain.forward.contents.threads, seconds, forwards)
        return [each.output(structure, seconds) for each, structure in zip(chained, structures, strict=True)]

    def verify(self, requests: Sequence[VerifyRequest], rope: Rope) -> tuple[Logits, list[dict[int, torch.Tensor]]]:
        """The logits of the whole model, for which ``chain_path`` is native, and by request the captured states."""
        assert self._head is not None
        rows = sum(len(each.token_ids) for each in requests)
        values = self._like.new_empty(rows, self._head.outputs)
        tokens, finite = (c_long * rows)(), (c_bool * rows)()
        structures, captured = zip(*(each.structure(self._like, len(self._all)) for each in requests), strict=True)
        sequences = (ChainSequence * len(requests))(*structures)
        rope.reserve(self._like, max(each.end for each in requests))
        chain, held = self.describe_chain(rope, sequences, self._all, packed=requests[0].state.cache.packed)
        head = chain.forward.contents.head.contents
        head.out, head.tokens, head.finite = values.data_ptr(), tokens, addressof(finite)
        confidences = None
        if any(int(each.token_ids[-1]) == PROBE for each in requests):
            confidences = torch.empty(rows, dtype=torch.float32)
            head.confidences = confidences.data_ptr()
        start_overlapped()
        start = time.perf_counter()
        self._verify(ctypes.byref(chain))
        if rows <= _FEW_ROWS:
            THREADS.measured(("verify", rows), chain.forward.contents.threads, time.perf_counter() - start)
        del held
        drawn = any(each.drawing is not None for each in requests)
        logits = Logits(values, confidence=confidences, drawn=drawn, chosen=Chosen(tokens[:], finite[:]))
        return logits, list(captured)

    def describe_chain(
        self,
        rope: Rope,
        sequences: "Array[ChainSequence] | None" = None,
        sublayers: tuple[int, ...] | None = None,
        *,
        packed: bool = False,
    ) -> tuple[NativeChain, object]:
        """The structure of a chain through some sublayers, or all, and what has to be held while it runs."""
        sublayers = self._all if sublayers is None else sublayers
        assert self._head is not None
        assert self._embedding is not None
        tables = [(rope.tables[kind], 0) for kind in self._kinds]
        call = self._describe(sublayers, tables, packed=packed)
        call.head = ctypes.pointer(NativeHead.from_buffer_copy(self._head))
        chain = NativeChain(
            forward=ctypes.pointer(call),
            scale=self._embedding_scale,
            windows=self._window_sizes,
            window_count=len(self._windows),
            sequences=sequences,
            count=0 if sequences is None else len(sequences),
        )
        if isinstance(self._embedding, PackedWeights):
            chain.table = ctypes.pointer(describe([self._embedding]))
        else:
            chain.embedding = self._embedding.data_ptr()
        return chain, tables

    def score(self, hidden_states: torch.Tensor, *, confidence: bool = False) -> Logits:
        """Final norm and LM head, which can take part, of the residual stream ``[rows, hidden]``."""
        call = NativeCall(threads=THREADS.take())
        return self._score(call, hidden_states.contiguous(), confidence=confidence)

    def norm(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """The final norm, which can take part: ``[rows, hidden]`` in and out."""
        assert self._head is not None
        normed = torch.empty_like(hidden_states, memory_format=torch.contiguous_format)
        head = NativeHead(self._head.norm, hidden=self._head.hidden, out=normed.data_ptr())
        call = NativeCall(threads=THREADS.take(), head=ctypes.pointer(head))
        self._start(call, hidden_states.contiguous())
        return normed

    def _score(
        self,
        call: NativeCall,
        stream: torch.Tensor,
        *,
        confidence: bool,
        drawings: "Array[NativeDrawing] | None" = None,
    ) -> Logits:
        """Runs a forward with final norm and LM head."""
        assert self._head is not None
        rows = len(stream)
        values, tokens, finite = stream.new_empty(rows, self._head.outputs), (c_long * rows)(), (c_bool * rows)()
        confidences = torch.empty(rows, dtype=torch.float32) if confidence else None
        head = NativeHead.from_buffer_copy(self._head)
        head.out, head.tokens, head.finite = values.data_ptr(), tokens, addressof(finite)
        head.confidences = None if confidences is None else confidences.data_ptr()
        if drawings is not None:
            head.drawings = drawings
        call.head = ctypes.pointer(head)
        self._start(call, stream)
        chosen = Chosen(tokens[:], finite[:])
        return Logits(values, confidence=confidences, drawn=drawings is not None, chosen=chosen)

    def _start(self, call: NativeCall, stream: torch.Tensor) -> None:
        start_overlapped()
        start, rows = time.perf_counter(), stream.shape[0]
        self._call(ctypes.byref(call), stream.data_ptr(), rows)
        if rows <= _FEW_ROWS:
            THREADS.measured((call.count, rows, bool(call.head)), call.threads, time.perf_counter() - start)

    def _part(self, rows: Rows, first_row: int) -> Part:
        cache = rows.sequence.cache
        assert rows.end <= cache.capacity, f"slots up to {rows.end} do not fit a cache of {cache.capacity}"
        views = (View * len(self._windows))(*(self._view(rows, window) for window in self._windows))
        adapter = native_adapter(rows.sequence.adapter)
        part = Part(cache.addresses, cache.capacity, rows.start, first_row, rows.count, views, adapter)
        if rows.seen is not None:
            part.seen = ctypes.pointer(rows.seen.structure)
        return part

    def _view(self, rows: Rows, window: int | None) -> View:
        first = rows.first_slot(window)
        if rows.visible is None and rows.prefix == rows.start:
            if window is None or rows.count == 1:
                return View(None, first, 0)
            if rows.depths is None:
                return View(None, first, window)
        assert self._dtype is not None
        mask = rows.mask(window, self._dtype, additive=False, causal_kernel=False)  # held by ``rows``
        assert mask is not None
        assert mask.is_contiguous()
        return View(mask.data_ptr(), first, 0)


def _attention_of(blocks: Sequence[Any]) -> AttentionShape | None:
    """The shape of all attention among some blocks, where they do not differ."""
    attention: list[Any] = [block for block in blocks if isinstance(block, AttentionSublayer)]
    found = {(block.heads, getattr(block, "key_heads", 1)) for block in attention}  # heads share a latent
    if len(found) != 1:
        return None
    return AttentionShape(*found.pop(), sum(block.window is None for block in attention))


def _rotation(table: tuple[CosSin, int]) -> NativeCosSin:
    """The rotations of a forward's rows, which are in a table from a row on."""
    (cosine, sine), first = table
    dim = cosine.shape[-1]
    skipped = first * dim * cosine.itemsize
    return NativeCosSin(cosine.data_ptr() + skipped, sine.data_ptr() + skipped, dim, cosine.dtype == torch.float32)
