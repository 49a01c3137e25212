"""Draft states beside the target's, as KnapSpec's lemma 4.1 has them: cosine, bound, greedy token."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from selfspec.methods.objective import sufficient_cosine
from selfspec_lab.experiments.reading import Reading

EDGES = (0.0, 0.0001, 0.0003, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 2.0)
"""Bins of one minus the cosine, which is how the bound lies: close to a cosine of 1."""


@dataclass(frozen=True)
class Pairs:
    """A target's and a draft's state at each of ``n`` tokens, as the lemma has them: what goes into the LM head.

    Attributes:
        cosines: float64 ``[n]``.
        bounds: float64 ``[n]``, the cosine from which on the lemma promises the same greedy token.
        same: bool ``[n]``, whether the greedy token is the same, that is whether it would be accepted.
        norm_ratios: float64 ``[n]``, norm of the draft's state ÷ norm of the target's.
    """

    cosines: torch.Tensor
    bounds: torch.Tensor
    same: torch.Tensor
    norm_ratios: torch.Tensor

    @property
    def covered(self) -> torch.Tensor:
        """Whether the lemma says something of each pair, bool ``[n]``."""
        return self.cosines >= self.bounds


class Aims:
    """The target's side of the pairs of a text, in double precision.

    The lemma takes states of equal norm. Neither the cosine nor the greedy token changes when a draft's state is scaled
    to the target's norm, so that it speaks of every pair.

    Args:
        reading: the text.
        positions: of the tokens in it.
    """

    def __init__(self, reading: Reading, positions: Sequence[int]) -> None:
        model: Any = reading.target.model
        self._norm: torch.nn.Module = model.model.norm
        self._head: torch.Tensor = model.get_output_embeddings().weight.cpu().double()
        self._states = self._into_head(reading.states[-1, list(positions)])
        self._tokens = self._greedy(self._states)
        self.bounds = torch.stack([sufficient_cosine(state, self._head) for state in self._states])

    def pairs(self, drafted: torch.Tensor) -> Pairs:
        """Holds drafts against the target.

        Args:
            drafted: ``[n, hidden]``, the residual stream behind a draft's last layer at each token.
        """
        states = self._into_head(drafted)
        norms, aims = states.norm(dim=-1), self._states.norm(dim=-1)
        cosines = (states * self._states).sum(-1) / (norms * aims)
        return Pairs(cosines, self.bounds, self._greedy(states) == self._tokens, norms / aims)

    def _into_head(self, hidden_states: torch.Tensor) -> torch.Tensor:
        normed: torch.Tensor = self._norm(hidden_states)
        return normed.cpu().double()  # not every accelerator has double precision

    def _greedy(self, states: torch.Tensor) -> torch.Tensor:
        return (states @ self._head.T).argmax(-1)


def norm_range(drafts: Sequence[Pairs]) -> list[float]:
    """Median of the ratios of norms between the ends of their middle 95 %."""
    ratios = torch.cat([pairs.norm_ratios for pairs in drafts])
    low, median, high = np.quantile(ratios.numpy(), (0.025, 0.5, 0.975))
    return [float(low), float(median), float(high)]


def histogram(distances: torch.Tensor) -> list[int]:
    """How many of some values of one minus a cosine are in each bin; rounding may have put them a little outside."""
    inside = distances.clamp(EDGES[0], EDGES[-1]).numpy()
    return [int(count) for count in np.histogram(inside, EDGES)[0]]


def bins(drafts: Iterable[Pairs]) -> dict[str, list[int]]:
    """By bin the pairs of a text, and those of them that are accepted."""
    pairs, accepted = np.zeros(len(EDGES) - 1, int), np.zeros(len(EDGES) - 1, int)
    for each in drafts:
        pairs += histogram(1 - each.cosines)
        accepted += histogram(1 - each.cosines[each.same])
    return {"pairs": pairs.tolist(), "accepted": accepted.tolist()}


def set_figures(texts: Sequence[Pairs]) -> dict[str, float]:
    """Mean cosine and counts of a kind of set over all texts."""
    covered = torch.cat([pairs.covered for pairs in texts])
    same = torch.cat([pairs.same for pairs in texts])
    return {
        "cosine": float(torch.cat([pairs.cosines for pairs in texts]).mean()),
        "pairs": len(same),
        "accepted": int(same.sum()),
        "covered": int(covered.sum()),
        "counterexamples": int((covered & ~same).sum()),
    }
