"""Mixed precision: each sublayer drafts at the bits, or is skipped, as a knapsack over time and divergence decides."""

import threading
from collections.abc import Callable
from dataclasses import dataclass

from selfspec.decoding.draft import JointConfidence
from selfspec.decoding.drafter import RepeatingDrafter
from selfspec.methods.api import Draft, Drafter, LayerDraft, Method, MethodSettings, NoDraft, Prefill, Target, setting
from selfspec.runtimes.formats import LOW_BITS
from selfspec.runtimes.precision import Precision
from selfspec_lab.methods.mixed.measuring import Conditions, Found, find_plan


@dataclass(frozen=True)
class MixedSettings(MethodSettings):
    """Settings of ``mixed``."""

    max_draft_length: int = setting(12, "longest draft, in the objective too", minimum=1, maximum=64)
    joint_confidence: float = setting(
        0.5,
        "stop drafting when the confidences multiply to less than this; 0 drafts the length of the plan",
        minimum=0.0,
        maximum=1.0,
    )
    most_seconds: float = setting(
        30.0, "time for measuring a model before the first request, once; the result is kept", minimum=0.0
    )
    group: int = setting(32, "weights of a row that share a scale: 32, 64 or 128", minimum=32)

    def __post_init__(self) -> None:
        super().__post_init__()
        _ = self.tried  # refuses groups that do not exist

    @property
    def tried(self) -> list[Precision]:
        """What is measured: each part of a layer, and the LM head, at each number of bits."""
        parts = [{part: bits} for bits in LOW_BITS for part in ("attention", "mlp", "head")]
        return [Precision(**part, group=self.group) for part in parts]

    @property
    def conditions(self) -> Conditions:
        """What the plan depends on."""
        return Conditions(self.max_draft_length, self.most_seconds, self.group)


class Mixed(Method):
    """Drafts with each sublayer at 4, 6, 8 or all bits, or without it, and with the LM head at 4, 6, 8 or all.

    KnapSpec's knapsack with more choices. The weight of a choice is its measured latency. Its value is the KL
    divergence of the model's distribution with that one change, on text that the model has generated, so that no data
    is needed; divergences of several changes are added. For every budget of time the knapsack gives the bits that
    diverge least. The budget is the one of most tokens a second, ``(1 - α^(k+1)) / (1 - α) / (k t_draft + t_verify(k +
    1))``, over all budgets and draft lengths ``k``; ``α`` follows from the divergence, by a curve through drafts that
    were tried on that text. A draft ends when its confidences multiply to less than a threshold.

    All of this is measured before the first request, once for a model and a machine, and saved in the user's cache.
    Where no draft promises more than plain decoding, none is made. Measuring holds low-bit weights of one precision at
    a time; afterwards those that draft.
    """

    name = "mixed"
    summary = "each sublayer drafts at 4, 6, 8 or all bits or is skipped, by a knapsack over latency and divergence"
    source = "the knapsack of KnapSpec (Cha et al. 2026) over precisions (ours)"
    Settings = MixedSettings
    settings: MixedSettings

    def __init__(self, target: Target, settings: MixedSettings) -> None:
        super().__init__(target, settings)
        for tried in settings.tried:
            target.check_low_bit(tried)
        self._lock = threading.Lock()
        self._found: Found | None = None

    @property
    def found(self) -> Found:
        """The plan, saved or else measured when it is first needed."""
        with self._lock:
            if self._found is None:
                self._found = find_plan(self.target, self.settings.conditions)
            return self._found

    def begin(self, prefill: Prefill) -> Drafter:
        """Starts on a request."""
        return RepeatingDrafter(self._draft)

    def prepare(self, progress: Callable[[str], None] = lambda _: None) -> None:
        """Measures the model unless its plan is saved, and makes the low-bit weights that draft."""
        progress("loss and latency of each sublayer at each precision")
        draft = self._draft()
        if isinstance(draft, LayerDraft):
            progress(f"low-bit weights of {self.target.low_bit_bytes(draft.precision) / 2**20:.0f} MiB")
            self.target.at(draft.precision)

    def _draft(self) -> Draft:
        found, settings = self.found, self.settings
        if not found.pays:
            return NoDraft()
        precision = found.plan.precision(settings.group)
        if settings.joint_confidence == 0:
            return LayerDraft(found.plan.kept, found.plan.draft_length, precision=precision)
        # As in KnapSpec (section 3.5) confidence decides instead of the planned length.
        stop = JointConfidence(settings.joint_confidence)
        return LayerDraft(found.plan.kept, settings.max_draft_length, stop, precision=precision)
