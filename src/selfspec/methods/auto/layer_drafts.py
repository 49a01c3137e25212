"""Layer drafts of ``auto``: what drafts, of a model, and when such drafts pay and end, of a request.

``LayerChoice`` is what drafts beside known tokens: layers, or the checkpoint's own head. With it go its low-bit weights
(``LateWeights``) and the policies by which its drafts end (``DraftPolicies``). ``LayerDrafts`` plans those of a
request.
"""

import math
import threading
import warnings
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from selfspec.decoding.draft import LayerDraft, MtpDraft
from selfspec.decoding.drafter import Feedback, Prefill
from selfspec.errors import (
    ModelLoadError,
    NoHeadWarning,
    NoLowBitWeightsWarning,
    OutOfMemoryError,
    UnsupportedModelError,
)
from selfspec.methods.auto.planned import PlannedRound, forecast_of
from selfspec.methods.auto.preparation import Assignment
from selfspec.methods.mtp import MtpDrafter, MtpSettings
from selfspec.model.mtp_modules import has_head
from selfspec.planning.acceptance_tables import AcceptanceRate, Lookup, LookupToAppend, LookupToConfirm
from selfspec.planning.allowance import stake
from selfspec.planning.plans import LEAST_GAIN_TOGETHER, MOST_DRAFTED, DraftPolicy, Outlook, Plan, most_that_fits
from selfspec.runtimes.costs.live import LiveCosts
from selfspec.runtimes.costs.rows import CostTable
from selfspec.runtimes.mtp_head import MtpHead, MtpText
from selfspec.runtimes.precision import Precision
from selfspec.runtimes.seen_text import AttentionShares, Reach, SeenText
from selfspec.runtimes.target import Target

_NEAR, _NEAR_STEP = 0.25, 0.05
"""Relative difference of acceptances and drafts, and of rounds, up to which decisions by earlier ones are as good.

A machine that is busy slows all rounds alike, which changes no decision. What is worth most depends on the seconds of a
step directly: drafts are compared with rounds by the costs of today.
"""

_MOST_KEPT = 4
"""Policies of one number of requests and one limit that are kept: texts differ in what is accepted."""

_WEIGHTS_A_SECOND = 7e8
"""Of which a thread makes low-bit weights, about."""

_NO_TIME = 0.2
"""Seconds up to which they are made when the model is loaded."""

MTP = "mtp"
"""What rounds call a draft of the checkpoint's head."""

_LIMITS = (1, 2, 3, 4, 6, 8, 12, 16, 23, MOST_DRAFTED)
"""Lengths to which layer drafts are cut where time is short."""

_SHARED, _MEMORY = 30.0, 100.0
"""Tokens for which what all requests have seen counts within a request, and most own tokens.

What a confidence says of a token differs little from text to text, much less than what the length of a match says.
"""

_FIRST_DRAFTED = 6.0
"""Tokens that took a forward each, with which a request begins."""

_FADING = 0.9
"""Share that is kept of what was counted, with each draft."""

_FEW = 16
"""Most tokens that the head reads beside those that it drafts in a draft whose time counts."""


class _Kept(NamedTuple):
    """A policy, and the costs of a round that it was found for: of one row, of two, and of all."""

    policy: DraftPolicy
    costs: tuple[float, float, float]

    def serves(self, outlook: Outlook, each: float, costs: tuple[float, float, float]) -> bool:
        """Whether it decides as the best policy of today would, once scaled to what a step takes today."""
        factor = costs[0] / self.costs[0]
        return (
            abs(factor * self.policy.draft - each) <= _NEAR * each
            and all(abs(factor * own - now) <= _NEAR_STEP * now for own, now in zip(self.costs, costs, strict=True))
            and self.policy.outlook.near(outlook, _NEAR)
        )


