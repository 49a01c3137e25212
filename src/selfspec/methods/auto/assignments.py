"""Which sublayers draft, from which weights: candidates, tried once for a model on its own text and on this machine."""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from selfspec.errors import OutOfMemoryError, UnsupportedModelError
from selfspec.methods.auto.own_text import OwnText
from selfspec.methods.auto.plans import best_layers
from selfspec.methods.auto.row_costs import RowCosts, measure_row_costs, measure_together
from selfspec.methods.budget import default_skip_ratio
from selfspec.methods.uniform import evenly_skipped
from selfspec.model.kept import KeptSet
from selfspec.runtimes.precision import Precision
from selfspec.runtimes.target import Target

DRAFT_ROWS = (1, 2, 4, 8)
"""Rows of a draft's forward that are measured."""

_CLOSE = 0.85
"""Share of the best promise from which on a trial's forwards are timed again, in turns with those of the best."""

_EQUAL = 0.97
"""Share of the best promise that counts as equal to it; of equal ones the draft that agrees more often is taken."""

_SKIPPED_ROWS = 8
"""First rows of the own text, which hardly have a context."""


@dataclass(frozen=True)
class Assignment:
    """Sublayers that draft, and the precision of their weights.

    Attributes:
        kept: the sublayers.
        precision: of their weights and of the head; ``None`` for the target's own.
    """

    kept: KeptSet
    precision: Precision | None = None

    @property
    def name(self) -> str:
        """What reports call it, as ``4 bits, head 8, 30 of 60 sublayers``."""
        kept, total = len(self.kept.sublayers), self.kept.total
        parts = [] if kept == total else [f"{kept} of {total} sublayers"]
        if self.precision is not None:
            body, head = self.precision.attention, self.precision.head
            parts[:0] = [f"{body} bits"] if body == head else [f"{body} bits, head {head}"]
        return ", ".join(parts)


@dataclass(frozen=True)
class Trial:
    """An assignment that was tried.

    Attributes:
        assignment: the assignment.
        agreement: share of the own text's tokens after which it chose what the target chose.
        costs: of its forwards.
        tokens_per_second: what a round of it promises.
        confidences: at each token its largest probability, and whether its choice was the target's.
    """

    assignment: Assignment
    agreement: float
    costs: RowCosts
    tokens_per_second: float
    confidences: tuple[tuple[float, bool], ...] = ()


