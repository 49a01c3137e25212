"""Early exit: the first layers draft, and all layers verify. LayerSkip and its two adaptive variants."""

from dataclasses import dataclass

from selfspec.decoding.draft import Draft, LayerDraft
from selfspec.decoding.drafter import Drafter, Feedback, FixedDrafter, Prefill
from selfspec.methods.base import Method
from selfspec.methods.draft_verify import ThresholdDrafter, ThresholdSettings
from selfspec.methods.registry import register
from selfspec.methods.settings import PrecisionSettings, setting
from selfspec.model.kept import KeptSet
from selfspec.runtimes.target import Target

_EXIT_HELP = "layers that draft, counted from the first; none is a quarter of the model (LayerSkip uses 8 of 32)"


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
