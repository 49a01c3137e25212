"""KnapSpec's two stages: a 0/1 knapsack over the sublayers finds candidate sets, the objective selects one of them.

Both work on rows of the text: ``RecentRounds`` are all tokens of the last rounds, ``SpreadRows`` some of the last ones.
"""

import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch.nn import functional

from selfspec.decoding.drafter import Branches, Probe
from selfspec.methods.objective import tokens_per_time
from selfspec.methods.skipping import free_sublayers
from selfspec.model.kept import KeptSet
from selfspec.runtimes.costs.parts import LatencyProfile
from selfspec.runtimes.precision import Precision
from selfspec.runtimes.target import Target

Run = Callable[[int, torch.Tensor], torch.Tensor]
"""Runs one sublayer on independent states ``[count, rows, hidden]`` of the same tokens, as ``Branches.run`` does."""

MAX_WEIGHT = 5
"""Default of the largest weight of a sublayer: the lighter kind weighs 1, the other at most this (authors' code)."""
_SMALLEST_NORM = 1e-8
"""Norms below this count as this, so that the cosine of a state of norm 0 is 0."""
_DOUBT = 1.0
"""Rows without a match that are added to those of a selection, for sets that match on every one of a few rows."""

_FEWEST_ROWS, _MOST_ROWS = 96, 1024


def integer_weights(attention_seconds: float, mlp_seconds: float, most: int | None = MAX_WEIGHT) -> tuple[int, int]:
    """Latencies as integers: ``w = round(t / Δ)`` with ``Δ = min(t_attn, t_mlp)``, at most ``most`` if that is given.

    Returns the weight of an attention and of an MLP sublayer (KnapSpec, section 3.4, integer weight normalization).
    """
    unit = min(attention_seconds, mlp_seconds)
    largest = math.inf if most is None else most
    attention, mlp = (math.floor(min(seconds / unit, largest) + 0.5) for seconds in (attention_seconds, mlp_seconds))
    return attention, mlp


@dataclass(frozen=True)
class Table:
    """The last row of the dynamic program, and the decisions that led to it."""

    weights: tuple[int, ...]
    """The skipped weights whose entries exist, ascending; the first is 0."""
    states: torch.Tensor
    """``g[n, j]``, ``[len(weights), rows, hidden]``: the states after the last sublayer, for these weights."""
    similarities: torch.Tensor
    """Float32 ``[budget + 1]`` on the host, mean cosine to the target's; ``-inf`` for entries that do not exist."""
    skips: torch.Tensor
    """Bool ``[n, budget + 1]`` on the host, whether the entry of this weight after this sublayer skips it."""
    entries: tuple[int, ...]
    """Number of entries that exist after each sublayer."""


@dataclass(frozen=True)
class Candidates:
    """The sets that one dynamic program finds, at most one for every skipped weight; the first is the whole model."""

    kept: tuple[KeptSet, ...]
    similarities: torch.Tensor
    """Float64 ``[n]``, mean cosine of its last hidden states to the target's."""
    acceptance: torch.Tensor
    """Float64 ``[n]``, ``α̂``: share of the recent tokens at which it has the target's greedy token."""

    def that_skip(self) -> "Candidates":
        """Those that skip anything, as in the authors' code; the whole model if there are no others."""
        if len(self.kept) == 1:
            return self
        return Candidates(self.kept[1:], self.similarities[1:], self.acceptance[1:])


@dataclass(frozen=True)
class Selection:
    """The selected draft: set ``S``, length ``γ``, the set's ``α̂``, and TPT of set and length."""

    kept: KeptSet
    draft_length: int
    acceptance: float
    tokens_per_second: float


