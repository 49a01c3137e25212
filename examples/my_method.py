"""A method of your own in one file: skips every n-th layer, and drafts one token more than were accepted last.

selfspec generate --model smollm2 --method my_method:EveryNth --set every=4 "Once upon a time"
"""

from dataclasses import dataclass

from selfspec.methods.api import Drafter, Feedback, KeptSet, LayerDraft, Method, MethodSettings, Prefill, setting


@dataclass(frozen=True)
class EveryNthSettings(MethodSettings):
    """Settings of ``every-nth``."""

    every: int = setting(3, "skip every n-th layer, but never the first or the last one", minimum=2)
    longest: int = setting(8, "longest draft, in tokens", minimum=1, maximum=64)


class EveryNth(Method):
    """Skips every n-th layer. The draft length is the number of tokens accepted last, and one."""

    name = "every-nth"
    summary = "skips every n-th layer, drafts one token more than were accepted last"
    source = "an example"
    Settings = EveryNthSettings

    def begin(self, prefill: Prefill) -> Drafter:
        """Starts on a request."""
        layers = range(self.settings.every - 1, self.target.layer_count - 1, self.settings.every)
        skipped = [sublayer for layer in layers for sublayer in (2 * layer, 2 * layer + 1)]
        return EveryNthDrafter(KeptSet.skipping(skipped, self.target.sublayer_count), self.settings.longest)


class EveryNthDrafter(Drafter):
    """One request."""

    def __init__(self, kept: KeptSet, longest: int) -> None:
        self.kept, self.longest, self.length = kept, longest, longest

    def plan(self) -> LayerDraft:
        """What drafts the next round."""
        return LayerDraft(self.kept, limit=self.length)

    def learn(self, feedback: Feedback) -> None:
        """Learns from a finished round."""
        self.length = min(self.longest, feedback.accepted + 1)
