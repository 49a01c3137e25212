"""Draft & Verify: a set of skipped sublayers from an offline search, and an adaptive confidence threshold."""

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from selfspec.decoding.draft import Draft, DraftVerifyThreshold, LayerDraft
from selfspec.decoding.drafter import Drafter, Feedback, Prefill
from selfspec.errors import StateError
from selfspec.methods.base import Method
from selfspec.methods.registry import register
from selfspec.methods.settings import PrecisionSettings, fraction, setting
from selfspec.methods.skipping import RATIO_HELP, check_skipped, free_sublayers, starting_set, sublayer_ratio
from selfspec.methods.state import LearnedState
from selfspec.model.kept import KeptSet
from selfspec.runtimes.target import Target


@dataclass(frozen=True)
class ThresholdSettings(PrecisionSettings):
    """Settings of drafts that end below the adaptive threshold of Draft & Verify."""

    max_draft_length: int = setting(12, "longest draft", minimum=1, maximum=64)
    threshold: float = fraction(0.6, "confidence threshold at the start")
    target_acceptance: float = fraction(0.9, "acceptance rate that the threshold adapts to hold")
    step: float = fraction(0.01, "step of the threshold after a round")


class ThresholdDrafter(Drafter):
    """Drafts with one kept set until a confidence is below a threshold, which moves with the acceptance of each round.

    ``note`` is called with every new threshold.
    """

    def __init__(
        self, kept: KeptSet, settings: ThresholdSettings, start: float, note: Callable[[float], None] = lambda _: None
    ) -> None:
        self._threshold = DraftVerifyThreshold(start, target_acceptance=settings.target_acceptance, step=settings.step)
        self._draft = LayerDraft(kept, settings.max_draft_length, stop=self._threshold)
        self._note = note

    def plan(self) -> Draft:
        """The one draft."""
        return self._draft

    def learn(self, feedback: Feedback) -> None:
        """Moves the threshold by the round's acceptance."""
        reached_limit = feedback.drafted == self._draft.limit
        self._threshold.update(feedback.drafted, feedback.accepted, reached_limit=reached_limit)
        self._note(self._threshold.threshold)


@dataclass(frozen=True)
class SelfSpecSettings(ThresholdSettings):
    """Settings of ``self-spec``."""

    skip_ratio: float | None = fraction(
        None,
        "share of the sublayers between first and last layer that drafts skip, evenly, until a profile of "
        f"`selfspec tune self-spec` is loaded; {RATIO_HELP}",
    )
    fixed_ends: bool = setting(True, "the first and the last layer are never skipped (ours); false may skip them too")


@dataclass(frozen=True)
class Profile:
    """Skipped sublayers, ascending, and what is to be known of how they were found, as JSON has it."""

    skipped: tuple[int, ...]
    found: Mapping[str, Any] = field(default_factory=dict)


@register
class SelfSpec(Method):
    """Self-speculative decoding as in Draft & Verify (Zhang et al. 2024).

    The skipped sublayers come from an offline search (``selfspec tune``), which saves them as a state file of this
    method. A draft ends below a confidence threshold that adapts to hold an acceptance rate. As in the authors'
    evaluation, a request starts with the threshold at which the last one ended; requests that run at the same time
    adapt copies of their own. The acceptance rate that it adapts by starts at 0 in every request, and the search weighs
    deviations with κ = 2.576, both as in the authors' code.
    """

    name = "self-spec"
    summary = "skips the sublayers that `selfspec tune self-spec` found fastest, spread evenly without such a profile"
    source = "Draft & Verify (Zhang et al. 2024)"
    learns = True
    Settings = SelfSpecSettings
    settings: SelfSpecSettings

    def __init__(self, target: Target, settings: SelfSpecSettings) -> None:
        super().__init__(target, settings)
        ends = settings.fixed_ends
        self.free = free_sublayers(target.layer_count, ends)
        self._lock = threading.Lock()
        ratio = sublayer_ratio(target, settings.skip_ratio, ends)
        self.adopt(Profile(starting_set(target.layer_count, ratio, ends)))

    def adopt(self, profile: Profile) -> None:
        """Skips other sublayers from now on, with the threshold of the settings."""
        kept = KeptSet.skipping(profile.skipped, self.target.sublayer_count)
        with self._lock:
            self.profile, self._kept, self._threshold = profile, kept, self.settings.threshold

    def begin(self, prefill: Prefill) -> Drafter:
        """Starts on a request."""
        with self._lock:
            kept, start = self._kept, self._threshold
        return ThresholdDrafter(kept, self.settings, start, self.note_threshold)

    def note_threshold(self, threshold: float) -> None:
        """Sets the threshold with which later requests start."""
        with self._lock:
            self._threshold = threshold

    def state(self) -> LearnedState:
        """Profile and threshold."""
        with self._lock:
            profile, threshold = self.profile, self._threshold
        return LearnedState({**profile.found, "skipped": list(profile.skipped), "threshold": threshold})

    def restore(self, state: LearnedState) -> None:
        """Loads a profile for as many layers, and a threshold."""
        found = dict(state.values)
        threshold, skipped = found.pop("threshold", None), found.pop("skipped", None)
        if type(threshold) is not float or not 0 <= threshold <= 1:
            raise StateError("the profile has no threshold; tune it again")
        # Nothing is skipped if that was fastest.
        self.adopt(Profile(check_skipped(skipped, self.free, 0, len(self.free)), found))
        self.note_threshold(threshold)
