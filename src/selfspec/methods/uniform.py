"""A fixed, evenly spread kept set: the baseline of methods that search for one."""

from dataclasses import dataclass

from selfspec.decoding.draft import LayerDraft
from selfspec.decoding.drafter import Drafter, FixedDrafter, Prefill
from selfspec.decoding.stopping import ConfidenceThreshold
from selfspec.errors import InvalidSettingError
from selfspec.methods.base import Method
from selfspec.methods.budget import RATIO_HELP, default_skip_ratio
from selfspec.methods.precision_settings import PrecisionSettings
from selfspec.methods.registry import register
from selfspec.methods.settings import setting
from selfspec.model.kept import KeptSet
from selfspec.runtimes.target import Target


@dataclass(frozen=True)
class UniformSettings(PrecisionSettings):
    """Settings of ``uniform``."""

    skip_ratio: float | None = setting(
        None,
        f"share of the sublayers between first and last layer that drafts skip; {RATIO_HELP}",
        minimum=0.0,
        maximum=1.0,
    )
    draft_length: int = setting(6, "most draft tokens of a round", minimum=1, maximum=64)
    confidence_threshold: float = setting(
        0.7, "stop drafting after a token less confident than this; 0 never stops", minimum=0.0, maximum=1.0
    )


def evenly_skipped(layer_count: int, skip_ratio: float) -> tuple[int, ...]:
    """Sublayers to skip, spread evenly over all layers but the first and the last.

    As in SWIFT, ``int(2 (L - 2) r)`` sublayers are skipped; half of them attention, half MLP, each kind evenly spread.
    """
    middle = layer_count - 2
    skipped = int(2 * middle * skip_ratio) if middle > 0 else 0
    attention, mlp = (skipped + 1) // 2, skipped // 2
    return tuple(
        sorted([2 * layer for layer in _spread(attention, middle)] + [2 * layer + 1 for layer in _spread(mlp, middle)])
    )


def _spread(count: int, middle: int) -> list[int]:
    """``count`` layers out of ``1 … middle``, evenly."""
    return [1 + int((index + 0.5) * middle / count) for index in range(count)]


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
        free = 2 * max(0, target.layer_count - 2)
        ratio = default_skip_ratio(target, free) if settings.skip_ratio is None else settings.skip_ratio
        skipped = evenly_skipped(target.layer_count, ratio)
        if not skipped:
            raise InvalidSettingError(
                f"skip_ratio {ratio} skips none of the {free} sublayers between the first and the last layer; raise it"
            )
        threshold = settings.confidence_threshold
        self._draft = LayerDraft(
            KeptSet.skipping(skipped, target.sublayer_count),
            limit=settings.draft_length,
            stop=ConfidenceThreshold(threshold) if threshold > 0 else None,
        )

    def begin(self, prefill: Prefill) -> Drafter:
        """Starts on a request."""
        return FixedDrafter(self._draft)
