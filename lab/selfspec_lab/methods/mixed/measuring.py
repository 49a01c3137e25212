"""Measures a model for ``mixed`` before the first request, once, and saves the plan."""

import time
from dataclasses import asdict, dataclass

import torch

from selfspec.errors import OutOfMemoryError
from selfspec.methods.auto.preparation import OwnText, write_text
from selfspec.runtimes.costs.measuring import measure_row_costs
from selfspec.runtimes.costs.parts import LatencyProfile, measure_latencies
from selfspec.runtimes.costs.rows import RowCosts
from selfspec.runtimes.costs.store import (
    keep_latencies,
    kept_file,
    kept_latencies,
    read_latencies,
)
from selfspec.runtimes.formats import LOW_BITS
from selfspec.runtimes.kept_file import KeptFile
from selfspec.runtimes.precision import FULL_BITS, Precision
from selfspec.runtimes.target import Target
from selfspec_lab.methods.mixed.losses import measure_losses
from selfspec_lab.methods.mixed.plan import Candidate, Plan, fill, part_seconds, search_plan

_CONTEXT = 256
"""Tokens in the cache at which attention is weighed."""
_TEXT = 192
_TEXT_SHARE, _LOSSES_END = 0.2, 0.85
"""Share of the time for generating the text, and the share after which the losses end; trials take the rest."""
_FEWEST_ROWS = 16
_VERSION = 2


@dataclass(frozen=True)
class Conditions:
    """The settings of ``mixed`` that a plan depends on."""

    max_draft_length: int
    most_seconds: float
    group: int


@dataclass(frozen=True)
class Found:
    """The fastest plan, and whether it promises more than plain decoding."""

    plan: Plan
    pays: bool


def find_plan(target: Target, conditions: Conditions) -> Found:
    """The saved plan of a model; without one, measures the model and saves the plan."""
    found = _kept(target, conditions)
    if found is None:
        found = measure_plan(target, conditions)
        kept = {"conditions": asdict(conditions), "version": _VERSION, **asdict(found)}
        _file(target, conditions).write(kept)
    return found


@torch.inference_mode()
def measure_plan(target: Target, conditions: Conditions) -> Found:
    """Measures time and loss of each component at each precision, and searches for the fastest plan."""
    began = time.perf_counter()
    verify = measure_row_costs(target, range(target.sublayer_count), row_counts=(1, 2, 4, 8, 16))
    text = write_text(target, _text_length(target, verify, conditions))
    profiles = _profiles(target, conditions)
    left = max(0.0, _LOSSES_END * conditions.most_seconds - (time.perf_counter() - began))
    losses = measure_losses(
        target,
        text.token_ids[: _loss_rows(target, text, left)],
        [bits for bits in profiles if bits != FULL_BITS],
        group=conditions.group,
        most_seconds=left,
    )
    plan = search_plan(
        fill(losses, part_seconds(profiles, target.layer_count, _CONTEXT)),
        lambda candidate: _agreement(target, candidate, text, conditions),
        verify,
        outside=profiles[FULL_BITS].embedding,
        longest=conditions.max_draft_length,
    )
    target.release_low_bit()
    return Found(plan, plan.tokens_per_second * verify(1) > 1)


def _text_length(target: Target, verify: RowCosts, conditions: Conditions) -> int:
    affordable = int(_TEXT_SHARE * conditions.most_seconds / verify(1))
    return min(_TEXT, target.context_limit, max(_FEWEST_ROWS, affordable))


def _loss_rows(target: Target, text: OwnText, most_seconds: float) -> int:
    """How many rows of the text can be measured in the time: a choice runs half of the model, on average."""
    rows = len(text.token_ids)
    forward = target.lay_out(target.new_sequence(rows, rows, rows), rows)
    began = time.perf_counter()
    states = target.embed(text.token_ids, forward)
    target.logits(target.run(states, range(target.sublayer_count), forward).hidden_states)
    needed = (time.perf_counter() - began) * target.sublayer_count * (1 + len(LOW_BITS)) / 2
    return max(_FEWEST_ROWS, min(rows, int(rows * most_seconds / needed)))


def _profiles(target: Target, conditions: Conditions) -> dict[int, LatencyProfile]:
    """Latencies by bits, with one precision in memory at a time; bits whose weights do not fit are left out."""
    own = read_latencies(target)
    if own is None:
        own = measure_latencies(target)
        keep_latencies(target, own)
    profiles = {FULL_BITS: own}
    for bits in LOW_BITS:
        target.release_low_bit()
        try:
            profiles[bits] = kept_latencies(target, Precision.of(bits, conditions.group))
        except OutOfMemoryError:
            continue
    target.release_low_bit()
    return profiles


def _agreement(target: Target, candidate: Candidate, text: OwnText, conditions: Conditions) -> float:
    """How often a candidate and the target choose the same token, on the text."""
    plan = Plan(candidate.bits, 1, 0.0, 0.0, 0.0)
    target.release_low_bit()
    model, rows = target.at(plan.precision(conditions.group)), len(text.token_ids)
    forward = target.lay_out(target.new_sequence(rows, rows, rows), rows)
    states = model.run(target.embed(text.token_ids, forward), plan.kept.sublayers, forward).hidden_states
    return float((model.logits(states).argmax(-1) == text.choices).float().mean())


def _file(target: Target, conditions: Conditions) -> KeptFile:
    return kept_file(target, "mixed", conditions)


def _kept(target: Target, conditions: Conditions) -> Found | None:
    kept = _file(target, conditions).read()
    try:
        if kept is None or kept["version"] != _VERSION or kept["conditions"] != asdict(conditions):
            return None
        plan = Plan(**{**kept["plan"], "bits": tuple(kept["plan"]["bits"])})
        return Found(plan, bool(kept["pays"])) if len(plan.bits) == target.sublayer_count + 1 else None
    except (KeyError, TypeError):
        return None
