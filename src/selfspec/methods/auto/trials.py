"""Layer drafts that are tried on a model, on a text of its own: which there are, and which promises most."""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import zip_longest

import torch

from selfspec.errors import OutOfMemoryError, UnsupportedModelError
from selfspec.methods.skipping import evenly_skipped, sublayer_ratio
from selfspec.model.kept import KeptSet
from selfspec.planning.plans import MOST_DRAFTED, DraftPolicy, Outlook
from selfspec.runtimes.costs.measuring import measure_row_costs, measure_together
from selfspec.runtimes.costs.rows import RowCosts
from selfspec.runtimes.precision import Precision
from selfspec.runtimes.target import Target
from selfspec.sampling.rules import seeded_generator

DRAFT_ROWS = (1, 2, 4, 8)
"""Rows of a draft's forward that are measured."""

_CLOSE = 0.85
"""Share of the best promise from which on a trial's forwards are timed again, in turns with those of the best."""

_EQUAL = 0.97
"""Share of the best promise that counts as equal to it; of equal ones the draft that agrees more often is taken."""

_SKIPPED_ROWS = 8
"""First rows of the own text, which hardly have a context."""

_SEED = 0
_SAMPLED, _GREEDY = 8, 40
"""Sampled tokens of the own text, and greedy ones after them, in turns.

On a text that is all sampled, drafts of SmolLM2-135M at 8, 6 and 4 bits agree with 0.96, 0.90 and 0.64 of the target's
choices; with greedy runs of 40 tokens with 0.99, 0.94 and 0.78; in answers to chat prompts 0.99, 0.93 and 0.78 of their
tokens are accepted.
"""


@dataclass(frozen=True)
class OwnText:
    """A text of the model's own, long ``[n]``, and the target's greedy choice after each token, long ``[n]``."""

    token_ids: torch.Tensor
    choices: torch.Tensor


@torch.inference_mode()
def write_text(target: Target, length: int) -> OwnText:
    """Writes a text from the model's beginning-of-sequence token on, always the same; no data is needed.

    Greedy tokens follow sampled ones in turns, as an answer follows a prompt: without sampled ones between them the
    text of a small model repeats itself, and sampled ones alone are harder to predict than what is decoded greedily.
    """
    generator = seeded_generator(_SEED, target.device)
    sequence = target.new_sequence(1, length, length)
    first = getattr(target.config, "bos_token_id", None)
    token = torch.tensor([first if isinstance(first, int) else 0], device=target.device)
    tokens, choices = [], []
    for index in range(length):
        layout = target.lay_out(sequence, 1)
        states = target.embed(token, layout)
        logits = target.logits(target.run(states, range(target.sublayer_count), layout).hidden_states)
        sequence.cache.commit([0])
        tokens.append(token)
        choices.append(logits.argmax(-1))
        drawn = torch.multinomial(logits[0].float().softmax(-1), 1, generator=generator)
        token = drawn if index % (_SAMPLED + _GREEDY) < _SAMPLED else choices[-1]
    return OwnText(torch.cat(tokens), torch.cat(choices))


@dataclass(frozen=True)
class Assignment:
    """Sublayers that draft, and the precision of their weights and of the head (``None`` for the target's own)."""

    kept: KeptSet
    precision: Precision | None = None

    @cached_property
    def name(self) -> str:
        """What reports call it, as ``4 bits, head 8, 30 of 60 sublayers``."""
        kept, total = len(self.kept.sublayers), self.kept.total
        words = [] if kept == total else [f"{kept} of {total} sublayers"]
        if self.precision is not None:
            body, head = self.precision.attention, self.precision.head
            words[:0] = [f"{body} bits"] if body == head else [f"{body} bits, head {head}"]
        return ", ".join(words)


@dataclass(frozen=True)
class Trial:
    """An assignment that was tried."""

    assignment: Assignment
    agreement: float
    """Share of the own text's tokens after which it chose what the target chose."""
    costs: RowCosts
    confidences: tuple[tuple[float, bool], ...] = ()
    """At each token its largest probability, and whether its choice was the target's."""
    tokens_per_second: float = 0.0
    """What a round of it promises."""


