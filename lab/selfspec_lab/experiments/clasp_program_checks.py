"""The checks of claim 4."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from selfspec_lab.checks import Check, compare
from selfspec_lab.experiments.base import Data
from selfspec_lab.experiments.ranks import rank_correlation
from selfspec_lab.experiments.sampled import prompt_means

NEAR = 0.9
"""Limit for "near brute force" and "far above random"; our choice, as the paper has a picture without numbers."""


@dataclass(frozen=True)
class Searched:
    """A figure of skipped sets of one size, mean over tokens.

    Attributes:
        program: of the set that the dynamic program picks.
        best: of the set whose final state is nearest to the target's.
        random: of a random set, that is the mean over all sets.
    """

    program: float
    best: float
    random: float

    @property
    def beyond_near(self) -> float:
        """By how much the program closes more than ``NEAR`` of the gap between random and brute force."""
        return self.program - self.random - NEAR * (self.best - self.random)


def chance_similarity(total: int, size: int) -> float:
    """Mean Jaccard similarity of two independent random sets of ``size`` of ``total``."""
    pairs = math.comb(total, size)
    shared = range(max(0, 2 * size - total), size + 1)
    return sum(
        math.comb(size, both) * math.comb(total - size, size - both) / pairs * both / (2 * size - both)
        for both in shared
    )


def means_of(data: Data, values: Sequence[float]) -> list[float]:
    """The means over the texts of each prompt, of a value for each text."""
    return prompt_means(values, data.get("seeds", 1))


def _searched(data: Data, what: str) -> list[Searched]:
    return [Searched(**text[what]) for text in data["texts"]]


def _mean_of(data: Data, what: str) -> Searched:
    texts = _searched(data, what)
    return Searched(*(fmean(getattr(text, name) for text in texts) for name in ("program", "best", "random")))


def near_brute_force(data: Data, what: str, words: str) -> Check:
    """Figure 3b: how much of the gap between random sets and the best one the program closes.

    Args:
        data: of the experiment.
        what: ``cosine`` or ``agreement``.
        words: description of the figure.
    """
    mean = _mean_of(data, what)
    gap = mean.best - mean.random
    share = f"{(mean.program - mean.random) / gap:.2f} of the gap closed" if gap > 0 else "no gap"
    return compare(
        f"the program closes at least {NEAR} of the gap between random sets and brute force {words}",
        means_of(data, [text.beyond_near for text in _searched(data, what)]) if gap > 0 else [],
        f"{mean.program:.3f} against {mean.best:.3f} by brute force and {mean.random:.3f} at random: {share} "
        f"({data['tokens']} tokens, {data['sets']} sets)",
        what=f"less {NEAR} of the gap",
        counts=what == "cosine",  # the paper shows cosines alone
        form="+.4f",
    )


def far_above_random(data: Data) -> Check:
    """Figure 3b: the place of the program's set among all of its size."""
    return compare(
        f"the program's set is nearer to the target than {NEAR} of all sets of its size",
        means_of(data, [text["beaten"] for text in data["texts"]]),
        what="share of the sets that are farther",
        bound=NEAR,
    )


def neighbours_similar(data: Data) -> Check:
    """Figure 3a: "high similarity" of the sets of adjacent tokens."""
    chance = chance_similarity(data["layers"], data["skipped_layers"])
    return compare(
        "the sets of adjacent tokens are more alike than random sets",
        means_of(data, [text["similarity"][0] for text in data["texts"]]),
        f"random sets have {chance:.2f}; the paper has a picture without numbers",
        what="Jaccard similarity",
        bound=chance,
    )


def falls_with_distance(data: Data) -> Check:
    """Figure 3a: the similarity "gradually decreases as the gap increases"."""
    first, last = data["distances"][0], data["distances"][-1]
    falls = [text["similarity"][0] - text["similarity"][-1] for text in data["texts"]]
    ranks = [rank_correlation(data["distances"], text["similarity"]) for text in data["texts"]]
    ends = [fmean(text["similarity"][end] for text in data["texts"]) for end in (0, -1)]
    return compare(
        "the similarity of sets falls with the distance of the tokens",
        means_of(data, falls),
        f"{ends[0]:.2f} at distance {first}, {ends[1]:.2f} at {last}; rank correlation with distance "
        f"{fmean(ranks):.2f}",
        what="fall",
    )
