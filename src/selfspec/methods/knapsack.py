"""Which sublayers to skip, as a 0/1 knapsack: KnapSpec's two stages as functions of tensors, without a model."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.nn import functional

from selfspec.decoding.probe import SelectionSteps
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
        weights: the skipped weights whose entries exist, ascending; the first is 0.
        states: ``g[n, j]``, ``[len(weights), rows, hidden]``: the states after the last sublayer, for these weights.
        similarities: float32 ``[budget + 1]`` on the host, mean cosine to the target's; ``-inf`` for entries that do
            not exist.
        skips: bool ``[n, budget + 1]`` on the host, whether the entry of this weight after this sublayer skips it.
    """

    weights: tuple[int, ...]
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
    *,
    exact: bool = True,
) -> SelectionSteps[Table]:
    """Algorithm 1 of KnapSpec: for every skipped weight the states closest to the target's own.

    ``g[i, j]`` is the better of running sublayer ``i`` on ``g[i - 1, j]`` and of skipping it, ``g[i - 1, j - w]``, by
    the mean cosine of its rows to ``X(i)`` (equations 7 and 8). States under the threshold or over the budget are
    pruned: they are not kept, and no later sublayer runs on them. All ``j`` of one ``i`` go through the sublayer
    together; ``j = 0`` is the target itself and need not, unless drafts run on other weights.

    Args:
        references: ``X``, ``[n + 1, rows, hidden]``: the target's states before each sublayer and after the last.
        weights: of each sublayer; ``None`` for one that is never skipped.
        budget: largest skipped weight.
        similarity_threshold: ``τ``, smallest mean cosine of a state that is kept.
        first: index of the first of the ``n`` sublayers.
        exact: whether sublayers run on the weights that gave ``X``, so that ``g[i, 0]`` is ``X(i)``.

    Returns:
        The filled table.
    """
    used, states = [0], references[:1]
    similarities = torch.zeros(budget + 1)
    skips = torch.zeros((len(weights), budget + 1), dtype=torch.bool)
    for index, weight in enumerate(weights):
        reference = references[index + 1]
        ran = yield from _run(first + index, states, reference if exact else None, budget)
        movable = 0 if weight is None else sum(one + weight <= budget for one in used)
        moved = [one + (weight or 0) for one in used[:movable]]
        offered = torch.cat([_cosines(part, reference) for part in (ran, states[:movable])])
        offered = offered.cpu()  # the pruning decides on the host what runs next
        running, skipping = (torch.full((budget + 1,), -math.inf) for _ in range(2))
        running[used], skipping[moved] = offered[: len(used)], offered[len(used) :]
        skips[index] = skipping > running
        similarities = torch.maximum(running, skipping)
        exists = similarities >= similarity_threshold
        exists[0] = True
        similarities[~exists] = -math.inf
        states = _chosen(ran, used, states, moved, exists & skips[index], exists & ~skips[index])
        used = exists.nonzero().flatten().tolist()
    return Table(tuple(used), states, similarities, skips)


def _run(sublayer: int, states: torch.Tensor, known: torch.Tensor | None, budget: int) -> SelectionSteps[torch.Tensor]:
    """Runs a sublayer on all entries but the first if its result is known; ``[entries, rows, hidden]``.

    Entries of zeros are added until there are as many as one of four sizes, so that few masks are made.
    """
    first = 0 if known is None else 1
    count, most = len(states) - first, budget + 1 - first
    if not count:
        assert known is not None
        return known[None]
    quarter = -(-most // 4)
    more = min(most, -(-count // quarter) * quarter) - count
    ran = yield sublayer, functional.pad(states[first:], (0, 0, 0, 0, 0, more)) if more else states[first:]
    return ran[:count] if known is None else torch.cat([known[None], ran[:count]])


def _chosen(
    ran: torch.Tensor,
    used: Sequence[int],
    skipped: torch.Tensor,
    moved: Sequence[int],
    skips: torch.Tensor,
    runs: torch.Tensor,
) -> torch.Tensor:
    """The states of the entries that exist, ascending by weight.

    Args:
        ran: states after running the sublayer, one for each of ``used``.
        used: their skipped weights.
        skipped: states before it.
        moved: skipped weights of the first of these if they skip it.
        skips: bool ``[budget + 1]``, the entries that skip it.
        runs: bool ``[budget + 1]``, those that run it.
    """
    exists = (skips | runs).nonzero().flatten()
    states = ran.new_empty(len(exists), *ran.shape[1:])
    places = {weight: place for place, weight in enumerate(exists.tolist())}
    for source, origins, wanted in ((ran, used, runs), (skipped, moved, skips)):
        for state, weight in zip(source, origins, strict=False):  # one by one: an index would copy all of them
            if wanted[weight]:
                states[places[weight]].copy_(state)
    return states


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
    candidates: Candidates,
    profile: LatencyProfile,
    context: int,
    max_draft_length: int,
    *,
    with_head: bool,
    draft_profile: LatencyProfile | None = None,
) -> Selection:
    """The second stage (section 3.5): set and draft length of the highest TPT (equation 4).

    The whole model is among the candidates. Its TPT is that of plain decoding, for any draft length.

    Args:
        candidates: of the dynamic program.
        profile: the latencies.
        context: tokens in the cache.
        max_draft_length: ``D``; lengths from 1 on are tried.
        with_head: count the time of a step outside of its sublayers.
        draft_profile: the latencies of the weights that draft; ``profile`` if not given.

    Returns:
        The best one; on a tie the one that skips less, then the shorter one.
    """
    drafting = draft_profile or profile
    steps = [drafting.draft_step(kept, context, with_head=with_head) for kept in candidates.kept]
    objective = tokens_per_time(
        candidates.acceptance[:, None],
        torch.arange(1, max_draft_length + 1),
        torch.tensor(steps, dtype=torch.float64)[:, None],
        profile.target_step(context, with_head=with_head),
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


def _cosines(states: torch.Tensor, reference: torch.Tensor) -> torch.Tensor:
    """Mean cosine to the reference, float32 ``[entries]``; ``-inf`` where it is not a number."""
    rows, reference = states.float(), reference.float()  # one copy; torch's cosine_similarity would make three more
    products = torch.einsum("brh,rh->br", rows, reference)
    norms = torch.linalg.vector_norm(rows, dim=-1) * torch.linalg.vector_norm(reference, dim=-1)
    cosines: torch.Tensor = (products / norms.clamp_min(_SMALLEST_NORM)).mean(-1)
    return cosines.nan_to_num(nan=-math.inf)