class DraftPolicies:
    """The policies that were found for layer drafts, for all requests. May be used by several threads.

    A policy takes much longer to find than a round takes to plan; requests of a model hardly differ in it.
    """

    def __init__(self) -> None:
        # By the number of requests that share the forwards of a draft, and by their limit; the latest first. Entries
        # are replaced whole: what two threads find at the same time, one of them finds again.
        self._known: dict[tuple[int, int], tuple[_Kept, ...]] = {}
        self._rates: dict[int, float] = {}  # that were found last, by the number of requests

    def fastest(self, outlook: Outlook, each: float, verify: CostTable, limit: int, drafting: int) -> DraftPolicy:
        """The policy that brings most tokens a second; one that was found before, where it would decide the same.

        Args:
            outlook: what the next tokens will be like.
            each: seconds of a drafted token.
            verify: seconds of a round by its rows.
            limit: most tokens, 1 or more.
            drafting: requests that share the forwards of the draft.
        """
        known = self._known.get((drafting, limit), ())
        costs = (verify[1], verify[2], verify[1 + limit])
        for own in known:
            if own.serves(outlook, each, costs):
                return own.policy.scaled(costs[0] / own.costs[0])
        policy = DraftPolicy.fastest(outlook, each, verify, limit, self._rates.get(drafting, 0.0))
        self._rates[drafting] = policy.rate
        self._known[drafting, limit] = (_Kept(policy, costs), *known[: _MOST_KEPT - 1])
        return policy


class LateWeights:
    """The low-bit weights of a layer draft, which are made when they promise to save the time that they take.

    They do where one answer may save it, or where answers so far would have saved it with them. May be used by several
    threads. Without a target there is nothing to make; nor if they are ``made``.
    """

    def __init__(self, target: Target | None = None, precision: Precision | None = None, *, made: bool = False) -> None:
        self._target, self._precision = target, precision
        self.ready = made or target is None or precision is None
        self.failed = False
        self._lock = threading.Lock()
        self._missed = 0.0
        self._takes = math.inf  # seconds, about
        if not self.ready and target is not None:
            self._takes = target.parameter_count / (_WEIGHTS_A_SECOND * torch.get_num_threads())

    def make_if_it_takes_no_time(self) -> None:
        """Makes them where that hardly takes longer than loading the model: then no request has to."""
        with self._lock:
            if not self.ready and not self.failed and self._takes <= _NO_TIME:
                self._make()

    def make_if_it_pays(self, saving: float, tokens: int) -> bool:
        """Whether they are made, maybe just now.

        Args:
            saving: seconds of a token that drafts from them are expected to save.
            tokens: that the answer may still have.
        """
        with self._lock:
            if not self.ready and not self.failed:
                self._missed += saving
                if max(saving * tokens, self._missed) >= self._takes:
                    self._make()
            return self.ready

    def _make(self) -> None:
        assert self._target is not None
        try:
            with torch.inference_mode():
                self._target.at(self._precision)
            self.ready = True
        except (OutOfMemoryError, UnsupportedModelError) as error:
            self.failed = True
            if isinstance(error, OutOfMemoryError):
                warnings.warn(f"auto drafts without low-bit weights: {error}", NoLowBitWeightsWarning, stacklevel=3)


@dataclass(frozen=True)
class LayerChoice:
    """What drafts, the costs of its forwards, its low-bit weights, and when such drafts end."""

    drafts: Assignment | MtpHead
    costs: LiveCosts
    weights: LateWeights = field(default_factory=LateWeights)
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


