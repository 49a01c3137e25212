"""What methods share that choose the drafting sublayers while they generate: CLaSp, SWIFT, DEL and KnapSpec.

A paper's method says what it ``needs``, what it selects from, and how (``SelectingDrafter.select``). The rest is here:
when a selection pays, what came of the last one, what later requests start with, and one kept set for a batch.

If the drafts of several requests keep the same sublayers, their tokens go through a sublayer in one forward, which
reads its weights once. So a batch drafts with the *medoid* of its kept sets, the set that differs from all of them in
the fewest sublayers; with one request that is the request's own set.
"""

import threading
from abc import abstractmethod
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from selfspec.decoding.draft import Draft, LayerDraft, NoDraft
from selfspec.decoding.drafter import Branches, Drafter, Feedback, Prefill
from selfspec.methods.base import Method
from selfspec.methods.knapsack import Calibration, RecentRounds, SpreadRows
from selfspec.methods.payoff import Payoff, Record, draft_cost
from selfspec.methods.settings import PrecisionSettings, setting
from selfspec.model.kept import KeptSet
from selfspec.runtimes.target import Target

SHARE_HELP = (
    "in a batch, draft all requests with the kept set that differs least from those of all; off, each has its own"
)
"""Help of the setting ``share_kept_set``."""


def medoid(kept_sets: Sequence[KeptSet]) -> KeptSet:
    """The kept set with the smallest sum of differences to all sets, in sublayers; the first of these on a tie."""
    members = [frozenset(kept.sublayers) for kept in kept_sets]
    differences = [sum(len(one ^ other) for other in members) for one in members]
    return kept_sets[differences.index(min(differences))]


def share_kept_set(drafts: Sequence[Draft]) -> list[Draft]:
    """Gives the layer drafts of a batch one kept set, their medoid."""
    kept_sets = [draft.kept for draft in drafts if isinstance(draft, LayerDraft)]
    return with_kept_set(drafts, medoid(kept_sets)) if kept_sets else list(drafts)


def with_kept_set(drafts: Sequence[Draft], kept: KeptSet) -> list[Draft]:
    """Layer drafts with another kept set. Their limits and stopping rules stay, and so do drafts of other kinds."""
    return [replace(draft, kept=kept) if isinstance(draft, LayerDraft) else draft for draft in drafts]


@dataclass(frozen=True)
class SelectingSettings(PrecisionSettings):
    """Settings of every method that selects while it generates."""

    schedule: str = setting(
        "ours",
        "when it selects: where that is expected to save time (ours), or as published (paper)",
        choices=("ours", "paper"),
    )
    share_kept_set: bool = setting(True, SHARE_HELP)


@dataclass(frozen=True)
class Selected:
    """A selection in use: what was selected, what drafts by it, and what came of its rounds.

    ``calibration`` is that of the candidates of a selection by KnapSpec; ``None`` on the paper's schedule and from a
    state.
    """

    selection: Any
    draft: Draft
    record: Record
    calibration: Calibration | None = None


class SelectingMethod(Method):
    """A method whose requests select what drafts.

    With ``schedule=ours`` a selection is made only where it pays (``payoff``), a request starts with the last choice of
    any request, and a choice whose live acceptance promises less than plain decoding is declined. With
    ``schedule=paper`` it selects as published, and nothing is carried from one request to the next.
    """

    learns = True
    settings: SelectingSettings
    first_draft: Draft = NoDraft()
    """What drafts before the first selection."""

    def __init__(self, target: Target, settings: SelectingSettings) -> None:
        super().__init__(target, settings)
        self.ours = settings.schedule == "ours"
        self.payoff = Payoff(target.ranks.clock)
        self._lock = threading.Lock()
        self._choice: Selected | None = None

    def new_record(self, kept: KeptSet) -> Record:
        """A record of drafts with a kept set, which cost what they read of the weights."""
        return Record(self.payoff, draft_cost(kept, self.draft_precision, self.target.dtype))

    @property
    def watched(self) -> Collection[int]:
        """The sublayers whose states a selection uses."""
        return ()

    @property
    def last_choice(self) -> Selected | None:
        """The last choice of any request; ``None`` before the first."""
        with self._lock:
            return self._choice

    def adopt(self, choice: Selected | None) -> None:
        """Makes a choice the last one."""
        with self._lock:
            self._choice = choice

    def arrange(self, drafters: Sequence[Drafter], drafts: Sequence[Draft]) -> list[Draft]:
        """One kept set for the drafts of a batch, unless ``share_kept_set`` is off."""
        return share_kept_set(drafts) if self.settings.share_kept_set else list(drafts)


