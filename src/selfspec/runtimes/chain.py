"""Tokens to draft and rows to verify: what a sequence asks of the model, what it gets, and the form C++ code takes."""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from ctypes import POINTER, Array, addressof, c_float, c_long, c_void_p, cast, pointer
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol, TypeAlias

import torch

from selfspec.model.forward import Drawing, SequenceState
from selfspec.model.low_rank import Adapter, LowRankSum
from selfspec.runtimes.costs.rows import MOST_PROBES, MOST_SIBLINGS
from selfspec.runtimes.logits import Logits
from selfspec.runtimes.seen_text import AttentionShares, SeenText
from selfspec.runtimes.structures import (
    AdaptedSublayer,
    ChainSequence,
    Linear,
    LowRankOutputs,
    NativeDraftHead,
    NativeDrawing,
    NativeLowRank,
)


@dataclass(frozen=True)
class Path:
    """Whether a draft or a verification runs in one native call, or why it runs forward by forward from Python."""

    reason: str | None = None

    @property
    def native(self) -> bool:
        """Whether it runs in one native call."""
        return self.reason is None

    def __str__(self) -> str:
        return "native" if self.reason is None else f"Python: {self.reason}"


PROBE = -1
"""Stands for the token of a row that has none."""

MOST_PROBED = 1 + MOST_SIBLINGS
"""Most tokens that are said to come by a probe."""

NATIVE = Path()
NO_KERNELS = Path("no kernels run this model here")


Probed: TypeAlias = Sequence[tuple[int, float]]
"""Tokens that may come by a probe, with their probabilities, the likeliest first; empty without a probe."""


class DraftedToken(NamedTuple):
    """A token, long ``[1]``, that was chosen from the logits of a draft's row; ``last`` if the draft ends with it."""

    token: torch.Tensor
    numbers: tuple[torch.Tensor, ...] = ()
    """What the host has to read of the row, the confidence first; copied asynchronously."""
    last: bool = False


Choose: TypeAlias = Callable[[Logits, int], DraftedToken]
"""Chooses the token of one row of logits; the number is that of the tokens drafted before it."""


@dataclass
class HeadDraft:
    """Tokens that a multi-token-prediction head drafts as rows of the coming forward.

    Attributes:
        limit: most of them, 1 or more.
        stop: is given the confidence of each in order, and says whether the draft ends with it.
        token_ids: those that it has drafted.
        confidences: of each.
    """

    limit: int
    stop: Callable[[float], bool] | None = None
    token_ids: list[int] = field(default_factory=list)
    confidences: list[float] = field(default_factory=list)

    def take(self, token_id: int, confidence: float) -> bool:
        """Takes a token; returns whether the draft ends with it."""
        self.token_ids.append(token_id)
        self.confidences.append(confidence)
        return self.stop is not None and self.stop(confidence)


class RunningHead(Protocol):
    """A multi-token-prediction head that drafts in a native run."""

    def begin(self, follow: Callable[[int, int, float], int]) -> NativeDraftHead:
        """The form that the C++ code takes; ``follow`` is called with each token that it drafts."""
        ...

    def limit(self, index: int, tokens: int) -> None:
        """Sets how many tokens it drafts at most for the coming round of a sequence."""
        ...


class NextRows(NamedTuple):
    """What the rows of a forward after the last token's are: known tokens, siblings of the first, and probes.

    Siblings may come in its place; each probe stands after one of the rows. Or what a head drafts, in place of all.
    """

    known: Sequence[int] = ()
    siblings: Sequence[int] = ()
    probes: Sequence[int] = ()
    head: HeadDraft | None = None


class Steps(Protocol):
    """Follows a draft of the whole model, whose tokens are the output's: several rounds of decoding in one call."""

    def note(self, drafted: Sequence[int], probed: Probed) -> None:
        """Called after every forward, if the draft goes on; those of all sequences before any is asked for rows.

        It is given the tokens so far, and what may come by the probe after the last one's row.
        """
        ...

    def next(self) -> NextRows | None:
        """Asked before every forward for its rows; ``None`` ends the draft."""
        ...

    def ends(self, token_id: int) -> bool:
        """Whether the draft ends with a token; it is given each one in order."""
        ...