class LayerDrafts:
    """The layer drafts of a request; none without a ``choice``.

    Args:
        choice: what drafts, of all requests.
        prefill: of the request.
        confident: what all requests have seen of drafted tokens.
        lookup: in the text; what it finds are guesses in a draft, and follows it.
        clock: times the making of weights.

    Attributes:
        attention_shares: what drafts see of the text is chosen by them, where they see a part of it.
    """

    def __init__(
        self,
        choice: LayerChoice | None,
        prefill: Prefill,
        confident: AcceptanceRate,
        lookup: Lookup,
        clock: Callable[[], float],
    ) -> None:
        self._choice, self._lookup, self._clock = choice, lookup, clock
        head = None if choice is None else choice.drafts
        self._head = MtpDrafter(head, MtpSettings(), prefill) if isinstance(head, MtpHead) else None
        self._text = prefill.probe
        self.attention_shares: AttentionShares | None = None
        self._catches_up = False  # whether the head had to read a text in the draft that was planned last
        self._shared, self._confident = confident, confident.of_request(_SHARED, _MEMORY)
        self._drafted = self._forwards = _FIRST_DRAFTED

    def change(self, choice: LayerChoice, confident: AcceptanceRate) -> None:
        """Drafts with another choice, which is no head, from now on; ``confident`` is what requests have seen of it."""
        self._choice = choice
        if confident is not self._shared:
            self._shared, self._confident = confident, confident.of_request(_SHARED, _MEMORY)
        assert isinstance(choice.drafts, Assignment)
        if choice.drafts.reach is not None and self.attention_shares is None:
            self.attention_shares = self._text.target.attention_shares(self._text.state.cache.capacity)

    @property
    def costs(self) -> LiveCosts | None:
        """Costs of the forward; ``None`` where nothing can draft."""
        return None if self._choice is None else self._choice.costs

    @property
    def watched(self) -> Collection[int]:
        """The target's states that the head needs of every round, if it drafts."""
        return () if self._head is None else self._head.followed

    @property
    def text(self) -> MtpText | None:
        """What the head knows of the text, if it drafts in native runs."""
        head = self._head
        return None if head is None or head.mtp_text.native is None else head.mtp_text

    @property
    def likelihood(self) -> float:
        """The mean probability that a drafted token is accepted."""
        return self._confident.outlook().mean

    def fastest(self, planned: PlannedRound, longest: float) -> DraftPolicy | None:
        """The layer drafts that bring most tokens a second in rounds of at most ``longest``; ``None`` if none fit.

        For a single token more may be staked, as it is the least that saves time for longer ones.
        """
        choice, shares = self._choice, self.attention_shares
        if choice is None or not choice.weights.ready or not (shares is None or shares.noted):
            return None
        verify, costs = planned.of_layers, choice.costs.now(planned.drafting)
        planned.costs = costs
        fits = most_that_fits(costs[1], verify, stake(longest, verify[1]))
        fits = fits or min(1, most_that_fits(costs[1], verify, longest))
        return self._policy(planned, choice, fits) if fits else None

    def awaited(self, planned: PlannedRound) -> DraftPolicy | None:
        """Layer drafts that would be faster than plain decoding, where even the shortest takes more than may be lost.

        They are what time is worth then. Known tokens that are worth less would spend what comes back bit by bit, and
        layers, which need more of it at once, would never draft.
        """
        if self._choice is None or planned.fastest is not None or not planned.costs:
            return None
        policy = self._policy(planned, self._choice, MOST_DRAFTED)
        return policy if policy.rate > 1 / planned.of_layers[1] else None

    def draft(self, planned: PlannedRound, longest: float, worth: float, room: int) -> LayerDraft | MtpDraft | None:
        """A layer draft that is worth more than ``worth``, if there is one and its weights are made.

        Args:
            planned: the round, with its ``fastest``.
            longest: most seconds of the round.
            worth: of the best round without layers.
            room: tokens that the answer is expected to have still.
        """
        choice, policy, verify, costs = self._choice, planned.fastest, planned.of_layers, planned.costs
        if choice is None or policy is None:
            if choice is not None and not choice.weights.ready and not choice.weights.failed:
                self._make_weights(planned, choice, worth, room)
            return None
        plan = policy.plan
        planned.layers_are_worth = plan.worth(planned.rate)
        if planned.layers_are_worth <= worth or not _promises_enough(planned, plan):
            return None
        planned.name, planned.expected = choice.name, plan.tokens
        left = longest - plan.length * costs[1] - verify[1 + plan.length]
        planned.guess = guess = LookupToConfirm(self._lookup, costs, left)
        stop, forecast = policy.begin(self.acceptance), forecast_of(plan, verify)
        if self._head is not None:
            self._catches_up = self._head.unread > _FEW
            follow = planned.follow if planned.layers_follow and self.text is not None else None
            return self._head.draft(plan.length, stop, follow=follow, name=planned.name, forecast=forecast)
        assert isinstance(choice.drafts, Assignment)
        return LayerDraft(
            choice.drafts.kept,
            plan.length,
            stop,
            precision=choice.drafts.precision,
            guess=guess,
            append=LookupToAppend(self._lookup, guess, self.acceptance, verify, planned.rate, longest, planned.filled),
            seen=self._seen(choice.drafts.reach),
            name=planned.name,
            forecast=forecast,
        )

    def _seen(self, reach: Reach | None) -> SeenText | None:
        """What a draft sees of the text, where that is not all of it."""
        shares = self.attention_shares
        return None if shares is None or reach is None else shares.strongest(self._text.committed, reach)

    def _make_weights(self, planned: PlannedRound, choice: LayerChoice, worth: float, room: int) -> None:
        """Makes the weights of layer drafts, for the rounds after this one, if drafts save more than that takes.

        That is decided by drafts as long as is best: early ones are shorter, as little time was saved yet.
        """
        planned.costs = choice.costs.now(planned.drafting)
        fastest = self._policy(planned, choice, MOST_DRAFTED)
        if fastest.plan.worth(planned.rate) <= worth or not _promises_enough(planned, fastest.plan):
            return
        began = self._clock()
        if choice.weights.make_if_it_pays(planned.of_layers[1] - 1 / fastest.rate, room):
            planned.layers_are_worth = math.inf  # ends a run: the next round is planned with them
        planned.preparing += self._clock() - began

    def _policy(self, planned: PlannedRound, choice: LayerChoice, most: int) -> DraftPolicy:
        """The policy that brings most tokens a second; in a batch one for all, by what all requests have seen."""
        limit, each, own = max(limit for limit in _LIMITS if limit <= most), planned.costs[1], self._shared
        if planned.shared is None:
            each, own = each * self._forwards / self._drafted, self._confident
        return choice.policies.fastest(own.outlook(), each, planned.of_layers, limit, planned.drafting)

    def acceptance(self, confidence: float) -> float:
        """The probability that a drafted token is accepted if all before it are."""
        return self._confident.rate(confidence)

    def learn(self, feedback: Feedback) -> None:
        """Gives the head the states of the accepted tokens, if it drafts."""
        if self._head is not None:
            self._head.learn(feedback)

    def timed(self, forwards: Sequence[int]) -> Sequence[int]:
        """Those of the forwards of a draft whose time says what they cost: none where the head had to read first."""
        return () if self._choice is None or self._catches_up else forwards

    def note(self, confidences: Sequence[float], accepted: int) -> None:
        """Scores the tokens of a draft, of which the first ones were accepted."""
        for index, confidence in enumerate(confidences[: accepted + 1]):
            self._confident.note(index < accepted, confidence)

    def note_forwards(self, drafted: int, forwards: float) -> None:
        """Counts the tokens of a draft, and what they took: guesses that were confirmed saved forwards."""
        self._drafted = _FADING * self._drafted + drafted
        self._forwards = _FADING * self._forwards + forwards

    def fade(self, share: float) -> None:
        """Forgets a share of the own tokens."""
        if self._choice is not None:
            self._confident.fade(share)


def _promises_enough(planned: PlannedRound, plan: Plan) -> bool:
    """Whether a layer draft may make the other requests of a batch wait, if there are any."""
    return planned.shared is None or plan.tokens_per_second * planned.of_layers[1] >= LEAST_GAIN_TOGETHER
