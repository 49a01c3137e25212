"""KnapSpec: the draft is what an integer knapsack over attention and MLP latencies says is worth its time."""

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from selfspec.decoding.draft import ConfidenceThreshold, LayerDraft, NoDraft
from selfspec.decoding.drafter import Branches, Drafter, Feedback, Needs, Prefill
from selfspec.errors import StateError
from selfspec.methods.knapsack import (
    MAX_WEIGHT,
    PAPER_SKIP_RATIO,
    Calibration,
    Candidates,
    RecentRounds,
    Selection,
    SpreadRows,
    best_candidate,
    find_candidates,
    integer_weights,
    selection_rows,
)
from selfspec.methods.payoff import NEW, Record
from selfspec.methods.registry import register
from selfspec.methods.selecting import PeriodicDrafter, Selected, SelectingMethod, SelectingSettings
from selfspec.methods.settings import fraction, setting
from selfspec.methods.skipping import ENDS_HELP, check_skipped, free_sublayers, most_skipped
from selfspec.methods.state import LearnedState
from selfspec.model.kept import KeptSet
from selfspec.runtimes.costs.latencies import Latencies, saved_latencies
from selfspec.runtimes.target import Target

_LARGE_MODEL = 10_000_000_000
_TOKENS = 40
"""Output tokens before the first selection of our schedule."""

_AUTHORS_LENGTHS = range(18)
"""Draft lengths in the objective of the authors' code, whatever the longest draft is."""

_SELECTION = "selection"
_SELECTION_NUMBERS = ("draft_length", "acceptance", "tokens_per_second")


@dataclass(frozen=True)
class KnapSpecSettings(SelectingSettings):
    """Settings of ``knapspec``."""

    interval: int | None = setting(
        None, "rounds between two selections; none is 64, or 128 from 10 billion parameters on", minimum=1
    )
    recent_rounds: int = setting(
        5,
        "with schedule=paper, rounds whose tokens a selection uses; the whole model drafts the first ones",
        minimum=1,
        maximum=64,
    )
    recent_tokens: int | None = setting(
        None,
        "with schedule=ours, tokens over which the rows of a selection are spread; none is 40",
        minimum=1,
        maximum=128,
    )
    similarity_threshold: float = setting(
        0.5, "prune states whose mean cosine to the target's is lower", minimum=-1.0, maximum=1.0
    )
    max_draft_length: int = setting(10, "longest draft, in the objective too", minimum=1, maximum=64)
    confidence_threshold: float = fraction(0.7, "stop drafting after a token less confident than this; 0 never stops")
    tpt: str = setting(
        "paper",
        "time of a step in the objective: of attention and MLP (paper), or of embedding and head too (with_head)",
        choices=("paper", "with_head"),
    )
    skip_budget: float | None = fraction(
        None,
        "largest share of the weight K of all sublayers that drafts skip (a half in the paper); none is the half with "
        "schedule=paper, else by the model's size: 0.3 up to 0.2 billion parameters, 0.5 from 1.4 billion on",
    )
    max_weight: int | None = setting(
        MAX_WEIGHT, "largest integer weight of a sublayer (5 in the authors' code); none sets no limit", minimum=1
    )
    fixed_ends: bool = setting(True, ENDS_HELP)
    full_model: bool = setting(
        True, "the whole model may be chosen, which is plain decoding; false leaves it out (authors' code)"
    )
    lengths: str = setting(
        "paper",
        "draft lengths in the objective: 1 to the longest draft (paper), or 0 to 17 (authors, of their code)",
        choices=("paper", "authors"),
    )