@dataclass(frozen=True)
class DraftRequest:
    """Tokens to draft after the text of a sequence, one forward of some sublayers a token.

    The forwards write to the cache slots after the committed ones and commit nothing. Guesses are rows of the forward
    that drafts the token before them; those that turn out to be drafted save a forward each and change nothing else.

    Attributes:
        state: the sequence.
        pending: the last token of the text, long ``[1]``.
        sublayers: ascending indices of those that run.
        limit: most tokens to draft, 1 or more.
        stop: is given the confidence of each token in order, and says whether the draft ends with it.
        guess: is given the tokens drafted so far, and guesses those that follow.
        mask_embedding: ``[hidden]``, the embedding of a probe; ``None`` for zero.
        steps: in place of ``stop`` and ``guess``, where it is the whole model that drafts; only where kernels choose.
        choose: chooses the token of each row; ``None`` where kernels do, and all forwards are one native call.
        drawing: how the kernels draw tokens; ``None`` for those of the largest logits.
        seen: what of the text its rows see, in native forwards; ``None`` for all of it.
        shares: takes down how attention divides over the text, in native forwards; ``None`` where none is asked for.
    """

    state: SequenceState
    pending: torch.Tensor
    sublayers: tuple[int, ...]
    limit: int
    stop: Callable[[float], bool] | None = None
    guess: Callable[[Sequence[int]], Sequence[int]] | None = None
    mask_embedding: torch.Tensor | None = None
    steps: Steps | None = None
    choose: Choose | None = None
    drawing: Drawing | None = None
    seen: SeenText | None = None
    shares: AttentionShares | None = None

    def guesses(self, drafted: Sequence[int]) -> list[int]:
        """Guesses of the tokens after the one that the coming forward drafts, as many as may still be drafted."""
        room = self.limit - len(drafted) - 1
        return [] if self.guess is None or room <= 0 else list(self.guess(drafted))[:room]

    def rows(self, drafted: Sequence[int]) -> NextRows | None:
        """The rows of the coming forward after the last token's; ``None`` ends the draft."""
        return NextRows(self.guesses(drafted)) if self.steps is None else self.steps.next()


@dataclass(frozen=True)
class Drafted:
    """What was drafted for a sequence: token ids, long ``[n]``, 1 or more.

    Attributes:
        numbers: of each token what the host has read; the confidence comes first.
        guessed: how many of the tokens were guessed before they were drafted.
        forwards: the rows of each forward.
        finite: how many, from the first on, were chosen from logits that are all numbers, as far as that is known.
        seconds: that the forwards took, with those of other sequences beside them; ``None`` where the host ran between
            them.
    """

    token_ids: torch.Tensor
    numbers: Sequence[Sequence[float]]
    guessed: int
    forwards: tuple[int, ...]
    finite: int = 0
    seconds: float | None = None


@dataclass(frozen=True)
class VerifyRequest:
    """The last token of a sequence's text and drafted tokens after it, for the whole model to run over.

    Attributes:
        state: the sequence; keys and values go to the slots after the committed ones.
        token_ids: long ``[rows]``; ``PROBE`` in rows without a token.
        mask_embedding: ``[hidden]``, their embedding; ``None`` for zero.
        shares: takes down how attention divides over the text, in native forwards; ``None`` where none is asked for.
        drawing: how the tokens that the rows choose are drawn, where kernels compute the logits.
        depths: position of each row, counted from the first; ``None`` for ``0, 1, 2 …``.
        visible: bool ``[rows, rows]``, which rows each row sees; ``None`` for those up to itself.
        capture: sublayers ``i`` (0 to ``2L``) whose ``h[i]`` to return.
    """

    state: SequenceState
    token_ids: torch.Tensor
    drawing: Drawing | None = None
    depths: tuple[int, ...] | None = None
    visible: torch.Tensor | None = None
    capture: Collection[int] = ()
    mask_embedding: torch.Tensor | None = None
    shares: AttentionShares | None = None

    @property
    def end(self) -> int:
        """The slot after the last row's."""
        return self.state.cache.length + len(self.token_ids)

    def structure(self, like: torch.Tensor, sublayers: int) -> tuple[ChainSequence, dict[int, torch.Tensor]]:
        """The form that the C++ code takes, and where it writes captured states.

        ``like`` has the model's dtype, and its hidden size in the last dimension; the model has ``sublayers``.
        """
        tokens = self.token_ids.tolist()
        captured = {index: like.new_empty(len(tokens), like.shape[-1]) for index in self.capture}
        structure = _describe(self, self.end)
        if captured:
            structure.captured = (c_void_p * (sublayers + 1))()
            for index, states in captured.items():
                structure.captured[index] = states.data_ptr()
        structure.tokens, structure.drafted = (c_long * len(tokens))(*tokens), len(tokens) - 1
        if self.drawing is not None and (changed := self.drawing.changed) is not None and changed.has_mask:
            structure.allowed = (c_void_p * len(tokens))(*changed.allow(self._paths(tokens)))
        if self.depths is not None and self.visible is not None:
            assert self.visible.is_contiguous()
            structure.depths = (c_long * len(tokens))(*self.depths)
            structure.visible = self.visible.data_ptr()
        return structure, captured

    def _paths(self, tokens: list[int]) -> Iterator[list[int] | None]:
        """The drafted tokens up to each row, its own included; ``None`` for a row without a token."""
        for row, token in enumerate(tokens):
            if token == PROBE:
                yield None
            elif self.visible is None:
                yield tokens[1 : row + 1]
            else:
                yield [tokens[other] for other in self.visible[row].nonzero()[:, 0].tolist() if other]


