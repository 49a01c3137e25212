"""Which sublayers to skip, as a 0/1 knapsack: KnapSpec's two stages as functions of tensors, without a model."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from selfspec.decoding.fused_selection import SelectionSteps
from selfspec.methods.objective import tokens_per_time
from selfspec.model.kept import KeptSet
from selfspec.runtimes.latency import LatencyProfile

MAX_WEIGHT = 5
"""Largest weight of a sublayer: the lighter kind weighs 1, the other at most this (authors' code)."""
_SMALLEST_NORM = 1e-8
"""Norms below this count as this, so that the cosine of a state of norm 0 is 0."""


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
    """The last row of the dynamic program, and the decisions that led to it.

    Attributes:
        states: ``g[n, j]``, ``[budget + 1, rows, hidden]``: after the last sublayer, with skipped weight ``j``. Entries
            that do not exist are undefined.
        similarities: float32 ``[budget + 1]``, mean cosine of the rows to the target's; ``-inf`` for entries that do
            not exist.
        skips: bool ``[n, budget + 1]``, whether the entry of this weight after this sublayer skips it.
    """

    states: torch.Tensor
    similarities: torch.Tensor
    skips: torch.Tensor


@dataclass(frozen=True)
class Candidates:
    """The sets that one dynamic program finds, at most one for every skipped weight.

    Attributes:
        kept: by candidate the sublayers that it runs; the first is the whole model.
        similarities: float64 ``[n]``, mean cosine of its last hidden states to the target's.
        acceptance: float64 ``[n]``, ``α̂``: share of the recent tokens at which it has the target's greedy token.
    """

    kept: tuple[KeptSet, ...]
    similarities: torch.Tensor
    acceptance: torch.Tensor


@dataclass(frozen=True)
class Selection:
    """The selected draft.

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
) -> SelectionSteps[Table]:
    """Algorithm 1 of KnapSpec: for every skipped weight the states closest to the target's own.

    ``g[i, j]`` is the better of running sublayer ``i`` on ``g[i - 1, j]`` and of skipping it, ``g[i - 1, j - w]``, by
    the mean cosine of its rows to ``X(i)`` (equations 7 and 8). States under the threshold or over the budget are
    pruned. All ``j`` of one ``i`` go through the sublayer together; ``j = 0`` is the target itself and need not.

    Args:
        references: ``X``, ``[n + 1, rows, hidden]``: the target's states before each sublayer and after the last.
        weights: of each sublayer; ``None`` for one that is never skipped.
        budget: largest skipped weight.
        similarity_threshold: ``τ``, smallest mean cosine of a state that is kept.
        first: index of the first of the ``n`` sublayers.

    Returns:
        The filled table.
    """
    width = budget + 1
    states = references[:1].repeat(width, 1, 1)
    after = torch.zeros_like(states)  # the next row; the two buffers swap
    similarities = torch.full((width,), -math.inf, device=references.device)
    similarities[0] = 1.0
    skips = torch.empty((len(weights), width), dtype=torch.bool, device=references.device)
    reachable = 0
    for index, weight in enumerate(weights):
        reference, skip = references[index + 1], skips[index]
        after[0] = reference
        branches = _rounded_up(reachable, budget)
        if branches:
            after[1 : 1 + branches] = yield first + index, states[1 : 1 + branches]
        ran_similarities = _similarities(after, reference, similarities)
        shift = width if weight is None else min(weight, width)  # from skipped weight j to j + w, within the budget
        skipped, movable = states[: width - shift], similarities[: width - shift]
        skipped_similarities = torch.full_like(similarities, -math.inf)
        skipped_similarities[shift:] = _similarities(skipped, reference, movable)
        torch.gt(skipped_similarities, ran_similarities, out=skip)
        torch.where(skip[shift:, None, None], skipped, after[shift:], out=after[shift:])
        states, after = after, states
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
        bool ``[budget + 1, n]``; rows of entries that do not exist are undefined.
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

    The whole model is among the candidates. Its TPT is that of plain decoding, for any draft length.

    Args:
        candidates: of the dynamic program.
        profile: the latencies.
        context: tokens in the cache.
        max_draft_length: ``D``; lengths from 1 on are tried.
        with_head: count the time of a step outside of its sublayers.

    Returns:
        The best one; on a tie the one that skips less, then the shorter one.
    """
    steps = [profile.draft_step(kept, context, with_head=False) for kept in candidates.kept]
    objective = tokens_per_time(
        candidates.acceptance[:, None],
        torch.arange(1, max_draft_length + 1),
        torch.tensor(steps, dtype=torch.float64)[:, None],
        profile.target_step(context, with_head=False),
        head_time=profile.outside if with_head else 0.0,
    )
    # Rounding must not prefer another set on a tie with plain decoding.
    best = objective >= objective.max() * (1 - 1e-12)
    chosen, length = divmod(int(best.flatten().nonzero()[0]), max_draft_length)
    return Selection(
        kept=candidates.kept[chosen],
        draft_length=length + 1,
        acceptance=float(candidates.acceptance[chosen]),
        tokens_per_second=float(objective[chosen, length]),
    )


def _rounded_up(reachable: int, budget: int) -> int:
    """How many branches to run: those that can exist, rounded up to one of four sizes, so that few masks are made."""
    quarter = max(1, -(-budget // 4))
    return min(budget, -(-reachable // quarter) * quarter)


def _similarities(states: torch.Tensor, reference: torch.Tensor, before: torch.Tensor) -> torch.Tensor:
    """Mean cosine to the reference; ``-inf`` where there was no state before, or where it is not a number."""
    rows, reference = states.float(), reference.float()  # one copy; torch's cosine_similarity would make three more
    products = torch.einsum("brh,rh->br", rows, reference)
    norms = torch.linalg.vector_norm(rows, dim=-1) * torch.linalg.vector_norm(reference, dim=-1)
    cosines = (products / norms.clamp_min(_SMALLEST_NORM)).mean(-1)
    exists = (before > -math.inf) & ~cosines.isnan()
    return torch.where(exists, cosines, torch.full_like(cosines, -math.inf))
