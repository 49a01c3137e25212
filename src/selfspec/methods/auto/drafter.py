"""``auto`` at work on one request: plans the round that promises most, and learns from what came of it."""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from selfspec.decoding.draft import MOST_STEPS, Draft, LayerDraft, NoDraft
from selfspec.decoding.drafter import Drafter, Feedback, Prefill
from selfspec.methods.auto.acceptance import AcceptanceRate, Copies, CopiesToConfirm
from selfspec.methods.auto.allowance import Allowance, PlanningTime, RoundOverhead, SharedRound
from selfspec.methods.auto.plans import (
    MOST_DRAFTED,
    MOST_GUESSES,
    Plan,
    WorthwhileDraft,
    best_copy,
    best_layers,
    least_acceptance,
    least_acceptance_of_layers,
    plain,
    with_caution,
)
from selfspec.methods.auto.preparation import Assignment
from selfspec.methods.ngram import chain_draft
from selfspec.runtimes.costs.live import LiveCosts
from selfspec.runtimes.costs.rows import CostTable
from selfspec.types import Forecast

CREDIT = 1.6
"""Steps of plain decoding that a request may lose before anything was saved: 2.5 % of 64 tokens.

One forward of the slowest draft that can pay takes most of a step. With a smaller credit a request whose draft is good
would wait for it: at 0.6 steps a sampled text of 128 tokens was decoded plainly for its first 44.
"""

_LIKELIEST = 0.95
"""If drafting would not pay even at this acceptance rate, a batch does not search for copies."""

_FADE = 0.02
"""Share of a layer draft's own record that is forgotten in each round without one."""


@dataclass(frozen=True)
class LayerChoice:
    """The layer draft of a model, and the costs of its forwards."""

    assignment: Assignment
    costs: LiveCosts


@dataclass(frozen=True)
class Experience:
    """What all requests have seen of the acceptance of drafts."""

    copies: AcceptanceRate
    """Of copied tokens, by the length of the match."""
    confident: AcceptanceRate
    """Of tokens of a layer draft, by its confidence."""
    layers: AcceptanceRate
    """Of tokens of a layer draft before they are drafted."""