@register
class KnapSpec(SelectingMethod):
    """Drafts with the sublayers and the length that promise the most tokens per time (KnapSpec, algorithm 1).

    With ``schedule=paper`` the whole model drafts ``recent_rounds`` rounds, which takes no longer than plain decoding.
    Then a selection uses all tokens of these rounds, and so does one every ``interval`` rounds. The paper does not say
    what drafts before the first selection; this is what the authors' code does, except that it does not count the first
    round.

    With ``schedule=ours`` the first request drafts nothing until its output has ``recent_tokens`` tokens. A selection
    uses rows spread over them; a row sees the target's keys, as the first token of a draft does. Candidates skip at
    most ``most_skipped`` (a half in the paper), and once drafts have been tested the choice among them is made again
    (``Calibration``).

    Latencies are minima of repeated measurements and are kept in the user's cache folder, so that selections do not
    depend on what else the machine does. They are measured again if live rounds are clearly faster than they predict.

    With ``draft_bits`` branches, acceptance and the latencies of drafts are those of the low-bit weights; the branches
    start from the target's ``h[2]``, or ``h[0]`` without ``fixed_ends``. The whole model is a draft then, too.
    """

    name = "knapspec"
    summary = "skips the attention and MLP sublayers that a knapsack over measured latencies selects"
    source = "KnapSpec (Cha et al. 2026)"
    Settings = KnapSpecSettings
    settings: KnapSpecSettings

    def __init__(self, target: Target, settings: KnapSpecSettings) -> None:
        super().__init__(target, settings)
        self.interval = settings.interval or (64 if target.parameter_count < _LARGE_MODEL else 128)
        self.free = free_sublayers(target.layer_count, settings.fixed_ends)  # the program starts with the first of them
        authors = settings.lengths == "authors"
        self.lengths = _AUTHORS_LENGTHS if authors else range(1, settings.max_draft_length + 1)
        self.tokens = settings.recent_tokens or _TOKENS
        self.rows = min(self.tokens, max(8, target.hidden_size // 64))
        most_tokens = self.rows if self.ours else settings.recent_rounds * (settings.max_draft_length + 1)
        self.selection_rows = selection_rows(target, most_tokens)
        by_schedule = most_skipped(target) if self.ours else PAPER_SKIP_RATIO
        self.skip_ratio = by_schedule if settings.skip_budget is None else settings.skip_budget
        self.latencies = Latencies(target, self.draft_precision)
        if self.free and not self.ours:
            self.first_draft = self.draft(KeptSet.full(target.sublayer_count), settings.max_draft_length)

    @property
    def watched(self) -> Collection[int]:
        """Every state after the first layer, or all of them where that may be skipped."""
        return range(self.free.start, self.target.sublayer_count + 1) if self.free else range(0)

    @property
    def needs(self) -> Needs:
        """Cache slots for the branches."""
        return Needs(probe_rows=self.selection_rows if self.free else 0)

    def best_of(self, candidates: Candidates, context: int) -> Selection:
        """The second stage: the set and the length that promise most at this many tokens in the cache."""
        return best_candidate(
            candidates if self.settings.full_model else candidates.that_skip(),
            self.latencies.of_target,
            context,
            self.lengths[-1],
            with_head=self.settings.tpt == "with_head",
            draft_profile=self.latencies.of_drafts,
            shortest=self.lengths[0],
        )

    def choice_of(self, selection: Selection, context: int = 0, calibration: Calibration | None = None) -> Selected:
        """Drafts by a selection. The whole model as its own draft gains nothing, so it becomes plain decoding."""
        if not selection.kept.skipped and self.draft_precision is None:
            return Selected(selection, NoDraft(), Record(self.payoff), calibration)
        with_head = self.settings.tpt == "with_head"
        step = self.latencies.of_drafts.draft_step(selection.kept, context, with_head=with_head)
        record = Record(self.payoff, step / self.latencies.of_target.target_step(context, with_head=with_head))
        return Selected(selection, self.draft(selection.kept, selection.draft_length), record, calibration)

    def draft(self, kept: KeptSet, selected_length: int) -> LayerDraft:
        """Drafts with a kept set until confidence is low, or else to the selected length."""
        settings = self.settings
        if settings.confidence_threshold == 0:
            return LayerDraft(kept, selected_length)
        # Section 3.5, dynamic drafting exit: confidence decides instead of the selected length.
        return LayerDraft(kept, settings.max_draft_length, ConfidenceThreshold(settings.confidence_threshold))

    def prepare(self, progress: Callable[[str], None] = lambda _: None) -> None:
        """Makes the low-bit weights that draft, and measures the latencies unless they are saved."""
        super().prepare(progress)
        progress("latencies of attention and MLP")
        _ = self.latencies.of_target, self.latencies.of_drafts

    def begin(self, prefill: Prefill) -> Drafter:
        """Starts on a request."""
        return KnapSpecDrafter(self, prefill)

    def state(self) -> LearnedState:
        """The latency profile, if there is one yet, and the last selection."""
        saved, choice = None, self.last_choice
        if choice is not None:
            numbers = {name: getattr(choice.selection, name) for name in _SELECTION_NUMBERS}
            saved = {"skipped": list(choice.selection.kept.skipped), **numbers}
        return LearnedState({**self.latencies.values(), _SELECTION: saved})

    def restore(self, state: LearnedState) -> None:
        """Loads a selection, which requests then start with, and its latency profile, so that none is measured."""
        profile = saved_latencies(state.values, self.target)
        selection = _read_selection(state, self)
        self.latencies.adopt(profile)
        self.adopt(None if profile is None or selection is None else self.choice_of(selection))


def _read_selection(state: LearnedState, method: KnapSpec) -> Selection | None:
    target, lengths = method.target, method.lengths
    values: Any = state.values.get(_SELECTION)
    if values is None:
        return None
    if not isinstance(values, Mapping) or values.keys() != {"skipped", *_SELECTION_NUMBERS}:
        raise StateError("the state's selection is damaged; learn it again")
    skipped = check_skipped(values["skipped"], method.free, 0, len(method.free))
    length, *rates = (values[name] for name in _SELECTION_NUMBERS)
    are_rates = all(type(rate) is float and 0 <= rate < math.inf for rate in rates)
    if type(length) is not int or length not in lengths or not are_rates:
        raise StateError(f"the state's selection is not one of drafts of up to {lengths[-1]} tokens; learn it again")
    return Selection(KeptSet.skipping(skipped, target.sublayer_count), length, *rates)


class KnapSpecDrafter(PeriodicDrafter):
    """One request's selections."""

    method: KnapSpec

    def __init__(self, method: KnapSpec, prefill: Prefill) -> None:
        recent_rounds = method.settings.recent_rounds
        rows = (
            SpreadRows(method.tokens, method.rows, method.selection_rows)
            if method.ours
            else RecentRounds(recent_rounds, method.selection_rows)
        )
        super().__init__(method, prefill, rows, method.interval)
        # The first selection is as soon as there are rows for it.
        self.rounds = method.interval - (0 if method.ours else min(recent_rounds, method.interval))
        if method.free:
            _ = method.latencies.of_target, method.latencies.of_drafts  # measured before the first round, if at all

    @property
    def selection(self) -> Selection | None:
        """The last one; ``None`` before the first, and if the model is too small to skip anything."""
        return None if self.choice is None else self.choice.selection

    def choose(self, references: torch.Tensor, branches: Branches | None = None) -> None:
        """Drafts with the best candidate at the target's states of ``watched``, ``[n + 1, rows, hidden]``.

        ``branches`` run these rows; without them they are the last committed tokens.
        """
        method, context, rows = self.method, self.probe.committed, references.shape[1]
        profile = method.latencies.of_drafts
        if branches is None:
            branches = self.probe.branches(rows, method.selection_rows, method.draft_precision)
        candidates = find_candidates(
            method.target,
            references,
            branches.run,
            weights=integer_weights(profile.attention(context), profile.mlp, method.settings.max_weight),
            similarity_threshold=method.settings.similarity_threshold,
            skip_ratio=method.skip_ratio,
            precision=method.draft_precision,
            fixed_ends=method.settings.fixed_ends,
        )
        calibration = Calibration(candidates, rows) if method.ours else None
        self.use(method.choice_of(method.best_of(candidates, context), context, calibration))

    def judge(self, feedback: Feedback, seconds: float) -> None:
        """Counts a round of its choice, and takes another of its candidates if that promises more by now."""
        method, context, choice = self.method, self.probe.committed, self.choice
        kept = feedback.draft.kept if isinstance(feedback.draft, LayerDraft) else None
        method.latencies.note_round(kept, feedback.drafted, context, seconds)
        if kept is None or choice is None:
            return
        before = choice.record.drafted // NEW
        choice.record.note_round(feedback.drafted, feedback.accepted)
        if (calibration := choice.calibration) is None:
            return
        calibration.note_round(kept, feedback.drafted, feedback.accepted)
        if choice.record.drafted // NEW > before:
            selection = method.best_of(calibration.candidates, context)
            if selection.kept != choice.selection.kept:
                self.use(method.choice_of(selection, context, calibration))
