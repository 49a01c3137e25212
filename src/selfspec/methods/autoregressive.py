"""The target alone: the 1.00x of every table."""

from dataclasses import dataclass

from selfspec.decoding.draft import NoDraft
from selfspec.methods.base import Drafter, FixedDrafter, Method, Prefill
from selfspec.methods.registry import register
from selfspec.methods.settings import MethodSettings


@dataclass(frozen=True)
class AutoregressiveSettings(MethodSettings):
    """Plain decoding has nothing to set."""


@register
class Autoregressive(Method):
    """Drafts nothing: every round is one step of the target, in the same runtime as all methods."""

    name = "autoregressive"
    summary = "the target alone, in the same runtime: the baseline of every speedup"
    source = "plain decoding"
    Settings = AutoregressiveSettings

    def begin(self, prefill: Prefill) -> Drafter:
        """Starts on a request."""
        return FixedDrafter(NoDraft())
