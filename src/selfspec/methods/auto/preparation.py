"""What ``auto`` knows of a model and a machine before the first round: measured ahead and kept, or else estimated.

Costs are those of forwards by their rows. Layer drafts are tried on a text of the model itself: ``candidates`` says
which there are, ``try_assignments`` which promise most.
"""

import contextlib
import math
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from itertools import zip_longest
from typing import Any

import torch

from selfspec.errors import NoLowBitWeightsWarning, OutOfMemoryError, UnsupportedModelError
from selfspec.memory import free_bytes
from selfspec.methods.settings import MethodSettings, fraction, setting
from selfspec.methods.skipping import evenly_skipped, sublayer_ratio
from selfspec.model.kept import KeptSet
from selfspec.planning.acceptance_tables import LOW_BIT_CONFIDENCE
from selfspec.planning.plans import MOST_DRAFTED, DraftPolicy, Outlook
from selfspec.runtimes.costs.measuring import estimate_row_costs, measure_row_costs, measure_together, weight_bytes
from selfspec.runtimes.costs.rows import RowCosts
from selfspec.runtimes.costs.store import kept_file
from selfspec.runtimes.kept_file import restored
from selfspec.runtimes.precision import Precision
from selfspec.runtimes.seen_text import Reach
from selfspec.runtimes.target import Target
from selfspec.runtimes.trial_table import DeviceTrial, Tried
from selfspec.sampling.rules import seeded_generator

_FORMAT = 7
"""Of what is kept; raised where trials or their meaning change, so that all machines measure again."""

FOLDER = "auto"
"""Of the cache folder, with what is kept of models."""

_TEXT = 192
_SHARE_FOR_TEXT = 0.25
_SHARE_FOR_COSTS = 0.3
"""Shares of the trial's seconds for the own text and for the costs of verifications."""
_FREE_SHARE = 0.5
_LEAST_GAIN = 1.1
"""Times plain decoding that a layer draft has to promise for the memory of its weights."""

_LEAST_SHARE = 0.9
"""Share of the bytes of weights in the model's dtype that its own take, if low-bit weights are expected to pay."""

_SMALL = 3e8
"""Parameters below which a model is taken to draft best at 6 bits.

At 4 bits SmolLM2 with 135 million chooses 0.81 of the tokens that it chooses in full, at 6 bits 0.95; of what Qwen2.5
with 1.5 billion drafts at 4 bits 0.96 is accepted.
"""

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
class Assignment:
    """Sublayers that draft, and the precision of their weights and of the head (``None`` for the target's own)."""

    kept: KeptSet
    precision: Precision | None = None
    reach: Reach | None = None
    """What of a text they attend to; ``None`` for all of it."""

    @property
    def is_low_bit(self) -> bool:
        """It is the whole model at few bits."""
        return self.precision is not None and len(self.kept.sublayers) == self.kept.total

    @cached_property
    def name(self) -> str:
        """What reports call it, as ``4 bits, head 8, 30 of 60 sublayers``."""
        kept, total = len(self.kept.sublayers), self.kept.total
        words = [] if kept == total else [f"{kept} of {total} sublayers"]
        if self.precision is not None:
            body, head = self.precision.attention, self.precision.head
            words[:0] = [f"{body} bits"] if body == head else [f"{body} bits, head {head}"]
        if self.reach is not None:
            words.append(f"{self.reach.slots} tokens seen")
        return ", ".join(words)


@dataclass(frozen=True)
class TriedAssignment:
    """An assignment that was tried."""

    assignment: Assignment
    agreement: float
    """Share of the own text's tokens after which it chose what the target chose."""
    costs: RowCosts
    confidences: tuple[tuple[float, bool], ...] = ()
    """At each token its largest probability, and whether its choice was the target's."""
    tokens_per_second: float = 0.0
    """What a round of it promises."""


@dataclass(frozen=True)
class Preparation:
    """What is known before the first request."""

    verify: RowCosts
    """Costs of the target's forward."""
    layers: TriedAssignment | None
    """The layer draft to take; ``None`` where every one is slower than plain decoding."""
    lacking_bytes: int = 0
    """What low-bit weights take at least, where there is no memory for them; 0 otherwise."""
    measured: bool = True
    """Whether costs and agreement were measured on this machine, not estimated."""