def candidates(target: Target, *, group: int) -> Iterator[Assignment]:
    """The assignments that are worth a trial, most promising first; ``group`` weights of a row share a scale.

    All sublayers at low bits; the first layers alone, which early-exit training makes a good draft; an evenly spread
    part, at the size-aware budget of ``uniform``. Those of the model's own weights take turns with the others, whose
    weights take long to make on a large model: trials end after some time.
    """
    total = target.sublayer_count
    full = KeptSet.full(total)
    skipped = evenly_skipped(target.layer_count, sublayer_ratio(target, None))
    exits = sorted({max(1, target.layer_count // part) for part in (4, 3, 2)} - {target.layer_count})
    parts = [KeptSet.early_exit(layers, total) for layers in exits]
    parts += [KeptSet.skipping(skipped, total)] if skipped else []
    bits = _mixes(target, group)
    made = [Assignment(full, precision) for precision in bits]
    made += [Assignment(kept, bits[0]) for kept in parts if bits]
    for turn in zip_longest(made, map(Assignment, parts)):
        yield from filter(None, turn)


def _mixes(target: Target, group: int) -> list[Precision]:
    """Bits of the sublayers and of the head that are worth a trial; on an accelerator those that are right there."""
    if target.trial is None:
        return [Precision(body, body, head, group) for body, head in ((4, 4), (6, 8), (4, 8))]
    refused = target.trial.refused_bits
    mixes = [(body, head) for body, head in ((4, 4), (8, 8), (4, 8)) if body not in refused and head not in refused]
    return [Precision(body, body, head, group) for body, head in mixes]


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
    """Tries assignments, most promising first, on the model's own text; begins no trial after ``most_seconds``.

    ``fits`` says whether the low-bit weights of an assignment may be made. Returns the trials, the fastest first; costs
    of those that are close were measured in turns.
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
            continue  # no such low-bit weights of this model
    close = [trial for trial in trials if trial.tokens_per_second >= _CLOSE * _fastest(trials)]
    others = [trial for trial in trials if trial not in close]
    return sorted([*_timed_again(target, close, verify), *others], key=lambda trial: -trial.tokens_per_second)


def best_trial(trials: Sequence[Trial]) -> Trial | None:
    """Of the trials that promise most, to within what timing can tell, the one that agrees most."""
    equal = [trial for trial in trials if trial.tokens_per_second >= _EQUAL * _fastest(trials)]
    return max(equal, key=lambda trial: trial.agreement, default=None)


def _timed_again(target: Target, trials: Sequence[Trial], verify: RowCosts) -> list[Trial]:
    """Trials with costs that were measured in turns, which a single trial's are not."""
    if len(trials) < 2:
        return list(trials)
    which = [(trial.assignment.kept.sublayers, trial.assignment.precision) for trial in trials]
    costs = measure_together(target, which, row_counts=DRAFT_ROWS, most_seconds=0.2 * len(trials))
    return [_promising(replace(trial, costs=each), verify) for trial, each in zip(trials, costs, strict=True)]


def promised_by(trial: Trial, verify: RowCosts) -> float:
    """Tokens per second of rounds that a trial's layers draft."""
    policy = DraftPolicy.fastest(Outlook([1.0], [trial.agreement]), trial.costs(1), verify.table(), MOST_DRAFTED)
    return policy.plan.tokens_per_second


def _promising(trial: Trial, verify: RowCosts) -> Trial:
    """The trial with what it promises."""
    return replace(trial, tokens_per_second=promised_by(trial, verify))


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
    return _promising(Trial(assignment, agreement, costs, outcomes), verify)


@torch.inference_mode()
def _agreement(target: Target, assignment: Assignment, text: OwnText) -> tuple[tuple[float, bool], ...]:
    """The assignment's confidence after each token of a text, and whether it chooses as the target does."""
    model, rows = target.at(assignment.precision), len(text.token_ids)
    sequence = target.new_sequence(rows, rows, rows)
    layout = target.lay_out(sequence, rows)
    states = model.run(target.embed(text.token_ids, layout), assignment.kept.sublayers, layout).hidden_states
    best = model.logits(states).float().softmax(-1).max(-1)
    first = min(_SKIPPED_ROWS, rows - 1)
    agrees = (best.indices == text.choices)[first:].tolist()
    return tuple(zip(best.values[first:].tolist(), agrees, strict=True))
