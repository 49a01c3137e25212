"""The checks of claim 8."""

from collections.abc import Sequence

import numpy as np

from selfspec_lab.checks import Check, compare, shown
from selfspec_lab.experiments.base import Data
from selfspec_lab.experiments.ranks import rank_correlation
from selfspec_lab.experiments.sampled import prompt_means

_FEWEST = 20
"""Pairs that a bin needs for its accepted share to be used."""

_RISES = 0.9
"""Least rank correlation that counts as one quantity rising with another."""


def _total(data: Data, what: str) -> int:
    return sum(figures[what] for figures in data["sets"].values())


def lemma_holds(data: Data) -> Check:
    """Lemma 4.1, a theorem, and the share of the drafts that it covers."""
    pairs, accepted, covered = (_total(data, what) for what in ("pairs", "accepted", "covered"))
    low, middle, high = data["norm_ratio"]
    return shown(
        "every draft state above the lemma's bound has the target's greedy token",
        covered > 0 and _total(data, "counterexamples") == 0,
        f"{_total(data, 'counterexamples')} counterexamples among {covered} pairs above the bound, which are "
        f"{covered / pairs:.1%} of all {pairs} pairs and {covered / max(accepted, 1):.1%} of the {accepted} accepted "
        f"ones (norm of draft ÷ target {middle:.2f}, {low:.2f} to {high:.2f} in 95 % of pairs)",
    )


def accepted_shares(texts: Sequence[Data]) -> dict[int, float]:
    """The accepted share of the pairs by bin of the cosine, nearest first, without bins of too few pairs."""
    pairs, accepted = (np.sum([text[what] for text in texts], axis=0).tolist() for what in ("pairs", "accepted"))
    return {index: accepted[index] / count for index, count in enumerate(pairs) if count >= _FEWEST}


def nearer_drafts_accepted(data: Data) -> Check:
    """A "reliable surrogate for the greedy acceptance rate", draft by draft of one set, as sets differ in size."""
    shares = accepted_shares(data["texts"])
    nearest, farthest = (list(shares.values())[end] if shares else 0.0 for end in (0, -1))
    return compare(
        "of the drafts of one kind of set, the accepted ones have the nearer states",
        prompt_means(data["nearness"], data.get("seeds", 1)),
        f"over all sets {farthest:.2f} accepted in the farthest bin to {nearest:.2f} in the nearest",
        what="chance that an accepted draft is nearer than a rejected one,",
        bound=0.5,
    )


def nearer_sets_accepted(data: Data) -> Check:
    """A "reliable surrogate for the greedy acceptance rate", set by set."""
    sets = data["sets"]
    cosines = [figures["cosine"] for figures in sets.values()]
    rates = [figures["accepted"] / figures["pairs"] for figures in sets.values()]
    correlation = rank_correlation(cosines, rates)
    return shown(  # skipping more lowers both, and the sets are of different sizes
        "kept sets with nearer states have more of their tokens accepted",
        correlation >= _RISES,
        f"rank correlation of mean cosine and accepted share {correlation:.2f} over {len(sets)} kinds of sets, whose "
        f"shares are {min(rates):.2f} to {max(rates):.2f}",
    )
