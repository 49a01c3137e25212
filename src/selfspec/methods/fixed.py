"""Methods whose sublayers are not chosen while they decode: settings say what drafts, or an offline search does.

``autoregressive`` drafts nothing, ``uniform`` skips evenly spread sublayers, ``low-bit`` drafts with all of them at few
bits, ``self-spec`` (Draft & Verify) skips those of a profile, and ``layerskip`` and its variants draft with the first
layers. A draft ends at a length or a confidence; these are fixed, or adapt to what was accepted.
"""

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from selfspec.decoding.draft import (
    ConfidenceThreshold,
    Draft,
    DraftVerifyThreshold,
    JointConfidence,
    LayerDraft,
    NoDraft,
)
from selfspec.decoding.drafter import Drafter, Feedback, FixedDrafter, Prefill, RepeatingDrafter
from selfspec.errors import InvalidSettingError, StateError
from selfspec.methods.base import Method
from selfspec.methods.registry import register
from selfspec.methods.settings import PrecisionSettings, fraction, setting
from selfspec.methods.skipping import RATIO_HELP, check_skipped, free_sublayers, starting_set, sublayer_ratio
from selfspec.methods.state import LearnedState
from selfspec.model.kept import KeptSet
from selfspec.runtimes.formats import LOW_BITS
from selfspec.runtimes.precision import FULL_BITS
from selfspec.runtimes.target import Target

_PLAIN = NoDraft(follow=lambda _: NoDraft())
"""Step after step of plain decoding."""

_EXIT_HELP = "layers that draft, counted from the first; none is a quarter of the model (LayerSkip uses 8 of 32)"


@register
class Autoregressive(Method):
    """Drafts nothing: every round is one step of the target, in the same runtime as with any other method."""

    name = "autoregressive"
    summary = "the target alone, in the same runtime: the baseline of every speedup"
    source = "plain decoding"

    def begin(self, prefill: Prefill) -> Drafter:
        """Starts on a request."""
        return FixedDrafter(_PLAIN)


@dataclass(frozen=True)
class UniformSettings(PrecisionSettings):
    """Settings of ``uniform``."""

    skip_ratio: float | None = fraction(
        None, f"share of the sublayers between first and last layer that drafts skip; {RATIO_HELP}"
    )
    draft_length: int = setting(6, "most draft tokens of a round", minimum=1, maximum=64)
    confidence_threshold: float = fraction(0.7, "stop drafting after a token less confident than this; 0 never stops")


@register
class Uniform(Method):
    """Skips evenly spread sublayers, the same for every text."""

    name = "uniform"
    summary = "a fixed, evenly spread set of skipped sublayers"
    source = "baseline of SWIFT (Xia et al. 2025) and CLaSp (Chen et al. 2025)"
    Settings = UniformSettings
    settings: UniformSettings

    def __init__(self, target: Target, settings: UniformSettings) -> None:
        super().__init__(target, settings)
        skipped = starting_set(target.layer_count, sublayer_ratio(target, settings.skip_ratio))
        kept = KeptSet.skipping(skipped, target.sublayer_count)
        stop = ConfidenceThreshold(settings.confidence_threshold) if settings.confidence_threshold > 0 else None
        self._draft = LayerDraft(kept, settings.draft_length, stop)

    def begin(self, prefill: Prefill) -> Drafter:
        """Starts on a request."""
        return FixedDrafter(self._draft)


@dataclass(frozen=True)
class LowBitSettings(PrecisionSettings):
    """Settings of ``low-bit``."""

    draft_bits: int = setting(4, "bits of the weights that draft, made from the model's own: 8, 6 or 4", minimum=4)
    draft_length: int = setting(12, "draft tokens of a round, at most", minimum=1, maximum=64)
    joint_confidence: float = fraction(0.5, "stop drafting when the confidences' product is below this; 0 never stops")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.precision is None:
            raise InvalidSettingError(
                f"all weights are at {FULL_BITS} bits, the model's own; set draft_bits to "
                f"{', '.join(map(str, LOW_BITS))}"
            )


