"""Which sublayers to leave out, as a 0/1 knapsack: KnapSpec's two stages, without any model in them."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from selfspec.decoding.fused_selection import Passage
from selfspec.methods.objective import tokens_per_time
from selfspec.model.kept import KeptSet
from selfspec.runtimes.latency import LatencyProfile

MAX_WEIGHT = 5
"""Heaviest item: the lighter kind of sublayer weighs 1, the other at most this much (authors' code)."""
_SMALLEST_LENGTH = 1e-8
"""Shorter states count as this long, so that the cosine of one of length 0 is 0."""


def integer_weights(attention_seconds: float, mlp_seconds: float) -> tuple[int, int]:
    """Latencies as integers: ``w = round(t / Δ)`` with ``Δ = min(t_attn, t_mlp)``, at most ``MAX_WEIGHT``.

    Args:
        attention_seconds: ``t_attn(n)``, above 0.
        mlp_seconds: ``t_mlp``, above 0.

    Returns:
        Weight of an attention and of an MLP sublayer (KnapSpec, section 3.4, integer weight normalization).
    """
    unit = min(attention_seconds, mlp_seconds)
    attention, mlp = (math.floor(min(seconds / unit, MAX_WEIGHT) + 0.5) for seconds in (attention_seconds, mlp_seconds))
    return attention, mlp


@dataclass(frozen=True)
class Table:
    """The last row of the dynamic program, and how each of its entries came about.

    Attributes:
        states: ``g[n, j]``, ``[budget + 1, rows, hidden]``: behind the last sublayer, with skipped weight ``j``. Where
            there is no such state it holds anything.
        similarities: float32 ``[budget + 1]``, mean cosine of the rows to the target's; ``-inf`` where there is none.
        skips: bool ``[n, budget + 1]``, whether the entry of this weight behind this sublayer came by skipping it.
    """

    states: torch.Tensor
    similarities: torch.Tensor
    skips: torch.Tensor


@dataclass(frozen=True)
class Candidates:
    """The sets that one dynamic program proposes, one for every skipped weight.

    Attributes:
        kept: by candidate the sublayers that it runs; the first is the whole model.
        similarities: float64 ``[n]``, mean cosine of its last hidden states to the target's.
        acceptance: float64 ``[n]``, ``α̂``: share of the recent tokens at which it chooses as the target does.
    """

    kept: tuple[KeptSet, ...]
    similarities: torch.Tensor
    acceptance: torch.Tensor


@dataclass(frozen=True)
class Selection:
    """What was selected, and why.

    Attributes:
        kept: ``S``.
        draft_length: ``γ``.
        acceptance: ``α̂`` of the set.
        tokens_per_second: TPT of set and length.
    """

    kept: KeptSet
    draft_length: int
    acceptance: float
    tokens_per_second: float


def fill_table(
    references: torch.Tensor,
    weights: Sequence[int | None],
    budget: int,
    similarity_threshold: float,
    first: int = 0,
) -> Passage[Table]:
    """Algorithm 1 of KnapSpec: for every skipped weight the states closest to the target's own.

    ``g[i, j]`` is the better of running sublayer ``i`` on ``g[i - 1, j]`` and of skipping it, ``g[i - 1, j - w]``, by
    the mean cosine of its rows to ``X(i)`` (equations 7 and 8). States under the threshold or over the budget are
    pruned. All ``j`` of one ``i`` go through the sublayer together; ``j = 0`` is the target itself and need not.

    Args:
        references: ``X``, ``[n + 1, rows, hidden]``: the target's states before each sublayer and behind the last.
        weights: of each sublayer; ``None`` where it is never skipped.
        budget: largest skipped weight.
        similarity_threshold: ``τ``, smallest mean cosine of a state that is kept.
        first: index of the first of the ``n`` sublayers.

    Returns:
        The filled table.
    """
    width = budget + 1
    states = references[:1].repeat(width, 1, 1)
    behind = torch.zeros_like(states)  # the next row, which takes turns with this one
    similarities = torch.full((width,), -math.inf, device=references.device)
    similarities[0] = 1.0
    skips = torch.empty((len(weights), width), dtype=torch.bool, device=references.device)
    reachable = 0
    for index, weight in enumerate(weights):
        reference, skip = references[index + 1], skips[index]
        behind[0] = reference
        branches = _rounded_up(reachable, budget)
        if branches:
            behind[1 : 1 + branches] = yield first + index, states[1 : 1 + branches]
        ran_similarities = _similarities(behind, reference, similarities)
        shift = width if weight is None else min(weight, width)  # from skipped weight j to j + w, where there is room
        skipped, movable = states[: width - shift], similarities[: width - shift]
        skipped_similarities = torch.full_like(similarities, -math.inf)
        skipped_similarities[shift:] = _similarities(skipped, reference, movable)
        torch.gt(skipped_similarities, ran_similarities, out=skip)
        torch.where(skip[shift:, None, None], skipped, behind[shift:], out=behind[shift:])
        states, behind = behind, states
        similarities = torch.maximum(ran_similarities, skipped_similarities)
        similarities = similarities.masked_fill(similarities < similarity_threshold, -math.inf)
        reachable = min(budget, reachable + (weight or 0))
    return Table(states, similarities, skips)


def backtrack(skips: torch.Tensor, weights: Sequence[int | None]) -> torch.Tensor:
    """Which sublayers each entry of the last row skips (KnapSpec, algorithm 2, for all entries at once).

    Args:
        skips: from a table, bool ``[n, budget + 1]``, on the host.
        weights: as the table was filled with.

    Returns:
        bool ``[budget + 1, n]``; rows of entries that do not exist mean nothing.
    """
    entry = torch.arange(skips.shape[1])
    skipped = torch.zeros(skips.shape[1], skips.shape[0], dtype=torch.bool)
    for index in reversed(range(len(weights))):
        skipped[:, index] = skips[index, entry]
        entry = entry - (weights[index] or 0) * skipped[:, index]
    return skipped


def best_candidate(
    candidates: Candidates, profile: LatencyProfile, context: int, max_draft_length: int, *, with_head: bool
) -> Selection:
    """The second stage (section 3.5): set and draft length of the highest TPT (equation 4).

    The whole model is among the candidates. Its TPT is that of plain decoding, whatever the draft length.

    Args:
        candidates: what the dynamic program found.
        profile: the latencies.
        context: tokens in the cache.
        max_draft_length: ``D``; lengths from 1 on are tried.
        with_head: count what a step does outside of its sublayers.

    Returns:
        The best choice; on a tie the one that skips less, then the shorter one.
    """
    steps = [profile.draft_step(kept, context, with_head=False) for kept in candidates.kept]
    objective = tokens_per_time(
        candidates.acceptance[:, None],
        torch.arange(1, max_draft_length + 1),
        torch.tensor(steps, dtype=torch.float64)[:, None],
        profile.target_step(context, with_head=False),
        head_time=profile.outside if with_head else 0.0,
    )
    # Rounding must not make another set out of a tie with plain decoding.
    ahead = objective >= objective.max() * (1 - 1e-12)
    chosen, length = divmod(int(ahead.flatten().nonzero()[0]), max_draft_length)
    return Selection(
        kept=candidates.kept[chosen],
        draft_length=length + 1,
        acceptance=float(candidates.acceptance[chosen]),
        tokens_per_second=float(objective[chosen, length]),
    )


def _rounded_up(reachable: int, budget: int) -> int:
    """How many branches to run: as many as can exist, rounded up to one of four sizes, each with its own masks."""
    quarter = max(1, -(-budget // 4))
    return min(budget, -(-reachable // quarter) * quarter)


def _similarities(states: torch.Tensor, reference: torch.Tensor, before: torch.Tensor) -> torch.Tensor:
    """Mean cosine to the reference, ``-inf`` where there was no state before or where it is not a number."""
    rows, reference = states.float(), reference.float()  # a table; torch's cosine_similarity would make three more
    products = torch.einsum("brh,rh->br", rows, reference)
    lengths = torch.linalg.vector_norm(rows, dim=-1) * torch.linalg.vector_norm(reference, dim=-1)
    cosines = (products / lengths.clamp_min(_SMALLEST_LENGTH)).mean(-1)
    exists = (before > -math.inf) & ~cosines.isnan()
    return torch.where(exists, cosines, torch.full_like(cosines, -math.inf))
