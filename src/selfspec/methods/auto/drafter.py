"""``auto`` at work on one request: plans the round that promises most, and learns from what came of it."""

from collections.abc import Sequence
from dataclasses import dataclass

from selfspec.decoding.draft import Draft, NoDraft, PartDraft
from selfspec.decoding.drafter import Drafter, Feedback, Prefill
from selfspec.decoding.layer_draft import LayerDraft
from selfspec.methods.auto.acceptance import Acceptance, SharedAcceptance
from selfspec.methods.auto.allowance import Allowance
from selfspec.methods.auto.assignments import Assignment
from selfspec.methods.auto.copies import Copies
from selfspec.methods.auto.live_costs import LiveCosts
from selfspec.methods.auto.plans import (
    MOST_DRAFTED,
    Plan,
    WorthwhileDraft,
    best_copy,
    best_guesses,
    best_layers,
    plain,
)
from selfspec.methods.auto.row_costs import RowCosts
from selfspec.methods.copying import chain_draft

CREDIT = 0.6
"""Steps of plain decoding that a request may lose before anything was saved: 1 % of 64 tokens."""

_MOST_GUESSES = 7

_FADE = 0.02
"""Share of a layer draft's own record that is forgotten in each round without one."""


class CopiesToConfirm:
    """Guesses of what a layer draft drafts next: copies, as many as make drafting cheapest.

    Args:
        copies: from where the text repeats itself.
        costs: of the draft's forward.

    Attributes:
        seconds: what the rows of guesses were expected to cost so far.
    """

    def __init__(self, copies: Copies, costs: RowCosts) -> None:
        self._copies = copies
        self._costs = costs
        self.seconds = 0.0

    def __call__(self, drafted: Sequence[int]) -> Sequence[int]:
        """The guesses after the text and the tokens drafted so far."""
        count, _ = best_guesses(self._costs, self._copies.survival(_MOST_GUESSES, drafted))
        self.seconds += self._costs(1 + count) - self._costs(1)
        return self._copies.tokens(count, drafted) if count else ()


@dataclass(frozen=True)
class LayerChoice:
    """The layer draft of a model.

    Attributes:
        assignment: what drafts.
        costs: of its forwards.
    """

    assignment: Assignment
    costs: LiveCosts


@dataclass(frozen=True)
class Experience:
    """What all requests have seen of the acceptance of drafts.

    Attributes:
        copies: of copied tokens, by the length of the match.
        confident: of tokens of a layer draft, by its confidence.
        layers: of tokens of a layer draft before they are drafted.
    """

    copies: SharedAcceptance
    confident: SharedAcceptance
    layers: SharedAcceptance


class AutoDrafter(Drafter):
    """Drafts one request.

    Args:
        prefill: of the request.
        experience: of all requests; learns.
        verify: costs of the target's forward; learns.
        layers: the layer draft; ``None`` without one.
        delta: share of plain decoding's time that may be lost.
    """

    def __init__(
        self, prefill: Prefill, experience: Experience, verify: LiveCosts, layers: LayerChoice | None, delta: float
    ) -> None:
        self._verify = verify
        self._layers = layers
        self._copies = Copies((*prefill.prompt_ids, prefill.first_token), Acceptance(experience.copies))
        self._confident = Acceptance(experience.confident)
        self._expected = Acceptance(experience.layers)
        self._allowance = Allowance(delta, CREDIT)
        self._plan: Plan | None = None
        self._guess: CopiesToConfirm | None = None
        self._batch = 1

    def plan(self) -> Draft:
        """What drafts the next round of this request alone."""
        return self.plan_among(1)

    def plan_among(self, sequences: int) -> Draft:
        """What drafts the next round.

        Args:
            sequences: requests that play their rounds together, this one included. Each is taken to need as many rows.
        """
        verify = self._verify.now.shared_by(sequences)
        longest = self._allowance.longest(verify(1))
        survival = self._copies.survival(MOST_DRAFTED)
        options = [plain(verify), best_copy(survival, verify, longest)]
        if self._layers is not None:
            costs = self._layers.costs.now.shared_by(sequences)
            options.append(best_layers(self._expected.rate(), costs, verify, longest, survival[:_MOST_GUESSES]))
        self._batch, self._guess = sequences, None
        self._plan = max((option for option in options if option is not None), key=lambda each: each.tokens_per_second)
        return self._draft(self._plan, sequences)

    def _draft(self, plan: Plan, sequences: int) -> Draft:
        if plan.kind == "tokens":
            return PartDraft(chain_draft(self._copies.tokens(plan.length)), "copies")
        if plan.kind == "plain" or self._layers is None:
            return PartDraft(NoDraft(), "plain")
        stop = WorthwhileDraft(
            plan.tokens_per_second,
            self._expected.rate(),
            self._confident.rate,
            plan.forward_seconds,
            self._verify.now.shared_by(sequences),
        )
        assignment = self._layers.assignment
        self._guess = CopiesToConfirm(self._copies, self._layers.costs.now.shared_by(sequences))
        layers = LayerDraft(assignment.kept, plan.length, stop, precision=assignment.precision, guess=self._guess)
        return PartDraft(layers, assignment.name)

    def learn(self, feedback: Feedback) -> None:
        """Scores what was drafted and what could have been copied, and counts the time."""
        plan, step = self._plan, self._verify.now.shared_by(self._batch)(1)
        assert plan is not None
        self._copies.extend(feedback.acceptance.token_ids)
        if plan.kind == "layers":
            self._score_layers(feedback)
        else:
            self._expected.fade(_FADE)
        if self._batch == 1:
            self._note_costs(feedback)
        self._allowance.note(len(feedback.acceptance.token_ids), self._spent(feedback), step)

    def observe(self, feedback: Feedback) -> None:
        """Scores what could have been copied in a round that another part of the method planned."""
        self._copies.extend(feedback.acceptance.token_ids)

    def _spent(self, feedback: Feedback) -> float:
        """Seconds that a round like this takes as costs are now, so that one disturbed round does not end drafting."""
        return self._verify.now.shared_by(self._batch)(1 + len(feedback.proposal.tree)) + self._drafting(feedback)

    def _score_layers(self, feedback: Feedback) -> None:
        confidences, accepted = feedback.proposal.confidences, feedback.accepted
        for index, confidence in enumerate(confidences[: accepted + 1]):
            self._confident.note(index < accepted, confidence)
            self._expected.note(index < accepted)

    def _note_costs(self, feedback: Feedback) -> None:
        rows = 1 + len(feedback.proposal.tree)
        self._verify.note(self._verify.now(rows), feedback.seconds.verify)
        if feedback.proposal.confidences and self._layers is not None:
            self._layers.costs.note(self._drafting(feedback), feedback.seconds.draft)

    def _drafting(self, feedback: Feedback) -> float:
        """Seconds that the forwards of a layer draft take as costs are now; 0 where no layers drafted."""
        if self._layers is None or self._guess is None:
            return 0.0
        forwards = len(feedback.proposal.confidences) - feedback.proposal.guessed
        return forwards * self._layers.costs.now.shared_by(self._batch)(1) + self._guess.seconds
