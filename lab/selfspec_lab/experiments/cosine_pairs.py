"""Pairs of draft and target states as in KnapSpec's lemma 4.1: cosine, bound, greedy token."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from scipy import stats

from selfspec.runtimes.packed import LowBitLinear
from selfspec_lab.experiments.reading import Reading
from selfspec_lab.formulas import sufficient_cosine

EDGES = (0.0, 0.0001, 0.0003, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 2.0)
"""Edges of bins of ``1 - cosine``; narrow near 0, where the bounds are."""


@dataclass(frozen=True)
class Pairs:
    """The target's and a draft's input of the LM head at each of ``n`` tokens.

    Attributes:
        cosines: float64 ``[n]``.
        bounds: float64 ``[n]``, the cosine above which the lemma guarantees the same greedy token.
        same: bool ``[n]``, whether the greedy tokens are equal, so that the draft token is accepted.
        norm_ratios: float64 ``[n]``, norm of the draft's state ÷ norm of the target's.
    """

    cosines: torch.Tensor
    bounds: torch.Tensor
    same: torch.Tensor
    norm_ratios: torch.Tensor

    @property
    def covered(self) -> torch.Tensor:
        """Whether each pair is above the lemma's bound, bool ``[n]``."""
        return self.cosines >= self.bounds


class TargetStates:
    """The target's side of the pairs of a text, in double precision.

    The lemma assumes states of equal norm. Scaling a draft's state to the target's norm changes neither its cosine nor
    its greedy token, so the lemma applies to every pair.

    Args:
        reading: the text.
        positions: indices of the tokens.
    """

    def __init__(self, reading: Reading, positions: Sequence[int]) -> None:
        model: Any = reading.target.model
        self._norm: torch.nn.Module = model.model.norm
        self._head = _weights(model.get_output_embeddings()).cpu().double()
        self._states = self._into_head(reading.states[-1, list(positions)])
        self._tokens = self._greedy(self._states)
        self.bounds = sufficient_cosine(self._states, self._head)

    def pairs(self, drafted: torch.Tensor) -> Pairs:
        """Pairs draft states with the target's.

        Args:
            drafted: ``[n, hidden]``, a draft's residual stream after its last layer.
        """
        states = self._into_head(drafted)
        norms, target_norms = states.norm(dim=-1), self._states.norm(dim=-1)
        cosines = (states * self._states).sum(-1) / (norms * target_norms)
        return Pairs(cosines, self.bounds, self._greedy(states) == self._tokens, norms / target_norms)

    def _into_head(self, hidden_states: torch.Tensor) -> torch.Tensor:
        normed: torch.Tensor = self._norm(hidden_states)
        return normed.cpu().double()  # not every accelerator has double precision

    def _greedy(self, states: torch.Tensor) -> torch.Tensor:
        return (states @ self._head.T).argmax(-1)


def _weights(head: torch.nn.Module) -> torch.Tensor:
    """The values of the LM head, ``[vocab, hidden]``."""
    if isinstance(head, LowBitLinear):
        return head.packed.unpack()
    assert isinstance(head, torch.nn.Linear)
    return head.weight.data


def norm_range(drafts: Sequence[Pairs]) -> list[float]:
    """The 2.5 %, 50 % and 97.5 % quantiles of the ratios of norms."""
    ratios = torch.cat([pairs.norm_ratios for pairs in drafts])
    low, median, high = np.quantile(ratios.numpy(), (0.025, 0.5, 0.975))
    return [float(low), float(median), float(high)]


def histogram(distances: torch.Tensor) -> list[int]:
    """Counts values of ``1 - cosine`` by bin; values that rounding put outside are clamped."""
    inside = distances.clamp(EDGES[0], EDGES[-1]).numpy()
    return [int(count) for count in np.histogram(inside, EDGES)[0]]


def bins(drafts: Iterable[Pairs]) -> dict[str, list[int]]:
    """The pairs of a text and the accepted pairs, counted by bin."""
    pairs, accepted = np.zeros(len(EDGES) - 1, int), np.zeros(len(EDGES) - 1, int)
    for each in drafts:
        pairs += histogram(1 - each.cosines)
        accepted += histogram(1 - each.cosines[each.same])
    return {"pairs": pairs.tolist(), "accepted": accepted.tolist()}


def nearness(drafts: Iterable[Pairs]) -> float:
    """The chance that an accepted draft of a text has the nearer state than a rejected one of the same kind of set.

    The mean over the kinds with drafts of both sorts; 0.5 if the cosine tells nothing, and where there is no such kind.
    """
    chances = []
    for each in drafts:
        accepted, rejected = each.cosines[each.same].numpy(), each.cosines[~each.same].numpy()
        if len(accepted) and len(rejected):
            chances.append(stats.mannwhitneyu(accepted, rejected).statistic / (len(accepted) * len(rejected)))
    return float(np.mean(chances)) if chances else 0.5


def set_figures(texts: Sequence[Pairs]) -> dict[str, float]:
    """Mean cosine and counts for a kind of set, over all texts."""
    covered = torch.cat([pairs.covered for pairs in texts])
    same = torch.cat([pairs.same for pairs in texts])
    return {
        "cosine": float(torch.cat([pairs.cosines for pairs in texts]).mean()),
        "pairs": len(same),
        "accepted": int(same.sum()),
        "covered": int(covered.sum()),
        "counterexamples": int((covered & ~same).sum()),
    }
