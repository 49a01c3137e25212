"""Chains of tokens: what goes into their drafting and their verification, and what comes out.

The forwards that draft a chain follow each other in a single native call; each runs over the tokens that the one before
it chose. Between them there is nothing but a call back, which says whether the draft goes on.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from ctypes import c_float, c_long, c_void_p
from dataclasses import dataclass
from typing import TypeAlias

import torch

from selfspec.model.forward import Drawing, Forward, SequenceState
from selfspec.runtimes.structures import ChainSequence, NativeDrawing

Follow: TypeAlias = Callable[[int, float, bool], Sequence[int] | None]
"""Hears of each drafted token: its id, its confidence, and whether guesses are wanted of the tokens after it.

It returns guesses, at most as many as may still be drafted less one, or ``None`` to end the draft with this token.
"""


@dataclass(frozen=True)
class ChainRequest:
    """The part of a sequence in a chain, before it runs.

    Attributes:
        forward: one row for each token that it may draft, in the slots after the committed ones, with how it is drawn.
        token_id: the last token of the text.
        guesses: of the first tokens, one less than it may draft at most; rows of the first forward.
        follow: hears of the drafted tokens.
        capture: sublayers ``i`` (0 to ``2L``) whose ``h[i]`` to keep.
    """

    forward: Forward
    token_id: int
    guesses: Sequence[int]
    follow: Follow
    capture: Collection[int] = ()

    @property
    def limit(self) -> int:
        """Most tokens to draft, 1 or more."""
        return self.forward.rows


@dataclass(frozen=True)
class ChainRows:
    """The part of a sequence in a forward over the last token of its text and tokens after it.

    Attributes:
        sequence: with a slot for each token after the committed ones.
        token_ids: the last token of the text and those after it.
        drawing: how the tokens that the rows choose are drawn; ``None`` for those of the largest logits.
    """

    sequence: SequenceState
    token_ids: Sequence[int]
    drawing: Drawing | None = None

    @property
    def end(self) -> int:
        """The slot after the last row's."""
        return self.sequence.cache.length + len(self.token_ids)

    def structure(self) -> ChainSequence:
        """The form that the C++ code takes."""
        cache, tokens = self.sequence.cache, self.token_ids
        start, count = cache.length, len(tokens)
        assert self.end <= cache.capacity, f"slots up to {self.end} do not fit a cache of {cache.capacity}"
        return ChainSequence(
            caches=cache.addresses,
            capacity=cache.capacity,
            start=start,
            tokens=(c_long * count)(*tokens),
            drafted=count - 1,
            drawing=describe_drawing(self.drawing, start + 1),
        )


@dataclass(frozen=True)
class ChainOutput:
    """What a sequence drafted.

    Attributes:
        token_ids: 1 or more.
        confidences: the draft's largest probability at each token.
        captured: by sublayer ``i`` the state ``h[i]`` of the rows that chose the tokens, ``[n, hidden]``.
        guessed: how many of the tokens were guessed before they were drafted.
        finite: how many, from the first on, were chosen from logits that are all numbers.
    """

    token_ids: tuple[int, ...]
    confidences: tuple[float, ...]
    captured: Mapping[int, torch.Tensor]
    guessed: int
    finite: int


class Chained:
    """The part of a sequence in a chain, in the form that the C++ code takes.

    Args:
        request: of the sequence.
        places: by captured sublayer its place among the sublayers that run.
        count: number of sublayers that run.
        like: any tensor with the model's dtype and hidden size in its last dimension.

    Attributes:
        structure: for the C++ code; the memory it points to belongs to this object.
    """

    def __init__(self, request: ChainRequest, places: Mapping[int, int], count: int, like: torch.Tensor) -> None:
        (rows,), limit = request.forward.parts, request.limit
        cache = rows.sequence.cache
        assert rows.end <= cache.capacity, f"slots up to {rows.end} do not fit a cache of {cache.capacity}"
        self._request, self._places = request, places
        self._tokens, self._guesses = (c_long * (1 + limit))(request.token_id), (c_long * limit)(*request.guesses)
        self._confidences = (c_float * limit)()
        self._states = {place: like.new_empty(limit, like.shape[-1]) for place in places.values()}
        self.structure = ChainSequence(
            caches=cache.addresses,
            capacity=cache.capacity,
            start=rows.start,
            limit=limit,
            tokens=self._tokens,
            confidences=self._confidences,
            guesses=self._guesses,
            guess_count=len(request.guesses),
        )
        if self._states:
            self.structure.kept = (c_void_p * (count + 1))()
            for place, states in self._states.items():
                self.structure.kept[place] = states.data_ptr()
        if rows.drawing is not None:
            self.structure.drawing = describe_drawing(rows.drawing, rows.start + 1)
        self._failure: BaseException | None = None

    def follow(self, token_id: int, confidence: float, *, asks: bool) -> int:
        """Hears of a drafted token; see ``Follow``. Returns the number of guesses that it wrote down, or -1."""
        try:
            guesses = self._request.follow(token_id, confidence, asks)
            if guesses is None:
                return -1
            if asks:
                self._guesses[: len(guesses)] = list(guesses)
            return len(guesses)
        except BaseException as failure:  # it must not pass through the C++ code
            self._failure = failure
            return -1

    def output(self, structure: ChainSequence) -> ChainOutput:
        """What was drafted.

        Args:
            structure: a copy of this one's, as the chain has left it.

        Raises:
            BaseException: what ``follow`` raised.
        """
        if self._failure is not None:
            raise self._failure
        drafted = structure.drafted
        return ChainOutput(
            tuple(self._tokens[1 : 1 + drafted]),
            tuple(self._confidences[:drafted]),
            {index: self._states[place][:drafted] for index, place in self._places.items()},
            structure.guessed,
            structure.finite,
        )


def describe_drawing(drawing: Drawing | None, position: int) -> NativeDrawing:
    """How a token is drawn, for the C++ code.

    Args:
        drawing: ``None`` for the token of the largest logit.
        position: of the token.
    """
    return NativeDrawing() if drawing is None else NativeDrawing(drawing.key, position, drawing.temperature)
