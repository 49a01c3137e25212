"""A round of ``auto`` between plan and verification, and the drafts that it gives."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from selfspec.decoding.draft import Follow, NoDraft, TokenDraft
from selfspec.decoding.drafter import Feedback
from selfspec.methods.auto.known import EARLIER, FORCED, LOOKUP, PROBED
from selfspec.planning.acceptance_tables import LookupToConfirm
from selfspec.planning.allowance import SharedRound
from selfspec.planning.plans import PADDING, DraftPolicy, FilledRows, Plan, plain
from selfspec.runtimes.costs.rows import CostTable
from selfspec.sampling.acceptance import TokenTree
from selfspec.types import Forecast

PLAIN = "plain"


def forecast_of(plan: Plan, verify: CostTable, *, held_back: bool = False) -> Forecast:
    """What is expected of a plan, beside a step of plain decoding."""
    return Forecast(plan.tokens_per_second, 1 / verify[1], held_back)


def plain_draft(verify: CostTable, follow: Follow | None = None, *, held_back: bool = False) -> NoDraft:
    """A step of plain decoding."""
    return NoDraft(follow, PLAIN, forecast_of(plain(verify), verify, held_back=held_back))


@dataclass(slots=True)
class PlannedRound:
    """A round of one request, as it is planned."""

    sequences: int  # that share it
    drafting: int  # of them share the forwards of a layer draft
    verify: CostTable  # with what a round takes beside forwards; empty where no draft was looked for
    known: CostTable  # the same where known tokens are verified, maybe in a run
    follow: Follow | None  # plans the next round of a run; ``None`` where the round has to be alone
    shared: SharedRound | None
    backs_off: bool = False  # nothing was planned, as the request is held back
    layers_follow: bool = False  # rounds with a layer draft may be a part of a run
    step: float = 0.0  # seconds of a plain step, or of its share
    value: float = 0.0  # in a batch: seconds that a token beyond the first promises to save
    seconds: float | None = None  # of the round, where they are not those of its rows alone
    name: str = PLAIN
    expected: float = 1.0  # tokens
    is_step: bool = False  # of plain decoding
    rows: int = 1  # of its verification, where its tokens are known
    plains: dict[tuple[bool, int], NoDraft | TokenDraft] = field(default_factory=dict)  # by ``held_back`` and rows
    fills: Sequence[int] = ()  # by the rows of a verification those that it is filled up to; as they are if empty
    gain: float = 0.0  # tokens that a probe for the next round's first draft token is worth
    layers_are_worth: float = -math.inf  # a draft of layers; -inf where none can be made
    preparing: float = 0.0  # seconds that are no planning: weights were made, or tokens read that were put off
    reading: float = 0.0  # in a batch: of these seconds those that drafts have to make up for
    costs: CostTable = ()  # of the forward of a layer draft; empty where none can be made
    guess: LookupToConfirm | None = None  # of a layer draft
    fastest: DraftPolicy | None = None  # what layer drafts bring; ``None`` where layers cannot draft
    awaited: DraftPolicy | None = None  # the same of those for which there is no time yet

    def plain(self, *, held_back: bool = False) -> NoDraft | TokenDraft:
        """A step of plain decoding, which more rows may fill up."""
        self.name, self.expected, self.rows, self.guess, self.is_step = PLAIN, 1.0, self.filled(1), None, True
        if (held_back, self.rows) not in self.plains:
            step = plain_draft(self.verify, self.follow, held_back=held_back)
            self.plains[held_back, self.rows] = step if self.rows == 1 else self._chain((), step.forecast)
        return self.plains[held_back, self.rows]

    def filled(self, rows: int) -> int:
        """The rows that a verification of ``rows`` is filled up to."""
        return self.fills[rows] if self.fills else rows

    def _chain(
        self,
        tokens: tuple[int, ...],
        forecast: Forecast | None,
        siblings: tuple[int, ...] = (),
        probed: tuple[int, ...] = (),
    ) -> TokenDraft:
        """Tokens and padding, as many as there are rows, and siblings of the first."""
        chained, padding = len(tokens), self.rows - 1 - len(tokens) - len(siblings) - len(probed)
        tree = TokenTree.chain(chained + padding, len(siblings))
        if padding:
            tokens += (PADDING,) * padding
            probed = tuple(row if row <= chained else row + padding for row in probed)
        return TokenDraft(tokens + siblings, tree, probed, self.follow, self.name, forecast)

    @property
    def is_known(self) -> bool:
        """Whether known tokens are verified."""
        return self.name in (LOOKUP, EARLIER, PROBED, FORCED)

    @property
    def rate(self) -> float:
        """Tokens a second that decoding gives where no tokens are known: plain decoding's, or those of layer drafts."""
        policy = self.fastest or self.awaited
        return 1 / self.step if policy is None else policy.rate

    @property
    def needed_by_layers(self) -> float:
        """Seconds of the shortest layer draft beside a step, where layers promise more than plain decoding."""
        verify, policy = self.of_layers, self.fastest or self.awaited
        if policy is None or policy.rate <= 1 / verify[1]:
            return 0.0
        return self.costs[1] + verify[2] - verify[1]

    @property
    def of_layers(self) -> CostTable:
        """What a round with a layer draft takes by its rows, beside the draft's forwards."""
        return self.known if self.layers_follow else self.verify

    def seconds_in_run(self, drafted: int) -> float:
        """Seconds of a round of a run, of which a head may have drafted tokens."""
        if self.guess is not None:
            return self.known[1 + drafted] + drafted * self.costs[1]
        return self.known[self.rows] if self.seconds is None else self.seconds

    def seconds_of(self, rows: int) -> float:
        """Seconds of the request in this round, beside those of a layer draft's forwards."""
        return (self.verify if self.guess is None else self.of_layers)[rows] if self.seconds is None else self.seconds

    def take(self, filled: FilledRows) -> TokenDraft:
        """A draft of known tokens, and probes beside them."""
        self.name, self.guess, self.is_step = (filled.known.name if filled.plan.length else PLAIN), None, False
        self.expected, self.rows = filled.plan.tokens, self.filled(filled.rows)
        return self._chain(filled.token_ids, forecast_of(filled.plan, self.verify), filled.siblings, filled.probed)

    def expected_drafting(self, feedback: Feedback) -> float:
        """Seconds of the draft's forwards if all that share them make as many; 0 if no layers drafted."""
        if self.guess is None:
            return 0.0
        return sum(self.costs[rows] for rows in feedback.proposal.forwards)

    def share_of_drafting(self, feedback: Feedback, expected: float) -> float:
        """What the request pays of the forwards of the draft: what is expected if it drafts alone.

        Where several draft, some stop earlier than others, whose later forwards are shared by fewer: then those that
        drafted pay equal parts of what it took, and no less than is expected.
        """
        if self.drafting == 1:
            return expected
        return max(expected, feedback.seconds.draft * self.sequences / self.drafting) if expected else 0.0
