"""The logits of rows, and what a selection reads of them."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import torch


@dataclass(frozen=True)
class Chosen:
    """What is chosen from the logits of rows, known to the host."""

    token_ids: Sequence[int]
    """The token of the largest logit of each row, or the drawn one."""
    finite: Sequence[bool]
    """Whether all logits of each row are numbers."""


class Logits:
    """The logits of some rows, ``[rows, vocab]``, in the model's dtype. What is not given is computed when first read.

    ``drawn``: ``best`` are the tokens that were drawn, in those parts of the forward that have a drawing.
    ``chosen`` has ``best`` and ``finite`` where the host knows them.
    """

    def __init__(
        self,
        values: torch.Tensor,
        best: torch.Tensor | None = None,
        confidence: torch.Tensor | None = None,
        finite: torch.Tensor | None = None,
        *,
        drawn: bool = False,
        chosen: Chosen | None = None,
    ) -> None:
        self.values, self.drawn, self.chosen = values, drawn, chosen
        self._best, self._confidence, self._finite = best, confidence, finite

    @property
    def best(self) -> torch.Tensor:
        """The token of the largest logit of each row, the first of equal ones, or the drawn one: long ``[rows]``."""
        if self._best is None:
            known = self.chosen
            self._best = self.values.argmax(-1) if known is None else torch.tensor(known.token_ids, dtype=torch.long)
        return self._best

    @property
    def confidence(self) -> torch.Tensor:
        """The largest probability of each row, float32 ``[rows]``."""
        if self._confidence is None:
            self._confidence = torch.softmax(self.values.float(), dim=-1).amax(-1)
        return self._confidence

    @property
    def finite(self) -> torch.Tensor:
        """Whether all logits of each row are numbers, bool ``[rows]``: a sum is finite only if every term is."""
        if self._finite is None:
            if self.chosen is not None:
                self._finite = torch.tensor(self.chosen.finite)
            else:
                self._finite = torch.isfinite(self.values.sum(-1, dtype=torch.float32))
        return self._finite

    def row(self, row: int) -> "Logits":
        """The logits of one row."""
        return self._part(row, row + 1)

    def split(self, counts: list[int]) -> list["Logits"]:
        """The logits of consecutive rows, in numbers that add up to all rows."""
        if len(counts) == 1:
            return [self]
        return [self._part(start, end) for start, end in pairwise(accumulate(counts, initial=0))]

    def _part(self, start: int, end: int) -> "Logits":
        kept, known = (self._best, self._confidence, self._finite), self.chosen
        own = (None if each is None else each[start:end] for each in kept)
        chosen = None if known is None else Chosen(known.token_ids[start:end], known.finite[start:end])
        return Logits(self.values[start:end], *own, drawn=self.drawn, chosen=chosen)
