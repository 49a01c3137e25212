"""KnapSpec: the draft is what an integer knapsack over attention and MLP latencies says is worth its time."""

import threading
from collections.abc import Callable, Collection, Sequence

import torch

from selfspec.decoding.draft import Draft, LayerDraft, NoDraft
from selfspec.decoding.drafter import Drafter, Feedback, Needs, Prefill
from selfspec.decoding.probe import Branches, Probe, run_selection
from selfspec.decoding.stopping import ConfidenceThreshold
from selfspec.methods.base import Method
from selfspec.methods.budget import most_skipped
from selfspec.methods.knapsack import Candidates, Selection, best_candidate, integer_weights
from selfspec.methods.knapspec_calibration import Calibration
from selfspec.methods.knapspec_candidates import PAPER_SKIP_RATIO, find_candidates, selection_rows
from selfspec.methods.knapspec_choice import Choice, Ground, read_selection, selection_values
from selfspec.methods.knapspec_latencies import Latencies, read_profile
from selfspec.methods.knapspec_schedule import OurSchedule, PaperSchedule, Schedule
from selfspec.methods.knapspec_settings import KnapSpecSettings
from selfspec.methods.payoff import NEW, Payoff, Record
from selfspec.methods.registry import register
from selfspec.methods.sharing import share_kept_set
from selfspec.methods.state import LearnedState
from selfspec.model.kept import KeptSet
from selfspec.runtimes.latency import LatencyProfile
from selfspec.runtimes.target import Target

__all__ = ["KnapSpec", "KnapSpecDrafter", "KnapSpecSettings"]

_LARGE_MODEL = 10_000_000_000
_TOKENS = 40
"""Output tokens before the first selection of our schedule."""