@dataclass(frozen=True)
class AutoSettings(MethodSettings):
    """Settings of ``auto``. Nothing has to be set."""

    delta: float = fraction(0.02, "share of plain decoding's time that a request may lose by trying drafts")
    memory_limit: float | None = setting(
        None, "most GiB of low-bit weights; none is half of the memory that is available, 0 makes none", minimum=0.0
    )
    trial_seconds: float = setting(
        10.0, "time for trying drafts at a model's first use on a machine; the result is kept", minimum=0.0
    )
    group: int = setting(32, "inputs of a weight row that share a scale: 32, 64 or 128", minimum=32, maximum=128)

    def __post_init__(self) -> None:
        super().__post_init__()
        Precision(group=self.group)  # refuses groups that are not supported


def prepare(target: Target, settings: AutoSettings, progress: Callable[[str], None] = lambda _: None) -> Preparation:
    """Measures costs, chooses the layer draft and makes its weights; uses the kept result if there is one.

    Costs that other processes have disturbed are not kept.

    ``progress`` is called with a line of text before each part that may take long. Where there is no memory for
    low-bit weights, ``NoLowBitWeightsWarning`` says so, unless the settings ask for none.
    """
    kept = _read(target, settings)
    if kept is None:
        kept = _find_out(target, settings, progress)
        if not kept.verify.disturbed:
            kept_file(target, FOLDER).write({"format": _FORMAT, "terms": _terms(settings), **asdict(kept)})
    kept = _with_low_bit_weights(target, kept, progress)
    warn_of_memory(kept, settings)
    return kept


def start_over(target: Target, settings: AutoSettings, made: TriedAssignment | None = None) -> Preparation:
    """Estimates, in place of what was kept or measured on a machine that was busy then; it is measured again later.

    A layer draft whose low-bit weights are ``made`` stays, with estimated costs: those of another one would be made
    anew, and take memory beside them.
    """
    kept_file(target, FOLDER).remove()
    estimate = _estimate(target, settings)
    if made is None:
        return estimate
    return replace(estimate, layers=_with_estimated_costs(target, made, estimate.verify), lacking_bytes=0)


def _with_estimated_costs(target: Target, trial: TriedAssignment, verify: RowCosts) -> TriedAssignment:
    """A trial whose forwards take the share of a verification's time that their weights have of its bytes."""
    kept, low = trial.assignment.kept, estimate_row_costs(target, trial.assignment.precision)
    share, full = len(kept.sublayers) / kept.total, estimate_row_costs(target)
    seconds = tuple(share * own * low(rows) / full(rows) for rows, own in zip(verify.rows, verify.seconds, strict=True))
    return replace(trial, costs=RowCosts(verify.rows, seconds), tokens_per_second=0.0)


def expect(target: Target, settings: AutoSettings) -> Preparation:
    """The kept result if there is one, else estimates: nothing is measured or made, so that no answer waits."""
    return _read(target, settings) or _estimate(target, settings)


def _estimate(target: Target, settings: AutoSettings) -> Preparation:
    """Costs by the bytes of the weights; those of more than 8 bits are taken to have a good draft at 4, or at 6.

    On an accelerator costs, and the low-bit weights that are right there, are those of its trial.
    """
    if target.trial is not None and target.trial.chosen.seconds:
        return _from_device_trial(target, target.trial, settings)
    bits = 6 if target.parameter_count < _SMALL else 4
    verify, precision = estimate_row_costs(target), Precision.of(bits, settings.group)
    if target.dtype.itemsize * target.parameter_count * _LEAST_SHARE > weight_bytes(target):
        return Preparation(verify, None, measured=False)  # the weights have few bits themselves
    try:
        needed = target.low_bit_bytes(precision)
        draft = estimate_row_costs(target, precision)
    except UnsupportedModelError:
        return Preparation(verify, None, measured=False)
    if needed > allowed_bytes(target, settings):
        return Preparation(verify, None, needed, measured=False)
    layers = TriedAssignment(Assignment(KeptSet.full(target.sublayer_count), precision), LOW_BIT_CONFIDENCE.mean, draft)
    return Preparation(verify, layers, measured=False)