@dataclass(frozen=True)
class VerifiedRows:
    """What the model computed of a sequence's rows."""

    logits: Logits
    captured: Mapping[int, torch.Tensor]
    """By sublayer ``i`` its state ``h[i]``, ``[rows, hidden]``."""


class RowsCounts(NamedTuple):
    """How many rows of each kind the next forward has; no forward follows where ``known`` is negative."""

    known: int
    siblings: int = 0
    probes: int = 0

    def set(self, structure: ChainSequence) -> None:
        """Tells the C++ code."""
        structure.guess_count, structure.sibling_count, structure.probe_count = self


class Chained:
    """A ``DraftRequest`` in the form that the C++ code takes.

    Attributes:
        structure: for the C++ code; the memory it points to belongs to this object.
        forwards: the rows of each one so far.
        goes_on: whether there is another forward.
    """

    def __init__(self, request: DraftRequest) -> None:
        limit = request.limit
        self._request = request
        self._failure: BaseException | None = None
        self._drafted: list[int] = []
        self._tokens, self._guesses = (c_long * (1 + limit))(int(request.pending)), (c_long * limit)()
        self._confidences = (c_float * limit)()
        self._siblings, self._probes = (c_long * MOST_SIBLINGS)(), (c_long * MOST_PROBES)()
        self._probed, self._probed_confidences = (c_long * MOST_PROBED)(-1), (c_float * MOST_PROBED)()
        changed = None if request.drawing is None else request.drawing.changed
        self._masked = changed if changed is not None and changed.has_mask else None
        self._allowed = (c_void_p * (1 + limit + MOST_SIBLINGS))()
        self.goes_on, self.forwards = True, list[int]()
        self._head: HeadDraft | None = None
        counts = self._write(request.rows(()))
        self.structure = _describe(request, request.state.cache.length + limit)
        self.structure.limit = limit
        if self._masked is not None:
            self.structure.allowed = self._allowed
        if request.seen is not None:
            self.structure.seen = pointer(request.seen.structure)
        self.structure.tokens, self.structure.confidences = self._tokens, addressof(self._confidences)
        self.structure.guesses, self.structure.siblings = self._guesses, self._siblings
        self.structure.probes = self._probes
        counts.set(self.structure)
        self.structure.probed, self.structure.probed_confidences = self._probed, addressof(self._probed_confidences)

    def follow(self, token_id: int, confidence: float) -> bool:
        """Is called with each drafted token; returns whether the draft ends with it."""
        request, drafted = self._request, self._drafted
        drafted.append(token_id)
        try:
            ends = request.stop is not None and request.stop(confidence)
            ends = ends or (request.steps is not None and request.steps.ends(token_id))
        except BaseException as failure:  # it must not pass through the C++ code
            self._failure, ends = failure, True
        self.goes_on = not ends and len(drafted) < request.limit
        return ends

    @property
    def head_limit(self) -> int:
        """Most tokens that a head drafts as rows of the next forward."""
        return 0 if self._head is None else self._head.limit

    def follow_head(self, token_id: int, confidence: float) -> bool:
        """Is called with each token that a head drafts; returns whether its draft ends with it."""
        assert self._head is not None
        self.forwards[-1] += 1
        try:
            return self._head.take(token_id, confidence)
        except BaseException as failure:
            self._failure = failure
            return True

    def note(self) -> None:
        """Is called after a forward with which the draft has not ended."""
        if (steps := self._request.steps) is not None:
            count = next((index for index, token_id in enumerate(self._probed) if token_id < 0), MOST_PROBED)
            try:
                probed = zip(self._probed[:count], self._probed_confidences[:count], strict=True)
                steps.note(self._drafted, tuple(probed))
            except BaseException as failure:
                self._failure = failure

    def lay_out(self) -> "RowsCounts":
        """Writes the rows of the next forward down."""
        try:
            return self._write(self._request.rows(self._drafted) if self._failure is None else None)
        except BaseException as failure:
            self._failure = failure
            return self._write(None)

    def _write(self, rows: NextRows | None) -> "RowsCounts":
        if rows is None:
            self.goes_on = False
            return RowsCounts(-1)
        known, siblings, probes, self._head = len(rows.known), len(rows.siblings), len(rows.probes), rows.head
        if known:
            self._guesses[:known] = [*rows.known]
        if siblings:
            self._siblings[:siblings] = [*rows.siblings]
        if probes:
            self._probes[:probes] = [*rows.probes]
        if self._masked is not None:
            paths = [rows.known[:row] for row in range(1 + known)] + [[each] for each in rows.siblings]
            self._allowed[: len(paths)] = self._masked.allow([*self._drafted, *path] for path in paths)
        self.forwards.append(1 + known + siblings + probes)
        return RowsCounts(known, siblings, probes)

    def output(self, structure: ChainSequence, seconds: float) -> Drafted:
        """What was drafted, by the structure as the chain has left it; raises what ``stop`` or ``guess`` raised.

        ``seconds`` are those of the call.
        """
        if self._failure is not None:
            raise self._failure
        count = structure.drafted
        return Drafted(
            torch.tensor(self._drafted, dtype=torch.long),
            [(confidence,) for confidence in self._confidences[:count]],
            structure.guessed,
            tuple(self.forwards),
            structure.finite,
            seconds,
        )


