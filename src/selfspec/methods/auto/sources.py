"""What ``auto`` can draft with beside known tokens: layers of the model, or the checkpoint's own head."""

import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from selfspec.decoding.draft import Append, Follow, Guess, LayerDraft, MtpDraft, StoppingRule
from selfspec.decoding.drafter import Feedback, Prefill
from selfspec.errors import ModelLoadError, NoHeadWarning, UnsupportedModelError
from selfspec.methods.auto.late_copies import LateCopies
from selfspec.methods.auto.layer_plans import DraftPolicies
from selfspec.methods.auto.trials import Assignment
from selfspec.methods.mtp import MtpDrafter, MtpSettings
from selfspec.model.mtp import has_head
from selfspec.runtimes.costs.live import LiveCosts
from selfspec.runtimes.mtp import MtpHead, MtpText
from selfspec.runtimes.target import Target
from selfspec.types import Forecast

MTP = "mtp"

_FEW = 16
"""Most tokens that the head reads beside those that it drafts in a draft whose time counts."""


class LayerRound(NamedTuple):
    """How layers or the head are to draft a round: fields of ``LayerDraft`` and ``MtpDraft``."""

    limit: int
    stop: StoppingRule
    guess: Guess
    append: Append
    forecast: Forecast
    follow: Follow | None


@dataclass(frozen=True)
class LayerChoice:
    """The layer draft of a model, the costs of its forwards, its low-bit weights, and when such drafts end."""

    assignment: Assignment
    costs: LiveCosts
    copies: LateCopies = field(default_factory=LateCopies)
    policies: DraftPolicies = field(default_factory=DraftPolicies, compare=False)
    watched: frozenset[int] = frozenset()
    text: None = None

    @property
    def name(self) -> str:
        """What rounds call it."""
        return self.assignment.name

    def begin(self, prefill: Prefill) -> "LayerChoice":
        """For a request: itself, as it keeps nothing of a text."""
        return self

    def draft(self, planned: LayerRound) -> LayerDraft:
        """A draft whose round is alone."""
        own = self.assignment
        return LayerDraft(
            own.kept,
            planned.limit,
            planned.stop,
            precision=own.precision,
            guess=planned.guess,
            append=planned.append,
            name=own.name,
            forecast=planned.forecast,
        )

    def timed(self, forwards: Sequence[int]) -> Sequence[int]:
        """Those of the forwards of a draft, by their rows, whose time says what forwards cost: all."""
        return forwards

    def learn(self, feedback: Feedback) -> None:
        """Is called after every round of a request."""


@dataclass(frozen=True)
class HeadChoice:
    """The checkpoint's multi-token-prediction head, its costs, its low-bit weights, and when drafts end."""

    head: MtpHead
    costs: LiveCosts
    copies: LateCopies = field(default_factory=LateCopies)
    policies: DraftPolicies = field(default_factory=DraftPolicies, compare=False)

    def begin(self, prefill: Prefill) -> "HeadOfRequest":
        """For a request, whose last hidden states it reads."""
        return HeadOfRequest(self, MtpDrafter(self.head, MtpSettings(), prefill))


class HeadOfRequest:
    """The head at work on a request."""

    name = MTP

    def __init__(self, choice: HeadChoice, drafter: MtpDrafter) -> None:
        self.costs, self.copies, self.policies = choice.costs, choice.copies, choice.policies
        self._drafter = drafter
        self._catches_up = False  # in the draft that was planned last

    @property
    def text(self) -> MtpText | None:
        """What the head knows of the text, if it drafts in native runs."""
        text = self._drafter.mtp_text
        return None if text.native is None else text

    @property
    def watched(self) -> frozenset[int]:
        """The target's states that it needs of every round."""
        return frozenset(self._drafter.followed)

    def draft(self, planned: LayerRound) -> MtpDraft:
        """A draft without copies, and what follows its round in a run."""
        self._catches_up = self._drafter.unread > _FEW
        follow = None if self.text is None else planned.follow
        return self._drafter.draft(planned.limit, planned.stop, follow=follow, name=MTP, forecast=planned.forecast)

    def timed(self, forwards: Sequence[int]) -> Sequence[int]:
        """Those of the forwards of a draft whose time says what they cost: none where it had to read a text first."""
        return () if self._catches_up else forwards

    def learn(self, feedback: Feedback) -> None:
        """Gives the head the states of the accepted tokens."""
        self._drafter.learn(feedback)


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