def _from_device_trial(target: Target, tried: DeviceTrial, settings: AutoSettings) -> Preparation:
    """What the trial of an accelerator measured, and the fastest low-bit weights that passed it."""
    verify = _row_costs(tried.chosen)
    passed = {bits: each for bits, each in tried.weights.items() if each.passed and each.seconds}
    for bits in sorted(passed, key=lambda bits: passed[bits].seconds[1]):
        precision, draft = Precision.of(bits, settings.group), _row_costs(passed[bits])
        with contextlib.suppress(UnsupportedModelError):
            needed = target.low_bit_bytes(precision)
            if draft(1) >= verify(1):
                break
            if needed > allowed_bytes(target, settings):
                return Preparation(verify, None, needed, measured=False)
            assignment = Assignment(KeptSet.full(target.sublayer_count), precision)
            return Preparation(verify, TriedAssignment(assignment, LOW_BIT_CONFIDENCE.mean, draft), measured=False)
    return Preparation(verify, None, measured=False)


def _row_costs(tried: Tried) -> RowCosts:
    return RowCosts(tuple(tried.seconds), tuple(tried.seconds.values()))


def warn_of_memory(preparation: Preparation, settings: AutoSettings) -> None:
    """Says that there is no memory for low-bit weights, unless the settings ask for none."""
    if preparation.lacking_bytes and settings.memory_limit != 0:
        limit = "the memory that is available allows" if settings.memory_limit is None else "memory_limit allows"
        warnings.warn(
            "auto drafts without low-bit weights: they take "
            f"{preparation.lacking_bytes / 2**20:.0f} MiB, more than {limit}; raise memory_limit or free memory, "
            "or set memory_limit=0 to do without them",
            NoLowBitWeightsWarning,
            stacklevel=3,
        )


def _find_out(target: Target, settings: AutoSettings, progress: Callable[[str], None]) -> Preparation:
    progress("forwards of several rows")
    seconds = _SHARE_FOR_COSTS * settings.trial_seconds
    verify = measure_row_costs(target, range(target.sublayer_count), most_seconds=seconds)
    limit = allowed_bytes(target, settings)
    length = max(16, min(_TEXT, int(_SHARE_FOR_TEXT * settings.trial_seconds / verify(1)), target.context_limit))
    progress("drafts on a text of the model's own")
    trials = try_assignments(
        target,
        candidates(target, group=settings.group),
        write_text(target, min(length, target.context_limit)),
        verify,
        most_seconds=settings.trial_seconds,
        fits=lambda assignment: target.low_bit_bytes(assignment.precision) <= limit,
        clock=target.ranks.clock,
    )
    best = best_trial(trials)
    chosen = best if best is not None and promises_enough(best, verify) else None
    target.release_low_bit(None if chosen is None else chosen.assignment.precision)
    return Preparation(verify, chosen, _lacking(target, settings.group, limit))


def promises_enough(trial: TriedAssignment, verify: RowCosts) -> bool:
    """Whether a layer draft promises enough for the memory of its weights."""
    return promised_by(trial, verify) > _LEAST_GAIN / verify(1)


def _most_bytes(settings: AutoSettings) -> float | None:
    return None if settings.memory_limit is None else settings.memory_limit * 2**30


def _terms(settings: AutoSettings) -> dict[str, Any]:
    """The settings that a kept result depends on."""
    return {"group": settings.group, "most_bytes": _most_bytes(settings), "most_seconds": settings.trial_seconds}


def allowed_bytes(target: Target, settings: AutoSettings) -> float:
    """Most bytes of low-bit weights, on the target's device."""
    available, most_bytes = free_bytes(target.device), _most_bytes(settings)
    most = math.inf if most_bytes is None else most_bytes
    share = _FREE_SHARE if most_bytes is None else 1.0
    return most if available is None else min(most, share * available)


