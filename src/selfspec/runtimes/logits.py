"""The logits of rows, and what a selection reads of them."""

import torch


class Logits:
    """The logits of some rows.

    What is not given is computed when it is first read.

    Args:
        values: ``[rows, vocab]``, in the model's dtype.
        best: long ``[rows]``.
        confidence: float32 ``[rows]``.
        finite: bool ``[rows]``.
        drawn: ``best`` are the tokens that were drawn, in those parts of the forward that have a drawing.

    Attributes:
        values: see above.
        drawn: see above.
    """

    def __init__(
        self,
        values: torch.Tensor,
        best: torch.Tensor | None = None,
        confidence: torch.Tensor | None = None,
        finite: torch.Tensor | None = None,
        *,
        drawn: bool = False,
    ) -> None:
        self.values, self.drawn = values, drawn
        self._best, self._confidence, self._finite = best, confidence, finite

    @property
    def best(self) -> torch.Tensor:
        """The token of the largest logit of each row, the first of equal ones, or the drawn one: long ``[rows]``."""
        if self._best is None:
            self._best = self.values.argmax(-1)
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
            self._finite = torch.isfinite(self.values.sum(-1, dtype=torch.float32))
        return self._finite

    def row(self, row: int) -> "Logits":
        """The logits of one row."""
        kept = (self._best, self._confidence, self._finite)
        own = (None if each is None else each[row : row + 1] for each in kept)
        return Logits(self.values[row : row + 1], *own, drawn=self.drawn)

    def split(self, counts: list[int]) -> list["Logits"]:
        """The logits of consecutive rows.

        Args:
            counts: numbers of rows, of all rows together.
        """
        if len(counts) == 1:
            return [self]
        kept = (self._best, self._confidence, self._finite)
        parts = [[None] * len(counts) if each is None else torch.split(each, counts) for each in kept]
        values = torch.split(self.values, counts)
        return [Logits(*each, drawn=self.drawn) for each in zip(values, *parts, strict=True)]
