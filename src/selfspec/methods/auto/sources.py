"""What ``auto`` can draft with beside known tokens: layers of the model, or the checkpoint's own head."""

import warnings
from dataclasses import dataclass, field

from selfspec.errors import ModelLoadError, NoHeadWarning, UnsupportedModelError
from selfspec.methods.auto.late_copies import LateCopies
from selfspec.methods.auto.layer_plans import DraftPolicies
from selfspec.methods.auto.trials import Assignment
from selfspec.methods.mtp import MtpSettings
from selfspec.model.mtp import has_head
from selfspec.runtimes.costs.live import LiveCosts
from selfspec.runtimes.mtp import MtpHead
from selfspec.runtimes.target import Target

MTP = "mtp"


@dataclass(frozen=True)
class LayerChoice:
    """What drafts, the costs of its forwards, its low-bit weights, and when such drafts end."""

    drafts: Assignment | MtpHead
    costs: LiveCosts
    copies: LateCopies = field(default_factory=LateCopies)
    policies: DraftPolicies = field(default_factory=DraftPolicies, compare=False)

    @property
    def name(self) -> str:
        """What rounds call it."""
        return self.drafts.name if isinstance(self.drafts, Assignment) else MTP


def find_head(target: Target, most_bytes: float) -> MtpHead | None:
    """The head of a target's checkpoint; ``None`` where it has none, or one that cannot run, which warns.

    It drafts with low-bit weights, where kernels run them and they take at most ``most_bytes``.
    """
    if not has_head(target.model):
        return None
    try:
        head = MtpHead(target, precision=MtpSettings().precision, required=False)
        if head.precision is not None and head.own.low_bit_bytes(head.precision) > most_bytes:
            head = MtpHead(target)
    except (ModelLoadError, UnsupportedModelError) as error:
        warnings.warn(f"auto drafts without the head of the checkpoint: {error}", NoHeadWarning, stacklevel=4)
        return None
    return head
