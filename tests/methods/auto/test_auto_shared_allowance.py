"""What batches may lose by looking for drafts, on a simulated clock."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from selfspec.decoding.draft import Proposal, TokenDraft
from selfspec.decoding.drafter import Feedback, Prefill
from selfspec.methods.auto.drafting import AutoDrafter
from selfspec.methods.auto.known import Experience
from selfspec.methods.auto.together import plan_together
from selfspec.planning.acceptance_tables import CONFIDENCE, MATCH_LENGTH, PROBABILITY, AcceptanceRate
from selfspec.planning.allowance import CREDIT, SHARED_DELTA, HostTime, SharedAllowance, SharedRound
from selfspec.planning.sharing import SharedStep
from selfspec.runtimes.costs.live import LiveCosts
from selfspec.runtimes.costs.rows import RowCosts
from selfspec.sampling.acceptance import Acceptance, TokenTree
from selfspec.types import PhaseSeconds

COSTS = RowCosts((1, 4, 16, 32), (1.0, 1.1, 1.6, 2.6))
COUNT, ROOM = 4, 400
HOST = 0.05 * COSTS(COUNT)
"""Seconds that looking for drafts takes in a round of all."""

nothing: Any = None


class Batch:
    """Four requests of up to 400 tokens, of one text or of one each, which play rounds on a simulated clock."""

    def __init__(self, texts: Callable[[int], int] | list[Callable[[int], int]], host: HostTime) -> None:
        self._texts, self._host = texts if isinstance(texts, list) else [texts] * COUNT, host
        self.seconds, self.sought = 0.0, list[bool]()
        self._now = 0.0
        features = (MATCH_LENGTH, PROBABILITY, CONFIDENCE)
        experience = Experience(*(AcceptanceRate(feature) for feature in features))
        verify = LiveCosts(COSTS)
        prefills = [Prefill(tuple(map(text, range(20))), text(20), probe=nothing, room=ROOM) for text in self._texts]
        self._drafters = [AutoDrafter(each, experience, verify, None, 0.02, lambda: self._now) for each in prefills]
        self._written = [21] * COUNT

    @property
    def tokens(self) -> int:
        """Tokens of the request that has fewest."""
        return min(self._written) - 21

    def play(self) -> None:
        """Plays a round."""
        going = [index for index in range(COUNT) if self._written[index] < 21 + ROOM]
        drafts = plan_together([self._drafters[index] for index in going], self._host)
        drafted = [list(draft.token_ids) if isinstance(draft, TokenDraft) else [] for draft in drafts]
        planned = [self._drafters[index]._round for index in going]
        self.sought.append(any(own is not None and own.verify for own in planned))
        took, host = COSTS(len(going) + sum(map(len, drafted))), HOST if self.sought[-1] else 0.0
        self.seconds += took + host
        shares = PhaseSeconds(verify=took / len(going), select=host / len(going))
        for index, draft, known in zip(going, drafts, drafted, strict=True):
            start, accepted, text = self._written[index], 0, self._texts[index]
            while accepted < len(known) and known[accepted] == text(start + accepted):
                accepted += 1
            tokens = tuple(text(start + place) for place in range(accepted + 1))
            proposal = Proposal(torch.tensor(known, dtype=torch.long), TokenTree.chain(len(known)))
            outcome = Acceptance(tuple(range(accepted + 1)), tokens)
            self._drafters[index].learn(Feedback(draft, proposal, outcome, nothing, {}, shares))
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
    assert not batch.sought[0], "the first round says what plain decoding takes"
    assert all(batch.sought[1:])
    assert batch.seconds < 0.6 * 200 * COSTS(COUNT)


def test_drafts_that_let_only_some_requests_end_sooner_gain_nothing() -> None:
    """All drafts of three requests are right. The fourth one, which writes longest, decides when the batch ends."""
    batch = Batch([lambda place: place % 7] * 3 + [lambda place: 1000 + place], HostTime())
    while batch.tokens < ROOM:
        batch.play()
    assert any(batch.sought)
    overdrawn = 2  # by the last round before each pause
    assert batch.seconds <= (ROOM + CREDIT + SHARED_DELTA * ROOM + overdrawn) * COSTS(COUNT)


@pytest.mark.parametrize("others", [2, 32])
def test_seeking_is_not_free_where_batches_of_another_size_take_longer(others: int) -> None:
    """A part of the host's time is the same for any number of requests."""
    host = HostTime()

    def play(requests: int, *, drafts: bool = True) -> None:
        for _ in range(40):
            host.note(requests, 0.05 + 0.01 * requests, sought=False, drafted=False)
            if drafts:
                host.note(requests, 0.05 + 0.02 * requests, drafted=True)
                host.note(requests, 0.05 + 0.04 * requests, drafted=True, layers=True)

    play(others)
    play(4, drafts=False)
    assert host.of_drafts(4) == pytest.approx(0.04)
    assert host.of_layers(4) == pytest.approx(0.12)
    play(4)
    play(others)
    assert host.of_plain(4) == pytest.approx(0.09)
    assert host.of_drafts(4) == pytest.approx(0.04)


def test_a_batch_whose_requests_end_one_after_the_other_loses_the_credit_once() -> None:
    allowance, lost = SharedAllowance(), 0.0
    for requests in range(32, 1, -1):
        allowance.note(requests, 4, 0.0)
        for _ in range(20):
            each = 0.1 if allowance.allows(requests) else 0.0
            allowance.note(requests, 1, -each)
            lost += each
    assert CREDIT < lost < CREDIT + 0.1 + SHARED_DELTA * 31 * 24
    allowance.note(33, 1, 0.0)
    allowance.note(33, 1, 10.0)
    allowance.note(34, 1, 0.0)
    allowance.note(34, 1, -CREDIT - 0.1)
    assert not allowance.allows(34), "what others have saved is not spent"


def test_one_stall_does_not_end_the_search_for_drafts() -> None:
    """Of a hundred steps, as where memory is touched for the first time while other processes compute."""
    host, costs = HostTime(), LiveCosts(COSTS)
    host.allowance.note(COUNT, 1, 0.0)
    stalled = SharedRound(SharedStep(COUNT, costs), costs, host)
    for _ in range(COUNT):
        stalled.note([2], 2, ROOM, COSTS(2 * COUNT) / COUNT, 100.0, host_seconds=25.0)
    rounds = 0
    while not host.allowance.allows(COUNT):
        host.allowance.note(COUNT, 1, 0.0)
        rounds += 1
    assert rounds < 2 * CREDIT / SHARED_DELTA


def test_what_a_batch_may_lose_comes_back_and_is_not_saved_up_for_long() -> None:
    allowance = SharedAllowance()
    allowance.note(3, 1, 0.0)
    allowance.note(4, 1, 10.0)
    allowance.note(4, 1, -CREDIT - 2)
    assert allowance.allows(4), "what was saved lately may be lost"
    left = -0.5
    allowance.note(4, 1000, 1000.0)
    allowance.note(4, 1, left - CREDIT - SHARED_DELTA)
    assert not allowance.allows(4), "of what was saved long ago only the credit is kept"
    assert allowance.allows(3), "other numbers of requests have other costs"
    rounds = 0
    while not allowance.allows(4):
        allowance.note(4, 1, 0.0)
        rounds += 1
    assert rounds == pytest.approx((CREDIT / 2 - left) / SHARED_DELTA, abs=3)