class SelectingDrafter(Drafter):
    """One request of a selecting method.

    ``choice`` is what it drafts with, ``None`` before the first selection; ``rounds`` are those since that.
    """

    method: SelectingMethod

    def __init__(self, method: SelectingMethod, prefill: Prefill) -> None:
        self.method = method
        self.probe = prefill.probe
        self.choice = method.last_choice if method.ours else None
        self.rounds = 0
        self._watches = False
        self._started = 0.0

    def select(self) -> None:
        """Selects again, if it is time to and what it selects from is there; called before every round."""

    def watches(self) -> bool:
        """Whether the states of the coming round are needed."""
        return False

    def keep(self, feedback: Feedback) -> None:
        """Keeps what a later selection needs of a round."""

    @property
    def record(self) -> Record:
        """What came of its choice; an empty record without one."""
        return Record(self.method.payoff) if self.choice is None else self.choice.record

    @property
    def gain(self) -> float | None:
        """Share of the time that a selection is expected to save; ``None`` if nothing is known of it."""
        return self.record.gain

    @property
    def declined(self) -> bool:
        """Whether its choice promises less than plain decoding; never on the paper's schedule."""
        return self.method.ours and self.record.declined

    def pays(self) -> bool:
        """Whether a selection is worth its time; always on the paper's schedule."""
        return not self.method.ours or self.method.payoff.pays(self.probe.remaining_tokens, self.gain)

    def use(self, choice: Selected) -> None:
        """Drafts with a choice from now on, and so do later requests."""
        self.choice = choice
        self.method.adopt(choice)

    def draft(self) -> Draft:
        """What its choice drafts."""
        return self.method.first_draft if self.choice is None else self.choice.draft

    def plan(self) -> Draft:
        """Selects again if it is time to, then drafts with its choice unless that is declined."""
        if self.choice is None and self.method.ours:
            self.choice = self.method.last_choice
        self.select()
        self._watches = self.watches()
        self.rounds += 1
        self._started = self.method.payoff.clock()
        return NoDraft() if self.declined else self.draft()

    @property
    def watched(self) -> Collection[int]:
        """The states that a selection uses, in the rounds whose states it will use."""
        return self.method.watched if self._watches else ()

    def learn(self, feedback: Feedback) -> None:
        """Counts the round, and keeps what a later selection needs of it."""
        seconds = self.method.payoff.clock() - self._started
        self.method.payoff.note_round(seconds, len(feedback.acceptance.rows))
        self.judge(feedback, seconds)
        self.keep(feedback)

    def judge(self, feedback: Feedback, seconds: float) -> None:
        """Counts a round that took this long in the record of what drafted it."""
        if feedback.drafted:
            self.record.note_round(feedback.drafted, feedback.accepted)


class PeriodicDrafter(SelectingDrafter):
    """Selects again after ``interval`` rounds, at ``rows`` of the tokens before."""

    def __init__(
        self, method: SelectingMethod, prefill: Prefill, rows: RecentRounds | SpreadRows, interval: int
    ) -> None:
        super().__init__(method, prefill)
        self._rows, self._interval = rows, interval

    @abstractmethod
    def choose(self, references: torch.Tensor, branches: Branches) -> None:
        """Drafts by a selection at the target's states of ``watched``, ``[n + 1, rows, hidden]``.

        ``branches`` run these rows.
        """

    def select(self) -> None:
        """Selects if there are rows, ``interval`` rounds after the last selection."""
        method = self.method
        if not (self.rounds >= self._interval and self._rows.ready and self.pays()):
            return
        with method.payoff.selection():
            self.choose(*self._rows.take(self.probe, method.draft_precision))
        self.rounds = 0
        if method.ours or self._interval >= self._rows.rounds:
            self._rows.clear()  # otherwise the next selection uses some of them again

    def watches(self) -> bool:
        """In the rounds whose tokens a selection will use."""
        collects = self._interval - self.rounds <= self._rows.rounds and self.pays()
        if not collects:
            self._rows.clear()
        return collects

    def keep(self, feedback: Feedback) -> None:
        """Keeps the states of its tokens."""
        if feedback.hidden_states:
            rows = len(feedback.acceptance.rows)
            self.add(feedback.hidden_states, slice(rows), self.probe.committed - rows)

    def add(self, hidden_states: Mapping[int, torch.Tensor], rows: slice, first: int) -> None:
        """Keeps the states of some rows: of successive tokens, the first of them at a position."""
        self._rows.add(first, torch.stack([hidden_states[index][rows] for index in self.method.watched]))

    def observe(self, feedback: Feedback) -> None:
        """Drops the states kept so far: a selection is over those of successive rounds of its own."""
        self._rows.clear()
