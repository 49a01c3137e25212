"""How often KnapSpec's candidates will be accepted, by their similarity and by what live rounds say of it."""

import torch

from selfspec.methods.knapsack import Candidates

_DOUBT = 1.0
"""Rows without a match that are added to those of a selection, for sets that match on every one of a few rows."""


class Calibration:
    """The line ``α = 1 - κ (1 - similarity)`` through the candidates of a selection, corrected by live rounds.

    A selection measures acceptance on a few rows, and the set of the highest objective is often one that was lucky on
    them. Similarity varies less from set to set: on SmolLM2-135M the acceptance on the next 100 tokens correlates with
    it by 0.78 and with ``α̂`` of nine rows by 0.63 (twelve contexts, ten sets of each). So ``κ`` is fitted to all
    candidates by least squares, and counts as much as the tokens that it was fitted to. Each tested draft token is one
    more. (Ours: the first choice is the paper's, by ``α̂``; it is looked at again once drafts have been tested.)

    Args:
        candidates: of a selection.
        rows: tokens that it rests on.
    """

    def __init__(self, candidates: Candidates, rows: int) -> None:
        gaps = 1 - candidates.similarities
        missed = 1 - candidates.acceptance * rows / (rows + _DOUBT)
        others = gaps > 0
        self._gaps = gaps
        self._expected = rows * float(gaps[others].mean()) if bool(others.any()) else 0.0
        slope = float((gaps * missed)[others].sum() / gaps[others].square().sum()) if self._expected else 0.0
        self._missed = slope * self._expected

    def note_round(self, similarity: float, tested: int, missed: int) -> None:
        """Counts tested draft tokens.

        Args:
            similarity: of the set that drafted them.
            tested: how many.
            missed: how many of them were not accepted.
        """
        self._expected += tested * (1 - similarity)
        self._missed += missed

    @property
    def acceptance(self) -> torch.Tensor:
        """Expected acceptance of every candidate, float64 ``[n]``."""
        slope = self._missed / self._expected if self._expected else 0.0
        return (1 - slope * self._gaps).clamp(0.0, 1.0)
