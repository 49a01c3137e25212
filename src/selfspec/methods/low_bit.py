"""Low-bit drafting: all sublayers draft, from low-bit copies of their own weights."""

from dataclasses import dataclass

from selfspec.decoding.draft import LayerDraft
from selfspec.decoding.drafter import Drafter, Prefill, RepeatingDrafter
from selfspec.decoding.stopping import JointConfidence
from selfspec.errors import InvalidSettingError
from selfspec.methods.base import Method
from selfspec.methods.precision_settings import PrecisionSettings
from selfspec.methods.registry import register
from selfspec.methods.settings import setting
from selfspec.model.kept import KeptSet
from selfspec.runtimes.precision import FULL_BITS, LOW_BITS
from selfspec.runtimes.target import Target


@dataclass(frozen=True)
class LowBitSettings(PrecisionSettings):
    """Settings of ``low-bit``."""

    draft_bits: int = setting(4, "bits of the weights that draft, copies of the model's own: 8, 6 or 4", minimum=4)
    draft_length: int = setting(12, "draft tokens of a round, at most", minimum=1, maximum=64)
    joint_confidence: float = setting(
        0.5, "stop drafting when the confidences multiply to less than this; 0 never stops", minimum=0.0, maximum=1.0
    )

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

    A copy of 4 bits has 0.29 of the bytes of the weights in bfloat16 and keeps most of the model's choices. Copies are
    made from the weights at load or at first use, without data or training. Drafts write keys and
    values of their own, which the verification overwrites, so no state is shared with it.
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
