"""At which precision a method drafts: the settings that all methods which draft with layers share."""

from dataclasses import dataclass

from selfspec.errors import InvalidSettingError
from selfspec.methods.settings import MethodSettings, setting
from selfspec.runtimes.precision import Precision


@dataclass(frozen=True)
class PrecisionSettings(MethodSettings):
    """Settings of methods that draft with layers; ``Method`` puts them into effect.

    Raises:
        InvalidSettingError: there are no copies of this many bits or of such groups.
    """

    draft_bits: int = setting(
        16, "bits of the weights that draft: 8, 6 or 4 for copies of the model's own weights, 16 for these", minimum=4
    )
    attention_bits: int | None = setting(None, "draft_bits of attention alone", minimum=4)
    mlp_bits: int | None = setting(None, "draft_bits of the MLPs alone", minimum=4)
    head_bits: int | None = setting(None, "draft_bits of the LM head alone", minimum=4)
    group: int = setting(32, "inputs of a weight row of a copy that share a scale: 32, 64 or 128", minimum=32)

    def __post_init__(self) -> None:
        super().__post_init__()
        _ = self.precision  # refuses bits and groups that do not exist

    @property
    def precision(self) -> Precision | None:
        """Of the weights that draft; ``None`` for the model's own."""
        parts = (self.attention_bits, self.mlp_bits, self.head_bits)
        attention, mlp, head = (self.draft_bits if bits is None else bits for bits in parts)
        precision = Precision(attention, mlp, head, self.group)
        return None if precision.is_full else precision


def check_selection(settings: PrecisionSettings, *, fused: bool) -> None:
    """Refuses a selection that would judge other weights than those that draft.

    Args:
        settings: of the method.
        fused: whether selections run in the forward of a verification, which has the model's own weights.

    Raises:
        InvalidSettingError: they do, and copies draft.
    """
    if fused and settings.precision is not None:
        raise InvalidSettingError(
            "fused_selection runs with a verification, on the model's own weights, so it cannot judge drafts of fewer "
            "bits; leave it off, or draft at 16 bits"
        )
