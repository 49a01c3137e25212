"""How logits change before a token is chosen, in the form that kernels take: biases, penalties, masks."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from ctypes import addressof, c_float, c_int, c_long, pointer
from dataclasses import dataclass, field
from typing import Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from selfspec.runtimes.structures import NativeChanges, NativeDrawing

Allowed: TypeAlias = npt.NDArray[np.uint8]
"""Of each token a bit, whether it may be chosen: ``[vocab / 8]``, the first in the lowest bit of the first byte."""


class Mask(Protocol):
    """Forbids tokens by those of the output before them. ``vocab_size`` is the number of tokens."""

    vocab_size: int

    def allowed_after(self, output: Sequence[int], path: Sequence[int]) -> Allowed | None:
        """Which tokens may follow an output and drafted tokens after it; ``None`` for all."""
        ...

    def forced_after(self, output: Sequence[int]) -> Sequence[int]:
        """Tokens that spell what has to follow an output, whatever comes after that; maybe none."""
        ...


@dataclass(frozen=True)
class Changes:
    """Biases and penalties of a request, in the order in which they apply (``SamplingParams``), and a mask after them.

    Attributes:
        bias: what is added to the logits of single tokens, by id.
        repetition: divides those above 0 of tokens of the text, and multiplies the others.
        presence: is subtracted from those of tokens that were written.
        frequency: the same, for each time.
        first_end: the first position for which ``end_ids`` may be chosen.
        end_ids: tokens that end the output.
        mask: forbids tokens; ``None`` for none.
    """

    bias: Mapping[int, float] = field(default_factory=dict)
    repetition: float = 1.0
    presence: float = 0.0
    frequency: float = 0.0
    first_end: int = 0
    end_ids: Collection[int] = ()
    mask: Mask | None = None


class ChangedLogits:
    """The tokens of a sequence whose logits change, which are more as its text grows, and those that are allowed.

    Args:
        changes: how they change.
        prompt_ids: its prompt.
        new_tokens: most tokens that are written.
    """

    def __init__(self, changes: Changes, prompt_ids: Sequence[int], new_tokens: int) -> None:
        text = dict.fromkeys(prompt_ids) if changes.repetition != 1 else {}
        known, ends = [*dict.fromkeys((*changes.bias, *text))], [*changes.end_ids]
        self._mask, self._output, self._held = changes.mask, list[int](), list[Allowed | None]()
        self._places = {token_id: place for place, token_id in enumerate(known)}
        most = len(known) + new_tokens
        self._tokens, self._times, self._bias = (c_long * most)(*known), (c_int * most)(), (c_float * most)()
        self._times[: len(known)] = [0 if token_id in text else -1 for token_id in known]
        self._bias[: len(known)] = [changes.bias.get(token_id, 0.0) for token_id in known]
        self._structure = NativeChanges(
            tokens=self._tokens,
            times=self._times,
            bias=addressof(self._bias),
            count=len(known),
            ends=(c_long * len(ends))(*ends),
            end_count=len(ends),
            first_end=changes.first_end,
            repetition=changes.repetition,
            presence=changes.presence,
            frequency=changes.frequency,
        )

    def write(self, token_ids: Iterable[int]) -> None:
        """Notes tokens that were written."""
        for token_id in token_ids:
            place = self._places.setdefault(token_id, len(self._places))
            self._tokens[place], self._times[place] = token_id, max(0, self._times[place]) + 1
            self._output.append(token_id)
        self._structure.count = len(self._places)

    def describe(self, drawing: NativeDrawing) -> None:
        """Adds the changes to how a token is drawn; this object has to live as long."""
        drawing.changes = pointer(self._structure)
        drawing.allowed_bytes = 0 if self._mask is None else -(-self._mask.vocab_size // 8)

    @property
    def has_mask(self) -> bool:
        """Whether a mask forbids tokens."""
        return self._mask is not None

    def allow(self, paths: Iterable[Sequence[int] | None]) -> list[int | None]:
        """Where the kernels find what is allowed in each row after drafted tokens, until the next call.

        ``None`` where all tokens are, as in a row of unknown tokens (``None``).

        Raises:
            SelfSpecError: of the mask.
        """
        assert self._mask is not None
        self._held = [None if path is None else self._mask.allowed_after(self._output, path) for path in paths]
        return [None if allowed is None else allowed.ctypes.data for allowed in self._held]