@register
class LowBit(Method):
    """Drafts with the whole model at few bits a weight; the model's own weights verify.

    Low-bit weights are made at load or at first use, without data or training. Drafts write keys and values of their
    own, which the verification overwrites, so no state is shared with it.
    """

    name = "low-bit"
    summary = "the whole model drafts from its own weights at few bits"
    source = "drafts from low-bit weights as in ML-SpecQD (2025), here rounded in groups, with no second model"
    Settings = LowBitSettings
    settings: LowBitSettings

    def __init__(self, target: Target, settings: LowBitSettings) -> None:
        super().__init__(target, settings)
        self._kept = KeptSet.full(target.sublayer_count)

    def begin(self, prefill: Prefill) -> Drafter:
        """Starts on a request."""
        return RepeatingDrafter(self._draft)

    def _draft(self) -> LayerDraft:
        threshold = self.settings.joint_confidence
        stop = JointConfidence(threshold) if threshold > 0 else None
        return LayerDraft(self._kept, self.settings.draft_length, stop)


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


@dataclass(frozen=True)
class EarlyExitSettings(PrecisionSettings):
    """Settings of every early-exit method."""

    exit_layer: int | None = setting(None, _EXIT_HELP, minimum=1)


class _EarlyExit(Method):
    """Base of the early-exit methods, which draft with the first ``exit_layer`` layers."""

    def __init__(self, target: Target, settings: EarlyExitSettings) -> None:
        super().__init__(target, settings)
        exit_layer = settings.exit_layer if settings.exit_layer is not None else max(1, target.layer_count // 4)
        self.kept = KeptSet.early_exit(exit_layer, target.sublayer_count)


@dataclass(frozen=True)
class LayerSkipSettings(EarlyExitSettings):
    """Settings of ``layerskip`` and, with ``draft_length`` as the start, of ``layerskip-fs``."""

    draft_length: int = setting(6, "draft tokens of a round", minimum=1, maximum=64)


@register
class LayerSkip(_EarlyExit):
    """Drafts with a fixed exit layer and a fixed draft length (LS in DEL's tables)."""

    name = "layerskip"
    summary = "early exit at a fixed layer, drafts of fixed length"
    source = "LayerSkip (Elhoushi et al. 2024)"
    Settings = LayerSkipSettings
    settings: LayerSkipSettings

    def begin(self, prefill: Prefill) -> Drafter:
        """Starts on a request."""
        return FixedDrafter(LayerDraft(self.kept, self.settings.draft_length))


@dataclass(frozen=True)
class FiniteStateSettings(LayerSkipSettings):
    """Settings of ``layerskip-fs``."""

    max_draft_length: int = setting(18, "longest draft", minimum=1, maximum=64)


@register
class LayerSkipFiniteState(_EarlyExit):
    """Drafts one token more after a fully accepted round, and one token less after any other (FS)."""

    name = "layerskip-fs"
    summary = "early exit, draft length +1 after a fully accepted round, -1 after any other"
    source = "finite-state controller (Liu et al. 2025), as compared in DEL, appendix B"
    Settings = FiniteStateSettings
    settings: FiniteStateSettings

    def begin(self, prefill: Prefill) -> Drafter:
        """Starts on a request."""
        return _FiniteState(self.kept, self.settings.draft_length, self.settings.max_draft_length)


class _FiniteState(Drafter):
    def __init__(self, kept: KeptSet, draft_length: int, max_draft_length: int) -> None:
        self._kept = kept
        self._max_draft_length = max_draft_length
        self.draft_length = min(draft_length, max_draft_length)

    def plan(self) -> Draft:
        """Drafts with the first layers, up to the present length."""
        return LayerDraft(self._kept, self.draft_length)

    def learn(self, feedback: Feedback) -> None:
        """One token longer after a draft that was accepted whole, one shorter after any other."""
        if not feedback.drafted:
            return
        change = 1 if feedback.accepted == feedback.drafted else -1
        self.draft_length = min(self._max_draft_length, max(1, self.draft_length + change))


@dataclass(frozen=True)
class DraftVerifySettings(EarlyExitSettings, ThresholdSettings):
    """Settings of ``layerskip-dv``."""


@register
class LayerSkipDraftVerify(_EarlyExit):
    """Ends drafts below a confidence threshold that adapts to hold an acceptance rate (DV)."""

    name = "layerskip-dv"
    summary = "early exit, drafts end below Draft & Verify's adaptive confidence threshold"
    source = "Draft & Verify (Zhang et al. 2024), as compared in DEL, appendix B"
    Settings = DraftVerifySettings
    settings: DraftVerifySettings

    def begin(self, prefill: Prefill) -> Drafter:
        """Starts on a request."""
        return ThresholdDrafter(self.kept, self.settings, self.settings.threshold)