def fill_table(
    references: torch.Tensor,
    weights: Sequence[int | None],
    budget: int,
    similarity_threshold: float,
    run: Run,
    *,
    first: int = 0,
    exact: bool = True,
) -> Table:
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
        run: runs a sublayer on several entries.
        first: index of the first of the ``n`` sublayers.
        exact: whether sublayers run on the weights that gave ``X``.
    """
    used, states = [0], references[:1]
    entries = []
    similarities = torch.zeros(budget + 1)
    skips = torch.zeros((len(weights), budget + 1), dtype=torch.bool)
    for index, weight in enumerate(weights):
        reference = references[index + 1]
        ran = _run_entries(first + index, states, reference if exact else None, budget, run)
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
        entries.append(len(used))
    return Table(tuple(used), states, similarities, skips, tuple(entries))


def _run_entries(
    sublayer: int, states: torch.Tensor, known: torch.Tensor | None, budget: int, run: Run
) -> torch.Tensor:
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
    ran = run(sublayer, functional.pad(states[first:], (0, 0, 0, 0, 0, more)) if more else states[first:])
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

    ``ran`` and ``skipped`` are the states after and before the sublayer, of the weights ``used`` and, of the first of
    them, ``moved``; ``skips`` and ``runs``, bool ``[budget + 1]``, are the entries that skip and run it.
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

    ``skips`` and ``weights`` are those of the table. Returns bool ``[budget + 1, n]``; rows of entries that do not
    exist are undefined.
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
    shortest: int = 1,
) -> Selection:
    """The second stage (section 3.5): set and draft length of the highest TPT (equation 4).

    The whole model may be among the candidates. Its TPT is that of plain decoding, for any draft length. On a tie it is
    the candidate that skips less, then the shorter length. Lengths are ``shortest`` (1 in the paper) to
    ``max_draft_length``, ``D``; ``with_head`` counts the time of a step outside of its sublayers; ``draft_profile`` has
    the latencies of the weights that draft.
    """
    drafting = draft_profile or profile
    steps = [drafting.draft_step(kept, context, with_head=with_head) for kept in candidates.kept]
    objective = tokens_per_time(
        candidates.acceptance[:, None],
        torch.arange(shortest, max_draft_length + 1),
        torch.tensor(steps, dtype=torch.float64)[:, None],
        profile.target_step(context, with_head=with_head),
    )
    # Rounding must not prefer another set on a tie with plain decoding.
    best = objective >= objective.max() * (1 - 1e-12)
    chosen, length = divmod(int(best.flatten().nonzero()[0]), objective.shape[1])
    return Selection(
        kept=candidates.kept[chosen],
        draft_length=length + shortest,
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


class Calibration:
    """The line ``α = 1 - κ (1 - similarity)`` through the candidates of a selection, corrected by live rounds.

    A selection measures acceptance on a few rows, and the set of the highest objective is often one that was lucky on
    them; similarity varies less from set to set. So ``κ`` is fitted to all candidates by least squares, and counts as
    much as the ``rows`` that it was fitted to. Each tested draft token is one more. (Ours: the first choice is the
    paper's, by ``α̂``; it is made again once drafts have been tested.)
    """

    def __init__(self, candidates: Candidates, rows: int) -> None:
        self._candidates = candidates
        self._gaps = gaps = 1 - candidates.similarities
        missed = 1 - candidates.acceptance * rows / (rows + _DOUBT)
        others = gaps > 0
        self._expected = rows * float(gaps[others].mean()) if bool(others.any()) else 0.0
        slope = float((gaps * missed)[others].sum() / gaps[others].square().sum()) if self._expected else 0.0
        self._missed = slope * self._expected

    def note_round(self, kept: KeptSet, drafted: int, accepted: int) -> None:
        """Counts a round of one of the candidates: its accepted tokens, and the first one that was not."""
        if kept in self._candidates.kept:
            missed = int(accepted < drafted)
            self._expected += (accepted + missed) * float(self._gaps[self._candidates.kept.index(kept)])
            self._missed += missed

    @property
    def candidates(self) -> Candidates:
        """The candidates, with the acceptance that is expected of them now."""
        slope = self._missed / self._expected if self._expected else 0.0
        return replace(self._candidates, acceptance=(1 - slope * self._gaps).clamp(0.0, 1.0))


PAPER_SKIP_RATIO = 0.5
"""Largest share of the weight of all sublayers that a candidate skips, in the paper (K / 2)."""

SCRATCH_SHARE = 200
"""Cache slots for a selection, and its logits, may each take this part of the weights' memory."""


def find_candidates(
    target: Target,
    references: torch.Tensor,
    run: Run,
    *,
    weights: tuple[int, int],
    similarity_threshold: float,
    skip_ratio: float = PAPER_SKIP_RATIO,
    precision: Precision | None = None,
    fixed_ends: bool = True,
) -> Candidates:
    """The first stage of KnapSpec (section 3.4): one set for every skipped weight up to ``K · skip_ratio``.

    ``K`` is the weight of all ``2L`` sublayers. With ``fixed_ends`` first and last layer always run (authors' code).
    The sets that were not pruned are returned, that of the whole model first.

    ``references`` are ``X``, ``[n + 1, rows, hidden]``, the target's states from ``h[2]``, or ``h[0]`` without
    ``fixed_ends``, to ``h[2L]`` at the recent tokens, of which ``run`` runs several branches; ``weights`` are the
    integer latencies of attention and MLP. The candidates run at ``precision``, from the first of these states on.
    """
    free = free_sublayers(target.layer_count, fixed_ends)
    items: list[int | None] = [*weights * (len(free) // 2), *([None, None] if fixed_ends else [])]
    budget = min(int(target.layer_count * sum(weights) * skip_ratio), len(free) // 2 * sum(weights))
    exact = precision is None
    table = fill_table(references, items, budget, similarity_threshold, run, first=free.start, exact=exact)
    found = list(table.weights)
    skipped = backtrack(table.skips, items)[found]
    own = None if exact else references[-1]
    acceptance = acceptance_rates(target, table.states, reference=own, precision=precision)
    return Candidates(
        kept=tuple(
            KeptSet.skipping(
                (index for index, skip in enumerate(left_out, start=free.start) if skip), target.sublayer_count
            )
            for left_out in skipped.tolist()
        ),
        similarities=table.similarities[found].double(),
        acceptance=acceptance.cpu().double(),
    )


def acceptance_rates(
    target: Target,
    states: torch.Tensor,
    most_rows: int | None = None,
    *,
    reference: torch.Tensor | None = None,
    precision: Precision | None = None,
) -> torch.Tensor:
    """``α̂`` (equation 9): the share of rows at which states have the same greedy token as the target's own.

    ``states``, ``[n, rows, hidden]``, are residual streams before the final norm, which the LM head of ``precision``
    reads ``most_rows`` at a time (by default as many as have logits of 0.5 % of the weights' bytes). ``reference``,
    ``[rows, hidden]``, is the target's own; the first of the states if not given.
    """
    logits_bytes = target.vocab_size * states.element_size()
    affordable = max(states.shape[1], weight_bytes(target) // SCRATCH_SHARE // logits_bytes)
    model = target.at(precision)
    parts = torch.split(states.flatten(0, 1), most_rows or affordable)
    choices = torch.cat([model.logits(part).argmax(-1) for part in parts]).view(states.shape[:2])
    own = choices[0] if reference is None else target.logits(reference).argmax(-1)
    return (choices == own).float().mean(-1)


def weight_bytes(target: Target) -> int:
    """Bytes of all weights of the model."""
    return sum(parameter.nbytes for parameter in target.model.parameters())


def selection_rows(target: Target, tokens: int) -> int:
    """Most rows of one forward: those whose cache slots take 0.5 % of the weights' memory, or all branches if fewer.

    At least 96, whose slots take that share in a model of 0.6 billion parameters and less in larger ones. At most 1024:
    a larger forward is bound by arithmetic on any device, so it saves nothing.
    """
    most_branches = max(1, target.layer_count * (MAX_WEIGHT + 1) // 2)
    slot = target.new_sequence(1, 1, 1).cache.size_in_bytes
    affordable = weight_bytes(target) // SCRATCH_SHARE // slot
    rows = min(max(affordable, _FEWEST_ROWS), _MOST_ROWS, most_branches * tokens)
    return max(rows, tokens)


class RecentRounds:
    """All tokens of the last ``rounds`` rounds, as windows in which each branch sees its own keys (the paper).

    A forward has at most ``most_rows`` rows.
    """

    def __init__(self, rounds: int, most_rows: int) -> None:
        self.rounds, self._most_rows = rounds, most_rows
        self._recent: deque[torch.Tensor] = deque(maxlen=rounds)

    @property
    def ready(self) -> bool:
        """Whether there are any."""
        return bool(self._recent)

    def add(self, first: int, states: torch.Tensor) -> None:
        """Adds the states ``[n + 1, rows, hidden]`` of a round's tokens, the first of them at a position."""
        self._recent.append(states)

    def take(self, probe: Probe, precision: Precision | None) -> tuple[torch.Tensor, Branches]:
        """The target's states ``[n + 1, rows, hidden]``, and what runs branches of these rows."""
        references = torch.cat(list(self._recent), dim=1)
        return references, probe.branches(references.shape[1], self._most_rows, precision)

    def clear(self) -> None:
        """Drops all states."""
        self._recent.clear()


class SpreadRows:
    """``rows`` rows spread evenly over the last ``tokens`` tokens (ours).

    A row sees the target's keys, so rows need not be neighbours: spread ones differ more. The members are those of
    ``RecentRounds``.
    """

    def __init__(self, tokens: int, rows: int, most_rows: int | None = None) -> None:
        self.rounds, self._most_rows = tokens, most_rows  # a round has a token at least
        self._stride = tokens // rows
        self._rows: deque[tuple[int, torch.Tensor]] = deque(maxlen=rows)
        self._seen = 0

    @property
    def ready(self) -> bool:
        """Whether there are enough tokens."""
        return self._seen >= self.rounds

    def add(self, first: int, states: torch.Tensor) -> None:
        """Keeps the states of every n-th token."""
        for row in range(states.shape[1]):
            if self._seen % self._stride == 0:
                self._rows.append((first + row, states[:, row].clone()))
            self._seen += 1

    def take(self, probe: Probe, precision: Precision | None) -> tuple[torch.Tensor, Branches]:
        """The states that were kept, and what runs branches of their rows."""
        references = torch.stack([states for _, states in self._rows], dim=1)
        return references, probe.points([place for place, _ in self._rows], self._most_rows, precision)

    def clear(self) -> None:
        """Drops all states."""
        self._rows.clear()
        self._seen = 0
