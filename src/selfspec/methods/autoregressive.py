"""Plain decoding: the baseline of every speedup."""

from dataclasses import dataclass

from selfspec.decoding.draft import MOST_STEPS, NoDraft
from selfspec.decoding.drafter import Drafter, FixedDrafter, Prefill
from selfspec.methods.base import Method
from selfspec.methods.registry import register
from selfspec.methods.settings import MethodSettings


@dataclass(frozen=True)
class AutoregressiveSettings(MethodSettings):
    """Settings of ``autoregressive``: none."""


@register
class Autoregressive(Method):
    """Drafts nothing: every round is one step of the target, in the same runtime as with any other method."""

    name = "autoregressive"
    summary = "the target alone, in the same runtime: the baseline of every speedup"
    source = "plain decoding"
    Settings = AutoregressiveSettings

    def begin(self, prefill: Prefill) -> Drafter:
        """Starts on a request."""
        return FixedDrafter(NoDraft(steps=MOST_STEPS))