def candidates(target: Target, *, group: int) -> Iterator[Assignment]:
    """The assignments that are worth a trial, most promising first.

    All sublayers at low bits; the first layers alone, which early-exit training makes a good draft; an evenly spread
    part, at the size-aware budget of ``uniform``.

    Args:
        target: the model.
        group: inputs of a weight row that share a scale.
    """
    total = target.sublayer_count
    full = KeptSet.full(total)
    free = 2 * max(0, target.layer_count - 2)
    skipped = evenly_skipped(target.layer_count, default_skip_ratio(target, free))
    exits = sorted({max(1, target.layer_count // part) for part in (4, 3, 2)} - {target.layer_count})
    parts = [KeptSet.early_exit(layers, total) for layers in exits]
    parts += [KeptSet.skipping(skipped, total)] if skipped else []
    mixes = [(4, 4), (6, 8), (4, 8)]  # of the sublayers, of the head
    bits = [Precision(body, body, head, group) for body, head in mixes]
    yield from (Assignment(full, precision) for precision in bits)
    yield from (Assignment(kept, bits[0]) for kept in parts)
    yield from (Assignment(kept) for kept in parts)


def try_assignments(
    target: Target,
    assignments: Iterator[Assignment] | Sequence[Assignment],
    text: OwnText,
    verify: RowCosts,
    *,
    most_seconds: float,
    fits: Callable[[Assignment], bool] = lambda _: True,
    clock: Callable[[], float] = time.perf_counter,
) -> list[Trial]:
    """Tries assignments on the model's own text.

    Args:
        target: the model.
        assignments: most promising first.
        text: the text.
        verify: costs of the target's forward.
        most_seconds: begin no further trial after this time.
        fits: whether the copies of an assignment may be made.
        clock: seconds.

    Returns:
        Those that could be tried, the fastest first. Costs of those that are close were measured in turns.
    """
    began = clock()
    trials: list[Trial] = []
    for assignment in assignments:
        if trials and clock() - began > most_seconds:
            break
        try:
            if fits(assignment) and (trial := _try(target, assignment, text, verify, _fastest(trials))) is not None:
                trials.append(trial)
        except (OutOfMemoryError, UnsupportedModelError):
            continue  # the model has no such copies
    close = [trial for trial in trials if trial.tokens_per_second >= _CLOSE * _fastest(trials)]
    others = [trial for trial in trials if trial not in close]
    return sorted([*_timed_again(target, close, verify), *others], key=lambda trial: -trial.tokens_per_second)


def choose(trials: Sequence[Trial]) -> Trial | None:
    """The trial to draft with: of those that promise most, to within what timing can tell, the one that agrees most.

    Args:
        trials: all of them.
    """
    equal = [trial for trial in trials if trial.tokens_per_second >= _EQUAL * _fastest(trials)]
    return max(equal, key=lambda trial: trial.agreement, default=None)


def _timed_again(target: Target, trials: Sequence[Trial], verify: RowCosts) -> list[Trial]:
    """Trials with costs that were measured in turns, which a single trial's are not."""
    if len(trials) < 2:
        return list(trials)
    which = [(trial.assignment.kept.sublayers, trial.assignment.precision) for trial in trials]
    costs = measure_together(target, which, row_counts=DRAFT_ROWS, most_seconds=0.2 * len(trials))
    again = []
    for trial, measured in zip(trials, costs, strict=True):
        promised = _promise(trial.agreement, measured, verify)
        again.append(replace(trial, costs=measured, tokens_per_second=promised))
    return again


def _promise(agreement: float, costs: RowCosts, verify: RowCosts) -> float:
    """Tokens a second of rounds with a draft that agrees as often and costs as much."""
    plan = best_layers(agreement, costs.table(), verify.table(), float("inf"))
    assert plan is not None
    return plan.tokens_per_second


def _fastest(trials: Sequence[Trial]) -> float:
    return max((trial.tokens_per_second for trial in trials), default=0.0)


def _try(target: Target, assignment: Assignment, text: OwnText, verify: RowCosts, fastest: float) -> Trial | None:
    """Tries an assignment; ``None`` where another is faster even if this one's forwards took no time."""
    outcomes = _agreement(target, assignment, text)
    agreement = sum(agrees for _, agrees in outcomes) / len(outcomes)
    if agreement < 1 and 1 / ((1 - agreement) * verify(1)) < fastest:
        return None
    costs = measure_row_costs(
        target, assignment.kept.sublayers, assignment.precision, row_counts=DRAFT_ROWS, most_seconds=0.2
    )
    return Trial(assignment, agreement, costs, _promise(agreement, costs, verify), outcomes)


@torch.inference_mode()
def _agreement(target: Target, assignment: Assignment, text: OwnText) -> tuple[tuple[float, bool], ...]:
    """The assignment's confidence after each token of a text, and whether it chooses as the target does."""
    model, rows = target.at(assignment.precision), len(text.token_ids)
    sequence = target.new_sequence(rows, rows, rows)
    layout = target.lay_out(sequence, rows)
    states = model.run(target.embed(text.token_ids), assignment.kept.sublayers, layout).hidden_states
    best = model.logits(states).float().softmax(-1).max(-1)
    first = min(_SKIPPED_ROWS, rows - 1)
    agrees = (best.indices == text.choices)[first:].tolist()
    return tuple(zip(best.values[first:].tolist(), agrees, strict=True))