class AutoDrafter(Drafter):
    """Drafts one request.

    It updates the acceptance of all requests and the costs of the target's forward (``verify``) and of the layer draft.
    The clock times planning and learning, which are part of the time spent.
    """

    def __init__(
        self,
        prefill: Prefill,
        experience: Experience,
        verify: LiveCosts,
        layers: LayerChoice | None,
        delta: float,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.verify_costs = verify
        self._layers = layers
        self._copies = Copies((*prefill.prompt_ids, prefill.first_token), experience.copies.of_request())
        self._confident = experience.confident.of_request()
        self._expected = experience.layers.of_request()
        self._allowance = Allowance(delta, CREDIT)
        self._overhead, self._planning = RoundOverhead(), PlanningTime()
        self._clock = clock
        self._planned = 0.0
        self._round: _Round | None = None
        self._unread: list[int] = []  # tokens of plain rounds that copies have not been looked for in

    def plan(self) -> Draft:
        """What drafts the next round of this request alone."""
        return self.plan_among(1)

    def plan_among(self, sequences: int, drafting: int | None = None, shared: SharedRound | None = None) -> Draft:
        """What drafts the next round, which ``sequences`` requests share; each is taken to need as many rows.

        ``drafting`` of them share the forwards of a layer draft (by default all), and ``shared`` collects the timings.
        """
        began = self._clock()
        self._read()
        forwards = self.verify_costs.now(sequences)
        verify = with_caution(self._overhead.added_to(forwards), sequences)
        self._round = planned = _Round(sequences, drafting or sequences, forwards, verify, shared)
        longest = self._allowance.longest(verify[1]) - (self._planning.mean or 0.0)
        draft = self._best(planned, longest) if longest > verify[2] else _plain_draft(verify, held_back=True)
        self._planned += self._clock() - began
        return draft

    def plan_nothing(self, plain: Draft, shared: SharedRound) -> Draft:
        """A round of plain decoding in a batch, of a request for which no draft could pay."""
        self._round = _Round(2, 1, (), (), shared)
        return plain

    def may_gain(self, least: float, least_of_layers: float) -> bool:
        """Whether copies or layers promise at least these acceptance rates, below which no draft can pay."""
        if least > _LIKELIEST:
            return False
        self._read()
        return self._copies.likelihood >= least or (
            self._layers is not None and self._expected.rate() >= least_of_layers
        )

    @property
    def layer_costs(self) -> LiveCosts | None:
        """Costs of the forward of the layer draft; ``None`` without one."""
        return None if self._layers is None else self._layers.costs

    @property
    def drafts_layers(self) -> bool:
        """Whether it planned a layer draft for the coming round."""
        return self._round is not None and self._round.guess is not None

    def _best(self, planned: "_Round", longest: float) -> Draft:
        """What promises most of all that takes at most ``longest`` seconds."""
        verify, match = planned.verify, self._copies.match_after()
        survival = self._copies.survival(match, MOST_DRAFTED)
        best = plain(verify)
        copied = best_copy(survival, verify, longest)
        if copied is not None and copied.tokens_per_second > best.tokens_per_second:
            best = copied
        if self._layers is not None:
            costs = self._layers.costs.now(planned.drafting)
            drafted = best_layers(self._expected.rate(), costs, verify, longest, survival[:MOST_GUESSES])
            if drafted is not None and drafted.tokens_per_second > best.tokens_per_second:
                return self._layer_draft(planned, drafted, self._layers.assignment, costs, longest)
        if not best.length:
            return _plain_draft(verify)
        return _named(chain_draft(self._copies.tokens(match, best.length)), "copies", best, verify)

    def _layer_draft(
        self, planned: "_Round", plan: Plan, assignment: Assignment, costs: CostTable, longest: float
    ) -> Draft:
        stop = WorthwhileDraft(
            plan.tokens_per_second, self._expected.rate(), self._confident.rate, plan.forward_seconds, planned.verify
        )
        left = longest - plan.length * costs[1] - planned.verify[1 + plan.length]
        planned.costs, planned.guess = costs, CopiesToConfirm(self._copies, costs, left)
        draft = LayerDraft(assignment.kept, plan.length, stop, precision=assignment.precision, guess=planned.guess)
        return _named(draft, assignment.name, plan, planned.verify)

    def learn(self, feedback: Feedback) -> None:
        """Scores what was drafted and what could have been copied, and counts the time."""
        began, planned, committed = self._clock(), self._round, feedback.acceptance.token_ids
        assert planned is not None
        if not planned.verify:
            assert planned.shared is not None
            self._unread += committed
            self._expected.fade(1 - (1 - _FADE) ** len(committed))
            planned.shared.note(1, feedback.seconds.verify / len(committed))
            return
        self._copies.extend(committed)
        if planned.guess is not None:
            self._score_layers(feedback)
        else:
            self._expected.fade(_FADE)
        # Seconds as costs are, not as they were in this round, so that one disturbed round does not end drafting.
        rows = 1 + len(feedback.proposal.tree)
        verifying, drafting = planned.verify[rows], planned.expected_drafting(feedback)
        self._overhead.note(rows, feedback.seconds.other)
        if planned.sequences == 1:
            self.verify_costs.note(planned.forwards[rows], feedback.seconds.verify)
            if drafting and self._layers is not None:
                self._layers.costs.note(drafting, feedback.seconds.draft)
        elif planned.shared is not None:
            made = () if planned.guess is None else planned.guess.forwards
            planned.shared.note(rows, feedback.seconds.verify, feedback.seconds.draft, made, self.layer_costs)
        drafting = planned.share_of_drafting(feedback, drafting)
        planning, self._planned = self._planning.note(self._planned + self._clock() - began), 0.0
        self._allowance.note(len(committed), verifying + drafting + planning, planned.verify[1])

    def _read(self) -> None:
        """Catches up with plain rounds in which nothing was looked for."""
        if self._unread:
            self._copies.extend(self._unread)
            self._unread = []

    def observe(self, feedback: Feedback) -> None:
        """Scores what could have been copied in a round that another drafter of the request planned."""
        self._read()
        self._copies.extend(feedback.acceptance.token_ids)

    def _score_layers(self, feedback: Feedback) -> None:
        confidences, accepted = feedback.proposal.confidences, feedback.accepted
        for index, confidence in enumerate(confidences[: accepted + 1]):
            self._confident.note(index < accepted, confidence)
            self._expected.note(index < accepted)


def _named(draft: Draft, name: str, plan: Plan, verify: CostTable, *, held_back: bool = False) -> Draft:
    """A draft with its name in reports and its forecast."""
    return replace(draft, name=name, forecast=Forecast(plan.tokens_per_second, 1 / verify[1], held_back))


def _plain_draft(verify: CostTable, *, held_back: bool = False, steps: int = 1) -> Draft:
    return _named(NoDraft(steps), "plain", plain(verify), verify, held_back=held_back)


def plan_together(drafters: Sequence[AutoDrafter]) -> list[Draft]:
    """What drafts the next round of several requests, whose rows share a forward."""
    count = sharing = len(drafters)
    if count == 1:
        return [drafters[0].plan()]
    costs = drafters[0].verify_costs
    shared, verify = SharedRound(count, costs), with_caution(costs.now(count), count)
    least = least_acceptance(verify)
    of_layers = {
        layers: math.inf if layers is None else least_acceptance_of_layers(verify, layers.now(count))
        for layers in {drafter.layer_costs for drafter in drafters}
    }
    may_gain = [drafter.may_gain(least, of_layers[drafter.layer_costs]) for drafter in drafters]
    plain_draft = _plain_draft(verify, steps=1 if any(may_gain) else MOST_STEPS)
    drafts = {
        drafter: drafter.plan_among(count, shared=shared) if gains else drafter.plan_nothing(plain_draft, shared)
        for drafter, gains in zip(drafters, may_gain, strict=True)
    }
    while (drafting := [drafter for drafter in drafters if drafter.drafts_layers]) and len(drafting) < sharing:
        # Fewer share the draft's forwards than was assumed: some may choose differently.
        sharing = len(drafting)
        drafts |= {drafter: drafter.plan_among(count, sharing, shared) for drafter in drafting}
    return list(drafts.values())


@dataclass(slots=True)
class _Round:
    """A planned round."""

    sequences: int  # that share it
    drafting: int  # of them share the forwards of a layer draft
    forwards: CostTable  # of the target
    verify: CostTable  # the same with what a round takes beside forwards; empty where no draft was looked for
    shared: SharedRound | None
    costs: CostTable = ()  # of the forward of a layer draft; empty without one
    guess: CopiesToConfirm | None = None  # of a layer draft

    def expected_drafting(self, feedback: Feedback) -> float:
        """Seconds of the draft's forwards if all that share them make as many; 0 if no layers drafted."""
        if self.guess is None:
            return 0.0
        proposal = feedback.proposal
        return (len(proposal.confidences) - proposal.guessed) * self.costs[1] + self.guess.seconds

    def share_of_drafting(self, feedback: Feedback, expected: float) -> float:
        """What the request pays of the forwards of the draft: what is expected if it drafts alone.

        Where several draft, some stop earlier than others, whose later forwards are shared by fewer: then those that
        drafted pay equal parts of what it took, and no less than is expected.
        """
        if self.drafting == 1:
            return expected
        return max(expected, feedback.seconds.draft * self.sequences / self.drafting) if expected else 0.0
