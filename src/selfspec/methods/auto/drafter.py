"""``auto`` at work on one request: plans the round that is worth most, and learns from what came of it."""

import math
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from selfspec.decoding.draft import MOST_STEPS, Draft, LayerDraft, NoDraft
from selfspec.decoding.drafter import Drafter, Feedback, Prefill
from selfspec.methods.auto.acceptance import AcceptanceRate, Copies, CopiesToConfirm, Guess
from selfspec.methods.auto.allowance import Allowance, Pace, PlanningTime, RoundOverhead, SharedRound, Trust
from selfspec.methods.auto.late_copies import LateCopies
from selfspec.methods.auto.plans import (
    MOST_DRAFTED,
    MOST_GUESSES,
    Plan,
    best_guesses,
    least_acceptance,
    least_acceptance_of_layers,
    most_that_fits,
    plain,
    with_caution,
)
from selfspec.methods.auto.preparation import Assignment
from selfspec.methods.auto.rows import FilledRows, Known, fill_rows, gain_of_guess
from selfspec.methods.auto.stopping import DraftPolicy
from selfspec.runtimes.costs.live import LiveCosts
from selfspec.runtimes.costs.rows import CostTable
from selfspec.types import Forecast

CREDIT = 1.6
"""Steps of plain decoding that a request may lose before anything was saved.

One forward of the slowest draft that can pay takes most of a step. With a smaller credit a request whose draft is good
would wait for it: at 0.6 steps a sampled text of 128 tokens was decoded plainly for its first 44.
"""

_LIKELIEST = 0.95
"""If drafting would not pay even at this acceptance rate, a batch does not search for copies."""

_FADE = 0.02
"""Share of a layer draft's own record that is forgotten in each round without one."""

_TRUST_FADE = 0.25
"""Trust in what drafts promise comes back this much more slowly: it was lost where their own record misled."""

_UNKNOWN = 0.4
"""Doubt in the costs from which on nothing is drafted: a round or two of plain decoding say what a step takes."""

_NEAR = 0.03
"""Relative difference up to which decisions by earlier costs and acceptances are as good."""

_LIMITS = (1, 2, 3, 4, 6, 8, 12, 16, 23, 32)
"""Lengths to which layer drafts are cut where time is short."""

_EXPECTED_ROOM = 256
"""Tokens that an answer is expected to have at most."""

PLAIN, COPIES, EARLIER, GUESS = "plain", "copies", "earlier", "guess"


@dataclass(frozen=True)
class LayerChoice:
    """The layer draft of a model, the costs of its forwards, and its low-bit weights."""

    assignment: Assignment
    costs: LiveCosts
    copies: LateCopies = field(default_factory=LateCopies)


