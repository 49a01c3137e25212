"""KnapSpec's first stage: one candidate set for every skipped weight, with its similarity and acceptance."""

from collections.abc import Sequence

import torch

from selfspec.decoding.probe import SelectionSteps
from selfspec.methods.knapsack import MAX_WEIGHT, Candidates, backtrack, fill_table
from selfspec.model.kept import KeptSet
from selfspec.runtimes.precision import AnyPrecision
from selfspec.runtimes.target import Target

PAPER_SKIP_RATIO = 0.5
"""Largest share of the weight of all sublayers that a candidate skips, in the paper."""

_SCRATCH_SHARE = 200
"""Cache slots for a selection, and its logits, may each take this part of the weights' memory."""
_FEWEST_ROWS, _MOST_ROWS = 96, 1024


def find_candidates(
    target: Target,
    references: torch.Tensor,
    *,
    weights: tuple[int, int],
    similarity_threshold: float,
    skip_ratio: float = PAPER_SKIP_RATIO,
    precision: AnyPrecision | None = None,
) -> SelectionSteps[Candidates]:
    """The first stage of KnapSpec (section 3.4): one set for every skipped weight up to ``K · skip_ratio``.

    ``K`` is the weight of all ``2L`` sublayers. First and last layer always run (authors' code).

    Args:
        target: the model.
        references: ``X``, ``[2L - 1, rows, hidden]``: the target's states ``h[2] … h[2L]`` at the recent tokens.
        weights: integer latencies of attention and MLP.
        similarity_threshold: ``τ``.
        skip_ratio: largest skipped share of ``K``; a half in the paper.
        precision: of the weights that draft, on which the candidates are run from ``h[2]`` on; ``None`` for the
            target's own.

    Returns:
        The sets that were not pruned, that of the whole model first.
    """
    layers = target.layer_count
    items: list[int | None] = [*weights * (layers - 2), None, None]
    budget = min(int(layers * sum(weights) * skip_ratio), (layers - 2) * sum(weights))
    exact = precision is None
    table = yield from fill_table(references, items, budget, similarity_threshold, first=2, exact=exact)
    found = list(table.weights)
    skipped = backtrack(table.skips, items)[found]
    own = None if exact else references[-1]
    acceptance = acceptance_rates(target, table.states, reference=own, precision=precision)
    return Candidates(
        kept=tuple(_keeping(left_out, target.sublayer_count) for left_out in skipped.tolist()),
        similarities=table.similarities[found].double(),
        acceptance=acceptance.cpu().double(),
    )


def acceptance_rates(
    target: Target,
    states: torch.Tensor,
    most_rows: int | None = None,
    *,
    reference: torch.Tensor | None = None,
    precision: AnyPrecision | None = None,
) -> torch.Tensor:
    """``α̂`` (equation 9): the share of rows at which states have the same greedy token as the target's own.

    Args:
        target: the model.
        states: ``[n, rows, hidden]``, residual streams before the final norm.
        most_rows: of one pass through the LM head; if not given, as many as have logits of 0.5 % of the weights' bytes.
        reference: ``[rows, hidden]``, the target's own; the first of the states if not given.
        precision: of the LM head that reads the states; ``None`` for the target's own.

    Returns:
        float32 ``[n]``.
    """
    logits_bytes = target.vocab_size * states.element_size()
    affordable = max(states.shape[1], _weight_bytes(target) // _SCRATCH_SHARE // logits_bytes)
    model = target.at(precision)
    parts = torch.split(states.flatten(0, 1), most_rows or affordable)
    choices = torch.cat([model.logits(part).argmax(-1) for part in parts]).view(states.shape[:2])
    own = choices[0] if reference is None else target.logits(reference).argmax(-1)
    return (choices == own).float().mean(-1)


def _keeping(left_out: Sequence[bool], total: int) -> KeptSet:
    """The kept set of a candidate, whose decisions start at sublayer 2."""
    return KeptSet.skipping((index for index, skip in enumerate(left_out, start=2) if skip), total)


def _weight_bytes(target: Target) -> int:
    return sum(parameter.nbytes for parameter in target.model.parameters())


def selection_rows(target: Target, tokens: int) -> int:
    """Most rows of one forward: those whose cache slots take 0.5 % of the weights' memory, or all branches if fewer.

    At least 96, whose slots take that share in a model of 0.6 billion parameters and less in larger ones. At most 1024:
    a larger forward is bound by arithmetic on any device, so it saves nothing.
    """
    most_branches = max(1, min(target.layer_count * (MAX_WEIGHT + 1) // 2, (target.layer_count - 2) * (MAX_WEIGHT + 1)))
    slot = target.new_sequence(1, 1, 1).cache.size_in_bytes
    affordable = _weight_bytes(target) // _SCRATCH_SHARE // slot
    rows = min(max(affordable, _FEWEST_ROWS), _MOST_ROWS, most_branches * tokens)
    return max(rows, tokens)