@register
class KnapSpec(Method):
    """Drafts with the sublayers and the length that promise the most tokens per time (KnapSpec, algorithm 1).

    With ``schedule=paper`` the whole model drafts ``recent_rounds`` rounds, which takes no longer than plain decoding.
    Then a selection uses all tokens of these rounds, and so does one every ``interval`` rounds. The paper does not say
    what drafts before the first selection; this is what the authors' code does, except that it does not count the first
    round.

    With ``schedule=ours`` the first request drafts nothing until its output has ``recent_tokens`` tokens (40). A
    selection uses rows spread over the last 40, as many as a 64th of the hidden size (at least 8), which bounds the
    memory; a row sees the target's keys, as the first token of a draft does. Later requests start with the last
    selection, and there is another one where it pays (``selfspec.methods.payoff``), at least ``interval`` rounds after
    the last. A set whose live acceptance promises less than plain decoding is declined.

    Candidates skip at most half as much again as ``selfspec.methods.budget`` gives a model of this size (a half in the
    paper), and once drafts have been tested the choice among them is made again (``Calibration``).

    On SmolLM2-135M (six chat messages, 256 output tokens each) the paper's schedule accepts 0.80 of the tokens that a
    part of the model drafts and spends 41 % of the time on selections. Ours spends 3 %, and finds that no set is faster
    than plain decoding.

    The latencies are minima of repeated measurements, and are remembered in the user's cache folder, so that selections
    do not depend on what else the machine does. They are measured again if live rounds are clearly faster than they
    predict (``LatencyCheck``).

    A selection's branches go through a sublayer in one forward of at most ``selection_rows`` rows, or in several where
    they have more. Memory above plain decoding: cache slots for that many rows (0.5 % of the weights, or 96 rows if
    that is more), logits of 0.5 % of the weights, and three tables of ``(K / 2 + 1) · rows · hidden`` numbers, one
    of them float32, where ``rows`` are the tokens of a selection; pruned states are not in them.

    With ``draft_bits`` branches, acceptance and the latencies of drafts are those of the copies; the branches start
    from the target's ``h[2]``. The whole model is a draft then, too.

    In a batch the layer drafts share one kept set, as ``selfspec.methods.sharing`` says, unless ``share_kept_set`` is
    off. Each request still makes its own selections.
    """

    name = "knapspec"
    summary = "skips the attention and MLP sublayers that a knapsack over measured latencies selects"
    source = "KnapSpec (Cha et al. 2026)"
    Settings = KnapSpecSettings
    settings: KnapSpecSettings
    learns = True

    def __init__(self, target: Target, settings: KnapSpecSettings) -> None:
        super().__init__(target, settings)
        self.interval = settings.interval or _default_interval(target)
        # The first and the last layer are never skipped (authors' code), so the program starts after the first.
        self.has_choice = target.layer_count > 2
        self.watched = range(2, target.sublayer_count + 1) if self.has_choice else range(0)
        self.tokens = settings.recent_tokens or _TOKENS
        self.rows = min(self.tokens, max(8, target.hidden_size // 64))
        ours = settings.schedule == "ours"
        most_tokens = self.rows if ours else settings.recent_rounds * (settings.max_draft_length + 1)
        self.selection_rows = selection_rows(target, most_tokens)
        self.skip_ratio = most_skipped(target) if ours else PAPER_SKIP_RATIO
        self.payoff = Payoff()
        self._choice: Choice | None = None
        self.latencies = Latencies(target, self.draft_precision)
        self._lock = threading.Lock()

    @property
    def needs(self) -> Needs:
        """Cache slots for the branches."""
        return Needs(probe_rows=self.selection_rows if self.has_choice else 0)

    @property
    def profile(self) -> LatencyProfile:
        """The latencies of this model; see ``Latencies.of_target``."""
        return self.latencies.of_target

    @property
    def draft_profile(self) -> LatencyProfile:
        """The latencies of the weights that draft; see ``Latencies.of_drafts``."""
        return self.latencies.of_drafts

    def schedule(self, probe: Probe) -> Schedule:
        """The schedule of a request."""
        if self.settings.schedule == "paper":
            return PaperSchedule(probe, self.interval, self.settings.recent_rounds)
        return OurSchedule(probe, self.interval, self.tokens, self.rows)

    @property
    def last_choice(self) -> Choice | None:
        """The last selection of any request, and what came of it; ``None`` before the first."""
        with self._lock:
            return self._choice

    def best_of(self, candidates: Candidates, context: int) -> Selection:
        """The second stage: the set and the length that promise most.

        Args:
            candidates: of the first stage.
            context: tokens in the cache.
        """
        return best_candidate(
            candidates,
            self.profile,
            context,
            self.settings.max_draft_length,
            with_head=self.settings.tpt == "with_head",
            draft_profile=self.draft_profile,
        )

    def adopt(self, selection: Selection, context: int, ground: Ground | None = None) -> Choice:
        """Takes a selection as the last one.

        Args:
            selection: the selection.
            context: tokens in the cache.
            ground: what it was selected from, where that can be looked at again.
        """
        with_head, profile = self.settings.tpt == "with_head", self.profile
        step = self.draft_profile.draft_step(selection.kept, context, with_head=with_head)
        cost = step / profile.target_step(context, with_head=with_head)
        drafts = bool(selection.kept.skipped) or self.draft_precision is not None
        record = Record(self.payoff, cost if drafts else None)
        choice = Choice(selection, record, ground)
        with self._lock:
            self._choice = choice
        return choice

    def prepare(self, progress: Callable[[str], None] = lambda _: None) -> None:
        """Makes the copies that draft, and measures the latencies unless they are saved."""
        super().prepare(progress)
        progress("latencies of attention and MLP")
        _ = self.profile, self.draft_profile

    def begin(self, prefill: Prefill) -> Drafter:
        """Starts on a request."""
        return KnapSpecDrafter(self, prefill)

    def arrange(self, drafters: Sequence[Drafter], drafts: Sequence[Draft]) -> list[Draft]:
        """One kept set for the drafts of a batch, unless ``share_kept_set`` is off."""
        return share_kept_set(drafts) if self.settings.share_kept_set else list(drafts)

    def state(self) -> LearnedState:
        """The latency profile and the last selection, if there are any yet."""
        choice = self.last_choice
        selection = selection_values(None if choice is None else choice.selection)
        return LearnedState({**self.latencies.values(), **selection})

    def restore(self, state: LearnedState) -> None:
        """Loads a latency profile, so that none is measured, and a selection.

        Args:
            state: from ``state``.

        Raises:
            StateError: it is damaged, or the latencies were measured on another device or in another dtype.
        """
        profile = read_profile(state, self.target)
        selection = read_selection(state, self.target, self.settings.max_draft_length)
        self.latencies.adopt(profile)
        with self._lock:
            self._choice = None
        if profile is not None and selection is not None:
            self.adopt(selection, context=0)


class KnapSpecDrafter(Drafter):
    """One request's selections.

    Args:
        method: its method.
        prefill: of the request.

    Attributes:
        selection: the last one; ``None`` before the first, and if the model is too small to skip anything.
        probe: of the request.
    """

    def __init__(self, method: KnapSpec, prefill: Prefill) -> None:
        self.probe = prefill.probe
        self._method = method
        self._settings = method.settings
        self._schedule = method.schedule(self.probe)
        self._ours = self._settings.schedule == "ours"
        self._choice: Choice | None = None
        self._draft: Draft = NoDraft()
        self._rows = 0
        self._started = 0.0
        if method.has_choice:
            _ = method.profile, method.draft_profile  # measured before the first round, if at all
            if not self._ours:
                self._draft = self._draft_with(
                    KeptSet.full(method.target.sublayer_count), self._settings.max_draft_length
                )

    @property
    def selection(self) -> Selection | None:
        """The last one; ``None`` before the first, and if the model is too small to skip anything."""
        return None if self._choice is None else self._choice.selection

    def plan(self) -> Draft:
        """Selects again if it is time to, then drafts with the last selection."""
        method = self._method
        if self._ours and self._choice is None and (choice := method.last_choice) is not None:
            self._use(choice)
        if method.has_choice and self._schedule.is_due(self._ours and self._pays()):
            with method.payoff.selection():
                self.select(*self._schedule.take(method.selection_rows, method.draft_precision))
        self._started = method.payoff.clock()
        declined = self._ours and self._choice is not None and self._choice.record.declined
        return NoDraft() if declined else self._draft

    def _pays(self) -> bool:
        record = Record(self._method.payoff) if self._choice is None else self._choice.record
        return self._method.payoff.pays(self.probe.remaining_tokens, record.gain)

    @property
    def watched(self) -> Collection[int]:
        """Every state after the first layer, in the rounds whose tokens a selection will use."""
        return self._method.watched if self._schedule.watching else ()

    def learn(self, feedback: Feedback) -> None:
        """Counts the round, and keeps the states of its tokens."""
        seconds, rows = self._method.payoff.clock() - self._started, len(feedback.acceptance.rows)
        kept = feedback.draft.kept if isinstance(feedback.draft, LayerDraft) else None
        self._method.latencies.note_round(kept, feedback.drafted, self.probe.committed, seconds)
        if kept is not None and self._choice is not None:
            self._judge(self._choice, kept, feedback.drafted, feedback.accepted)
        self._method.payoff.note_round(seconds, rows)
        states = [feedback.hidden_states[index][:rows] for index in self._method.watched if feedback.hidden_states]
        self._schedule.note_round(torch.stack(states) if states else None, rows)

    def _judge(self, choice: Choice, kept: KeptSet, drafted: int, accepted: int) -> None:
        """Counts a round of a choice, and takes another of its candidates if that promises more by now."""
        before = choice.record.drafted // NEW
        choice.record.note_round(drafted, accepted)
        if choice.ground is None:
            return
        choice.ground.note_round(kept, drafted, accepted)
        if choice.record.drafted // NEW > before:
            selection = self._method.best_of(choice.ground.calibrated, self.probe.committed)
            if selection.kept != choice.selection.kept:
                self._use(self._method.adopt(selection, self.probe.committed, choice.ground))

    def observe(self, feedback: Feedback) -> None:
        """Drops the states kept so far: a selection is over those of successive rounds of its own."""
        self._schedule.restart()

    def select(self, references: torch.Tensor, branches: Branches | None = None) -> None:
        """Selects again.

        Args:
            references: ``[2L - 1, rows, hidden]``, the target's states ``h[2] … h[2L]`` of committed tokens.
            branches: of the same rows; those of the last committed tokens if not given.
        """
        method, settings = self._method, self._settings
        self._rows = references.shape[1]
        profile, context = method.draft_profile, self.probe.committed
        if branches is None:
            branches = self.probe.branches(references.shape[1], method.selection_rows, method.draft_precision)
        steps = find_candidates(
            method.target,
            references,
            weights=integer_weights(profile.attention(context), profile.mlp),
            similarity_threshold=settings.similarity_threshold,
            skip_ratio=method.skip_ratio,
            precision=method.draft_precision,
        )
        self._choose(run_selection(steps, branches.run))

    def _choose(self, candidates: Candidates) -> None:
        """Drafts with the best of the candidates from now on."""
        ground = Ground(candidates, Calibration(candidates, self._rows)) if self._ours else None
        selection = self._method.best_of(candidates, self.probe.committed)
        self._use(self._method.adopt(selection, self.probe.committed, ground))

    def _use(self, choice: Choice) -> None:
        self._choice, self._draft = choice, self._as_draft(choice.selection)

    def _as_draft(self, selection: Selection) -> Draft:
        """What drafts by a selection. The whole model as its own draft gains nothing, so it becomes plain decoding."""
        if not selection.kept.skipped and self._method.draft_precision is None:
            return NoDraft()
        return self._draft_with(selection.kept, selection.draft_length)

    def _draft_with(self, kept: KeptSet, selected_length: int) -> LayerDraft:
        settings = self._settings
        if settings.confidence_threshold == 0:
            return LayerDraft(kept, selected_length)
        # Section 3.5, dynamic drafting exit: confidence decides instead of the selected length.
        stop = ConfidenceThreshold(settings.confidence_threshold)
        return LayerDraft(kept, settings.max_draft_length, stop)


def _default_interval(target: Target) -> int:
    return 64 if target.parameter_count < _LARGE_MODEL else 128
