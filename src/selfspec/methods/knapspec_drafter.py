"""One request's drafts and selections by KnapSpec."""

from collections.abc import Collection
from typing import TYPE_CHECKING

import torch

from selfspec.decoding.draft import Draft, NoDraft
from selfspec.decoding.drafter import Drafter, Feedback, Prefill
from selfspec.decoding.fused_selection import FusedSelection, run_selection
from selfspec.decoding.layer_draft import LayerDraft
from selfspec.decoding.probe import Branches
from selfspec.decoding.stopping import ConfidenceThreshold
from selfspec.methods.knapsack import Candidates, Selection, integer_weights
from selfspec.methods.knapspec_calibration import Calibration
from selfspec.methods.knapspec_candidates import find_candidates
from selfspec.methods.knapspec_choice import Choice, Ground
from selfspec.methods.payoff import NEW, Record
from selfspec.model.kept import KeptSet

if TYPE_CHECKING:
    from selfspec.methods.knapspec import KnapSpec


class KnapSpecDrafter(Drafter):
    """One request's selections.

    Args:
        method: its method.
        prefill: of the request.

    Attributes:
        selection: the last one; ``None`` before the first, and if the model is too small to skip anything.
        probe: of the request.
    """

    def __init__(self, method: "KnapSpec", prefill: Prefill) -> None:
        self.probe = prefill.probe
        self._method = method
        self._settings = method.settings
        self._schedule = method.schedule(self.probe)
        self._ours = self._settings.schedule == "ours"
        self._choice: Choice | None = None
        self._draft: Draft = NoDraft()
        self._fused: FusedSelection[Candidates] | None = None
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

    @property
    def fused_selection(self) -> FusedSelection[Candidates] | None:
        """The selection, where it runs with the verification."""
        return self._fused

    def learn(self, feedback: Feedback) -> None:
        """Counts the round, and keeps the states of its tokens."""
        seconds, rows = self._method.payoff.clock() - self._started, len(feedback.acceptance.rows)
        kept = feedback.draft.kept if isinstance(feedback.draft, LayerDraft) else None
        if self._fused is not None:
            self._choose(self._fused.outcome)
            self._fused = None
        else:
            self._method.note_round(kept, feedback.drafted, self.probe.committed, seconds)
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
        """Selects again, at once or fused.

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
        if settings.fused_selection:
            self._fused = FusedSelection(steps, branches)
        else:
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