@dataclass(frozen=True)
class Experience:
    """What all requests have seen of the acceptance of drafts."""

    copies: AcceptanceRate
    """Of copied tokens, by the length of the match."""
    guesses: AcceptanceRate
    """Of what is chosen after a probe, by its probability."""
    confident: AcceptanceRate
    """Of tokens of a layer draft, by its confidence."""


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
        self._copies = Copies(
            (*prefill.prompt_ids, prefill.first_token), experience.copies.of_request(), prefill.earlier
        )
        self._guesses = experience.guesses.of_request()
        self._confident = experience.confident.of_request()
        self._allowance = Allowance(delta, CREDIT)
        self._overhead, self._planning, self._pace = RoundOverhead(), PlanningTime(), Pace()
        self._trust: dict[str, Trust] = defaultdict(Trust)
        self._guess = Guess()
        self._room = prefill.room
        self._policy: DraftPolicy | None = None
        self._clock = clock
        self._planned = 0.0
        self._round: _Round | None = None
        self._matched = 0  # tokens of the latest steps that are in the text of copies already
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
        verify = with_caution(self._overhead.added_to(forwards, self._planning.mean), sequences)
        self._round = planned = _Round(sequences, drafting or sequences, forwards, verify, shared)
        longest = self._allowance.longest(verify[1])
        if longest <= verify[2] or self.verify_costs.doubt > _UNKNOWN:
            steps = MOST_STEPS if sequences == 1 and self.verify_costs.doubt <= _UNKNOWN else 1
            draft: Draft = _plain_draft(verify, held_back=True, steps=steps)
        else:
            draft = self._best(planned, longest)
        self._planned += self._clock() - began - planned.preparing
        return draft

    def plan_nothing(self, plain: Draft, shared: SharedRound) -> Draft:
        """A round of plain decoding in a batch, of a request for which no draft could pay."""
        self._round = _Round(2, 1, (), (), shared)
        return plain

    def may_gain(self, least: float, least_of_layers: float) -> bool:
        """Whether copies or layers promise at least these acceptance rates, below which no draft can pay."""
        if least > _LIKELIEST or self.verify_costs.doubt > _UNKNOWN:
            return False
        self._read()
        return self._copies.likelihood >= least or (
            self._layers is not None and self._confident.outlook().mean >= least_of_layers
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
        """What is worth most of all that takes at most ``longest`` seconds."""
        verify, rate = planned.verify, self._pace.rate(planned.verify[1])
        filled = self._filled_rows(planned, rate, longest)
        worth = plain(verify).worth(rate)
        if filled.plan.length or filled.probed:
            worth = max(worth, filled.worth(rate, self._trust[filled.known.name].value))
        layers = self._layers
        if layers is not None and not layers.copies.failed:
            draft = self._layer_draft(planned, layers, rate, longest, worth)
            if draft is not None:
                return draft
        if worth <= plain(verify).worth(rate):
            return _plain_draft(verify) if planned.sequences > 1 else self._steps(verify, rate)
        name = filled.known.name if filled.plan.length else PLAIN
        planned.name, planned.expected = name, filled.plan.tokens
        return _named(filled.draft(), name, filled.plan, verify)

    def _steps(self, verify: CostTable, rate: float) -> Draft:
        """Steps of plain decoding, until copies are likelier than now and may pay."""
        rows = range(1, MOST_DRAFTED + 1)
        pays = rate * min((verify[1 + drafted] - verify[1]) / drafted for drafted in rows)
        least = max(pays, self._copies.likelihood)

        def until(token_id: int) -> bool:
            self._matched += 1
            self._copies.extend((token_id,))
            return self._copies.likelihood > least

        return _plain_draft(verify, steps=MOST_STEPS, until=until)

    def _filled_rows(self, planned: "_Round", rate: float, longest: float) -> FilledRows:
        """The best rows without layers: copies or what a probe gave, and copies after that; and probes beside them."""
        verify, guess = planned.verify, self._guess
        gain = 0.0
        if planned.sequences == 1:
            gain = gain_of_guess(self._guesses.outlook(), verify[3] - verify[2], rate)
        match = self._copies.match_after()
        survival = self._copies.survival(match, MOST_DRAFTED)
        copied = self._copies.tokens(match, MOST_DRAFTED) if match.length else []
        chance = self._guesses.rate(guess.confidence) if guess.token is not None else 0.0
        name = EARLIER if match.earlier else COPIES
        known = Known(name, copied, survival)
        if guess.token is not None and copied[:1] != [guess.token] and chance > (survival or [0.0])[0]:
            after = self._copies.match_after([guess.token])
            following = self._copies.survival(after, MOST_DRAFTED - 1)
            tokens = self._copies.tokens(after, MOST_DRAFTED - 1, [guess.token]) if after.length else []
            known = Known(GUESS, [guess.token, *tokens], [chance, *(chance * each for each in following)])
        elif guess.token is not None and copied[:1] == [guess.token]:
            both = 1 - (1 - survival[0]) * (1 - chance) if survival else chance
            scale = both / survival[0] if survival else 0.0
            known = Known(name, copied, [scale * each for each in survival] or [both])
        return fill_rows(known, verify, rate, longest, gain, self._trust[known.name].value)

    def _layer_draft(
        self, planned: "_Round", layers: LayerChoice, rate: float, longest: float, worth: float
    ) -> Draft | None:
        """A layer draft that is worth more than ``worth``, if there is one and its weights are made."""
        verify, costs, name = planned.verify, layers.costs.now(planned.drafting), layers.assignment.name
        match = self._copies.match_after()
        guesses, each = best_guesses(costs, self._copies.survival(match, MOST_GUESSES))
        fits = most_that_fits(costs[1 + guesses], verify, longest)
        if not fits:
            return None
        policy = self._policy_for(each, verify, rate, max(limit for limit in _LIMITS if limit <= fits))
        plan = Plan(policy.limit, policy.expected_tokens, policy.expected_seconds)
        if plan.worth(rate, self._trust[name].value) <= worth:
            return None
        if not layers.copies.ready:
            began = self._clock()
            saving = verify[1] - plan.seconds / plan.tokens
            made = layers.copies.make_if_it_pays(saving, min(self._room, _EXPECTED_ROOM))
            planned.preparing = self._clock() - began
            if not made:
                return None
        left = longest - plan.length * costs[1] - verify[1 + plan.length]
        planned.costs, planned.guess = costs, CopiesToConfirm(self._copies, costs, left)
        planned.name, planned.expected = name, plan.tokens
        draft = LayerDraft(
            layers.assignment.kept,
            plan.length,
            policy.begin(self._confident.rate),
            precision=layers.assignment.precision,
            guess=planned.guess,
        )
        return _named(draft, name, plan, verify)

    def _policy_for(self, each: float, verify: CostTable, rate: float, limit: int) -> DraftPolicy:
        """When a layer draft ends; the last policy, where it would decide the same."""
        outlook, known = self._confident.outlook(), self._policy
        if (
            known is None
            or known.limit != limit
            or abs(known.draft - each) > _NEAR * each
            or abs(known.verify_one - verify[1]) > _NEAR * verify[1]
            or abs(known.rate - rate) > _NEAR * rate
            or not known.outlook.near(outlook, _NEAR)
        ):
            known = self._policy = DraftPolicy(outlook, each, verify, rate, limit)
        return known

    def learn(self, feedback: Feedback) -> None:
        """Scores what was drafted and what could have been copied, and counts the time."""
        began, planned, committed = self._clock(), self._round, feedback.acceptance.token_ids
        assert planned is not None
        self._room -= len(committed)
        self._score_guess(committed)
        if not planned.verify:
            assert planned.shared is not None
            self._unread += committed
            self._forget(_faded(committed))
            planned.shared.note(1, feedback.seconds.verify / len(committed))
            return
        self._copies.extend(committed[self._matched :])
        self._matched = 0
        if planned.guess is not None:
            self._score_layers(feedback)
        else:
            self._forget(_faded(committed))
        self._read_probe(feedback)
        # Seconds as costs are, not as they were in this round, so that one disturbed round does not end drafting.
        rows = 1 + len(feedback.proposal.rows)
        verifying, drafting = planned.verify[rows], planned.expected_drafting(feedback)
        if rows == 1:
            verifying = verifying * len(committed) + self._planning.mean
            self._overhead.note_steps(len(committed), feedback.seconds.other)
        else:
            self._overhead.note(rows, feedback.seconds.other)
        made = () if planned.guess is None else planned.guess.forwards
        if planned.sequences == 1:
            self.verify_costs.note([rows] if rows > 1 else [1] * len(committed), feedback.seconds.verify)
            if made and self._layers is not None:
                self._layers.costs.note(made, feedback.seconds.draft)
        elif planned.shared is not None:
            planned.shared.note(rows, feedback.seconds.verify, feedback.seconds.draft, made, self.layer_costs)
        drafting = planned.share_of_drafting(feedback, drafting)
        if planned.name != PLAIN:
            self._trust[planned.name].note(planned.expected - 1, len(committed) - 1)
        self._planning.note(self._planned + self._clock() - began)
        self._planned, spent = 0.0, verifying + drafting
        self._pace.note(len(committed), spent, planned.verify[1])
        self._allowance.note(len(committed), spent, planned.verify[1])

    def _forget(self, share: float) -> None:
        """Forgets a share of what went wrong in this request, so that it is tried again some time."""
        self._confident.fade(share)
        for trust in self._trust.values():
            trust.fade(_TRUST_FADE * share)

    def _score_guess(self, committed: Sequence[int]) -> None:
        if self._guess.token is not None:
            self._guesses.note(committed[0] == self._guess.token, self._guess.confidence)
        self._guess = Guess()

    def _read_probe(self, feedback: Feedback) -> None:
        """Reads what was chosen after the probe that stands after the last accepted row, if there is one."""
        probes, last = feedback.proposal.probes, feedback.acceptance.rows[-1]
        if last in probes:
            self._guess = Guess(*feedback.guesses[probes.index(last)])

    def _read(self) -> None:
        """Catches up with plain rounds in which nothing was looked for."""
        if self._unread:
            self._copies.extend(self._unread)
            self._unread = []

    def observe(self, feedback: Feedback) -> None:
        """Scores what could have been copied in a round that another drafter of the request planned."""
        self._read()
        self._score_guess(feedback.acceptance.token_ids)
        self._copies.extend(feedback.acceptance.token_ids)

    def _score_layers(self, feedback: Feedback) -> None:
        confidences, accepted = feedback.proposal.confidences, feedback.accepted
        for index, confidence in enumerate(confidences[: accepted + 1]):
            self._confident.note(index < accepted, confidence)


def _named(draft: Draft, name: str, plan: Plan, verify: CostTable, *, held_back: bool = False) -> Draft:
    """A draft with its name in reports and its forecast."""
    return replace(draft, name=name, forecast=Forecast(plan.tokens_per_second, 1 / verify[1], held_back))


def _plain_draft(
    verify: CostTable, *, held_back: bool = False, steps: int = 1, until: Callable[[int], bool] | None = None
) -> Draft:
    return _named(NoDraft(steps, until), PLAIN, plain(verify), verify, held_back=held_back)


def _faded(committed: Sequence[int]) -> float:
    """The share of a record that is forgotten while tokens were written without a layer draft."""
    return 1 - (1 - _FADE) ** len(committed)


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
    name: str = PLAIN
    expected: float = 1.0  # tokens
    preparing: float = 0.0  # seconds in which low-bit weights were made
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
