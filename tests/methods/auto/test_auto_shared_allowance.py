"""What batches may lose by looking for drafts, on a simulated clock."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from selfspec.decoding.draft import Proposal, TokenDraft
from selfspec.decoding.drafter import Feedback, Prefill
from selfspec.methods.auto.drafter import AutoDrafter
from selfspec.methods.auto.known import Experience
from selfspec.methods.auto.together import plan_together
from selfspec.planning.acceptance import CONFIDENCE, MATCH_LENGTH, PROBABILITY, AcceptanceRate
from selfspec.planning.allowance import CREDIT, SHARED_DELTA, HostTime, SharedAllowance
from selfspec.runtimes.costs.live import LiveCosts
from selfspec.runtimes.costs.rows import RowCosts
from selfspec.sampling.acceptance import Acceptance
from selfspec.sampling.tree import TokenTree
from selfspec.types import PhaseSeconds

COSTS = RowCosts((1, 4, 16, 32), (1.0, 1.1, 1.6, 2.6))
COUNT = 4
HOST = 0.05 * COSTS(COUNT)
"""Seconds that looking for drafts takes in a round of all."""

nothing: Any = None


class Batch:
    """Four requests of one text, which plays rounds on a simulated clock."""

    def __init__(self, text: Callable[[int], int], host: HostTime) -> None:
        self._text, self._host = text, host
        self.seconds, self.sought = 0.0, list[bool]()
        self._now = 0.0
        features = (MATCH_LENGTH, PROBABILITY, CONFIDENCE)
        experience = Experience(*(AcceptanceRate(feature) for feature in features))
        prompt, verify = tuple(map(text, range(20))), LiveCosts(COSTS)
        prefill = Prefill(prompt, text(20), probe=nothing, room=400)
        self._drafters = [AutoDrafter(prefill, experience, verify, None, 0.02, lambda: self._now) for _ in range(COUNT)]
        self._written = [21] * COUNT

    @property
    def tokens(self) -> int:
        """Tokens of the request that has fewest."""
        return min(self._written) - 21

    def play(self) -> None:
        """Plays a round."""
        drafts = plan_together(self._drafters, self._host)
        drafted = [list(draft.token_ids) if isinstance(draft, TokenDraft) else [] for draft in drafts]
        self.sought.append(any(drafter._round is not None and drafter._round.verify for drafter in self._drafters))
        took, host = COSTS(COUNT + sum(map(len, drafted))), HOST if self.sought[-1] else 0.0
        self.seconds += took + host
        shares = PhaseSeconds(verify=took / COUNT, select=host / COUNT)
        for index, (drafter, draft, known) in enumerate(zip(self._drafters, drafts, drafted, strict=True)):
            start, accepted = self._written[index], 0
            while accepted < len(known) and known[accepted] == self._text(start + accepted):
                accepted += 1
            tokens = tuple(self._text(start + place) for place in range(accepted + 1))
            proposal = Proposal(torch.tensor(known, dtype=torch.long), TokenTree.chain(len(known)))
            outcome = Acceptance(tuple(range(accepted + 1)), tokens)
            drafter.learn(Feedback(draft, proposal, outcome, nothing, {}, shares))
            self._written[index] += len(tokens)


def hardly_repeats(place: int) -> int:
    """Tokens of which one in three is a comma, so that there always is a match, and what followed it never follows."""
    return 7 if place % 3 == 0 else 1000 + place


def test_a_batch_that_gains_nothing_soon_stops_looking() -> None:
    host = HostTime()
    lost = 0.0
    for tokens in (96, 400):
        batch = Batch(hardly_repeats, host)
        while batch.tokens < tokens:
            batch.play()
        assert any(batch.sought), "it looks again after a while"
        lost += batch.seconds - tokens * COSTS(COUNT)
    allowed = CREDIT + 2 * HOST / COSTS(COUNT) + SHARED_DELTA * 496
    assert lost <= allowed * COSTS(COUNT) < 0.02 * 496 * COSTS(COUNT)


def test_a_batch_that_gains_goes_on() -> None:
    batch = Batch(lambda place: place % 7, HostTime())
    while batch.tokens < 200:
        batch.play()
    assert all(batch.sought)
    assert batch.seconds < 0.6 * 200 * COSTS(COUNT)


def test_what_a_batch_may_lose_comes_back_and_is_not_saved_up() -> None:
    allowance = SharedAllowance()
    allowance.note(4, 100, 1000.0)
    allowance.note(4, 1, -CREDIT - 2 * SHARED_DELTA)
    assert not allowance.allows(4), "at most the credit was kept"
    assert allowance.allows(3), "other numbers of requests have other costs"
    rounds = 0
    while not allowance.allows(4):
        allowance.note(4, 1, 0.0)
        rounds += 1
    assert rounds == pytest.approx(CREDIT / 2 / SHARED_DELTA, abs=3)
