"""``sparse``: the whole model drafts, attending to the latest tokens and to what it attends to most."""

from dataclasses import dataclass

from selfspec.decoding.draft import Draft, JointConfidence, LayerDraft, NoDraft
from selfspec.decoding.drafter import Drafter, Prefill
from selfspec.errors import UnsupportedModelError
from selfspec.methods.base import Method
from selfspec.methods.registry import register
from selfspec.methods.settings import PrecisionSettings, fraction, setting
from selfspec.model.kept import KeptSet
from selfspec.runtimes.seen_text import AttentionShares, Reach
from selfspec.runtimes.target import Target


@dataclass(frozen=True)
class SparseSettings(PrecisionSettings):
    """Settings of ``sparse``."""

    draft_length: int = setting(6, "most draft tokens of a round", minimum=1, maximum=64)
    joint_confidence: float = fraction(0.5, "stop drafting when the confidences' product is below this; 0 never stops")
    latest: int = setting(256, "latest tokens that drafts attend to", minimum=1)
    strongest: int = setting(1024, "tokens before them, in blocks of 64 of each key head", minimum=64)


@register
class Sparse(Method):
    """Drafts with all layers, which attend to a part of a long text; verifications attend to all of it.

    What a draft attends to is chosen by what the target attended to in verifications before it. Where that is the whole
    text, or where nothing is known of it yet, rounds are plain steps.
    """

    name = "sparse"
    summary = "the whole model drafts, attending to a part of a long text"
    source = "SparseSpec (Zhao et al. 2025) and MagicDec (Sadhukhan et al. 2024), by key heads"
    Settings = SparseSettings
    settings: SparseSettings

    def __init__(self, target: Target, settings: SparseSettings) -> None:
        super().__init__(target, settings)
        if target.attention_shares(1) is None:
            raise UnsupportedModelError(
                "drafts that attend to a part of the text need the model's own kernels, which do not run all of this "
                "model here; choose another method"
            )

    def begin(self, prefill: Prefill) -> Drafter:
        """Starts on a request."""
        return _Sparse(self.target, self.settings, prefill)


class _Sparse(Drafter):
    def __init__(self, target: Target, settings: SparseSettings, prefill: Prefill) -> None:
        self._kept, self._settings = KeptSet.full(target.sublayer_count), settings
        self._text, self._reach = prefill.probe, Reach(settings.latest, settings.strongest)
        self._shares = target.attention_shares(self._text.state.cache.capacity)

    @property
    def attention_shares(self) -> AttentionShares | None:
        """Of the request."""
        return self._shares

    def plan(self) -> Draft:
        """A draft that sees the strongest blocks of today."""
        seen = None if self._shares is None else self._shares.strongest(self._text.committed, self._reach)
        if seen is None:
            return NoDraft()
        threshold = self._settings.joint_confidence
        stop = JointConfidence(threshold) if threshold > 0 else None
        return LayerDraft(self._kept, self._settings.draft_length, stop, seen=seen)
