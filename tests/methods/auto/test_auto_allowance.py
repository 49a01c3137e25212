"""The bound of ``auto`` on a simulated clock: whatever is accepted, it is hardly slower than plain decoding."""

from collections.abc import Callable, Iterator
from itertools import accumulate

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from selfspec.planning.allowance import CREDIT, CREDITED, MOST_CREDIT, Allowance, Trust, stake
from selfspec.planning.plans import DraftPolicy, Known, Outlook, fill_rows, most_that_fits, plain
from selfspec.runtimes.costs.rows import RowCosts

STEP = 0.01
VERIFY = RowCosts((1, 2, 4, 8, 16, 32), tuple(STEP * factor for factor in (1.0, 1.05, 1.2, 1.5, 2.1, 3.3))).table()
DRAFT = RowCosts((1, 8), (0.35 * STEP, 0.6 * STEP)).table()

Accept = Callable[[int], int]
"""How many draft tokens of a round are accepted, by the number that were drafted."""


def play(tokens: int, accept: Accept, delta: float, hopes: tuple[float, float]) -> Iterator[tuple[int, float]]:
    """Plays rounds on a simulated clock, the optimist's choice each time; tokens and seconds after each round.

    Args:
        tokens: to write.
        accept: decides what is accepted.
        delta: of the allowance.
        hopes: acceptance that is always expected of lookup and of layer drafts.
    """
    allowance, written, seconds = Allowance(delta, CREDIT), 0, 0.0
    survival = list(accumulate([hopes[0]] * 32, lambda product, rate: product * rate))
    while written < tokens:
        longest = allowance.longest(STEP)
        rate = plain(VERIFY).tokens_per_second
        plan, forward = fill_rows(Known("lookup", [0] * 32, survival), VERIFY, rate, longest, 0.0, 1.0).plan, 0.0
        if fits := most_that_fits(DRAFT[1], VERIFY, longest):
            policy = DraftPolicy(Outlook(np.ones(1), np.array([hopes[1]])), DRAFT[1], VERIFY, rate, fits)
            if policy.plan.worth(rate) > plan.worth(rate):
                plan, forward = policy.plan, DRAFT[1]
        accepted = accept(plan.length)
        took = VERIFY[plan.length + 1] + plan.length * forward
        allowance.note(accepted + 1, took, STEP)
        written, seconds = written + accepted + 1, seconds + took
        yield written, seconds


@given(st.data(), st.floats(0.0, 0.1), st.tuples(st.floats(0.3, 1.0), st.floats(0.3, 1.0)))
def test_an_adversary_cannot_break_the_bound(data: st.DataObject, delta: float, hopes: tuple[float, float]) -> None:
    for written, seconds in play(96, lambda drafted: data.draw(st.integers(0, drafted)), delta, hopes):
        assert seconds <= (written + CREDIT + delta * max(0, written - CREDITED)) * STEP + 1e-9


def test_text_of_which_nothing_is_accepted_is_within_three_percent_after_64_tokens() -> None:
    rounds = list(play(256, lambda drafted: 0, 0.02, (0.9, 0.9)))
    assert any(seconds > written * STEP for written, seconds in rounds), "nothing was tried"
    for written, seconds in rounds:
        if written >= 64:
            assert seconds <= 1.03 * written * STEP


def test_what_was_saved_may_be_lost_again_but_no_more() -> None:
    left = [120]

    def accept(drafted: int) -> int:
        accepted = min(left[0], drafted)
        left[0] -= accepted
        return accepted

    rounds = list(play(400, accept, 0.02, (0.9, 0.9)))
    fastest = min(seconds / written for written, seconds in rounds)
    assert fastest < 0.7 * STEP, "an optimist who is right should be much faster"
    for written, seconds in rounds:
        assert seconds <= (written + CREDIT + 0.02 * max(0, written - CREDITED)) * STEP + 1e-9


def test_time_saved_pays_for_longer_drafts() -> None:
    allowance = Allowance(0.02, CREDIT)
    before = allowance.longest(STEP)
    allowance.note(4, 2 * STEP, STEP)
    assert allowance.longest(STEP) == pytest.approx(before + 2 * STEP)


@pytest.mark.parametrize(("prompt_steps", "more"), [(0, 0.0), (100, 1.0), (10_000, MOST_CREDIT - CREDIT)])
def test_a_long_prompt_gives_a_share_of_its_time_up_to_some_steps(prompt_steps: int, more: float) -> None:
    allowance = Allowance(0.02, CREDIT, prompt_steps * STEP)
    assert allowance.longest(STEP) == pytest.approx((1 + CREDIT + more) * STEP)


def test_a_plain_round_is_always_allowed() -> None:
    allowance = Allowance(0.0, 0.0)
    for _ in range(100):
        assert allowance.longest(STEP) >= VERIFY[1] - 1e-12
        allowance.note(1, STEP, STEP)


def test_a_wrong_draft_leaves_time_for_two_more() -> None:
    allowance = Allowance(0.02, CREDIT)
    for _ in range(3):
        fits = most_that_fits(DRAFT[1], VERIFY, stake(allowance.longest(STEP), STEP))
        assert fits
        allowance.note(1, fits * DRAFT[1] + VERIFY[1 + fits], STEP)


def test_a_long_draft_that_failed_says_less_a_token_than_short_ones() -> None:
    """One wrong token ends a draft, however much was expected after it."""
    once, often = Trust(), Trust()
    once.note(6, 0)
    for _ in range(6):
        often.note(1, 0)
    assert often.value < once.value < 1