def _describe(request: DraftRequest | VerifyRequest, end: int) -> ChainSequence:
    """A sequence for the C++ code, with slots up to ``end``."""
    state, mask_embedding = request.state, request.mask_embedding
    cache, shares = state.cache, None if request.shares is None else request.shares.values
    assert end <= cache.capacity, f"slots up to {end} do not fit a cache of {cache.capacity}"
    return ChainSequence(
        caches=cache.addresses,
        capacity=cache.capacity,
        start=cache.length,
        layers=len(cache.keys),
        planes=cache.planes,
        slot_bytes=cache.plane_slot_bytes,
        mask_embedding=None if mask_embedding is None else mask_embedding.data_ptr(),
        drawing=describe_drawing(request.drawing, cache.length + 1),
        adapter=native_adapter(state.adapter),
        shares=None if shares is None else shares.data_ptr(),
        share_blocks=0 if shares is None else shares.shape[-1],
    )


def describe_drawing(drawing: Drawing | None, position: int) -> NativeDrawing:
    """How the token at a position is drawn, for the C++ code; ``None`` for the token of the largest logit."""
    if drawing is None:
        return NativeDrawing()
    likely = drawing.likely
    native = NativeDrawing(drawing.key, position, drawing.temperature, likely.top_p, likely.min_p, likely.top_k)
    if drawing.changed is not None:
        drawing.changed.describe(native)
    return native


def native_adapter(adapter: Adapter | None) -> "Array[AdaptedSublayer] | None":
    """An adapter in the form that the kernels take: by sublayer. It lives as long as the adapter."""
    if adapter is None:
        return None
    if "native" not in adapter.memo:
        described = (AdaptedSublayer * adapter.sublayers)()
        for (sublayer, product), added in adapter.sums.items():
            setattr(described[sublayer], product.name.lower(), _describe_sum(added))
        adapter.memo["native"] = described  # whole: threads share it
    native: Array[AdaptedSublayer] = adapter.memo["native"]
    return native


def _describe_sum(added: LowRankSum) -> NativeLowRank:
    outputs = (LowRankOutputs(each.up.data_ptr(), *each.up.shape, each.first, each.scale) for each in added.factors)
    described = (LowRankOutputs * len(added.factors))(*outputs)
    outputs_pointer = cast(described, POINTER(LowRankOutputs))
    return NativeLowRank(Linear(added.down.data_ptr()), len(added.down), outputs_pointer, len(added.factors))
