"""Methods whose drafts are the same in every round: ``autoregressive``, ``uniform`` and ``low-bit``."""

from dataclasses import dataclass

from selfspec.decoding.draft import ConfidenceThreshold, JointConfidence, LayerDraft, NoDraft
from selfspec.decoding.drafter import Drafter, FixedDrafter, Prefill, RepeatingDrafter
from selfspec.errors import InvalidSettingError
from selfspec.methods.base import Method
from selfspec.methods.registry import register
from selfspec.methods.settings import PrecisionSettings, fraction, setting
from selfspec.methods.skipping import RATIO_HELP, starting_set, sublayer_ratio
from selfspec.model.kept import KeptSet
from selfspec.runtimes.formats import LOW_BITS
from selfspec.runtimes.precision import FULL_BITS
from selfspec.runtimes.target import Target

_PLAIN = NoDraft(follow=lambda _: NoDraft())
"""Step after step of plain decoding."""


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
    summary = "the whole model drafts from low-bit copies of its own weights"
    source = "drafts from low-bit weights as in ML-SpecQD (2025), here copies in groups with no second model"
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