def _lacking(target: Target, group: int, limit: float) -> int:
    """Bytes of the smallest low-bit weights that candidates draft with, if they exceed the limit, else 0."""
    needed = []
    for assignment in candidates(target, group=group):
        with contextlib.suppress(UnsupportedModelError):
            needed.append(target.low_bit_bytes(assignment.precision))
    smallest = min(filter(None, needed), default=0)
    return smallest if smallest > limit else 0


def _with_low_bit_weights(target: Target, preparation: Preparation, progress: Callable[[str], None]) -> Preparation:
    """Makes the low-bit weights that draft; without memory for them now, the preparation loses its layer draft."""
    precision = None if preparation.layers is None else preparation.layers.assignment.precision
    if precision is None:
        return preparation
    needed = target.low_bit_bytes(precision)
    progress(f"low-bit weights of {needed / 2**20:.0f} MiB")
    try:
        with torch.inference_mode():
            target.at(precision)
    except OutOfMemoryError:
        return replace(preparation, layers=None, lacking_bytes=needed)
    return preparation


def _read(target: Target, settings: AutoSettings) -> Preparation | None:
    kept = kept_file(target, FOLDER).read()
    if kept is None or (kept.get("format"), kept.get("terms")) != (_FORMAT, _terms(settings)):
        return None
    with contextlib.suppress(ValueError, TypeError, KeyError, AttributeError):
        found: Preparation = restored(Preparation, kept)
        return found
    return None


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
) -> list[TriedAssignment]:
    """Tries assignments, most promising first, on the model's own text; begins no trial after ``most_seconds``.

    ``fits`` says whether the low-bit weights of an assignment may be made. Returns the trials, the fastest first; costs
    of those that are close were measured in turns.
    """
    began = clock()
    trials: list[TriedAssignment] = []
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


def best_trial(trials: Sequence[TriedAssignment]) -> TriedAssignment | None:
    """Of the trials that promise most, to within what timing can tell, the one that agrees most."""
    equal = [trial for trial in trials if trial.tokens_per_second >= _EQUAL * _fastest(trials)]
    return max(equal, key=lambda trial: trial.agreement, default=None)


def _timed_again(target: Target, trials: Sequence[TriedAssignment], verify: RowCosts) -> list[TriedAssignment]:
    """Trials with costs that were measured in turns, which a single trial's are not."""
    if len(trials) < 2:
        return list(trials)
    which = [(trial.assignment.kept.sublayers, trial.assignment.precision) for trial in trials]
    costs = measure_together(target, which, row_counts=DRAFT_ROWS, most_seconds=0.2 * len(trials))
    return [_promising(replace(trial, costs=each), verify) for trial, each in zip(trials, costs, strict=True)]


def promised_by(trial: TriedAssignment, verify: RowCosts) -> float:
    """Tokens per second of rounds that a trial's layers draft."""
    policy = DraftPolicy.fastest(Outlook([1.0], [trial.agreement]), trial.costs(1), verify.table(), MOST_DRAFTED)
    return policy.plan.tokens_per_second


def _promising(trial: TriedAssignment, verify: RowCosts) -> TriedAssignment:
    """The trial with what it promises."""
    return replace(trial, tokens_per_second=promised_by(trial, verify))


def _fastest(trials: Sequence[TriedAssignment]) -> float:
    return max((trial.tokens_per_second for trial in trials), default=0.0)


def _try(
    target: Target, assignment: Assignment, text: OwnText, verify: RowCosts, fastest: float
) -> TriedAssignment | None:
    """Tries an assignment; ``None`` where another is faster even if this one's forwards took no time."""
    outcomes = _agreement(target, assignment, text)
    agreement = sum(agrees for _, agrees in outcomes) / len(outcomes)
    if agreement < 1 and 1 / ((1 - agreement) * verify(1)) < fastest:
        return None
    costs = measure_row_costs(
        target, assignment.kept.sublayers, assignment.precision, row_counts=DRAFT_ROWS, most_seconds=0.2
    )
    return _promising(TriedAssignment(assignment, agreement, costs, outcomes), verify)


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
