"""Selections that pay for themselves: costs and savings on a clock of one's own, promises against slow sums."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from helpers.clock import HandClock
from selfspec.methods.objective import tokens_per_time
from selfspec.methods.payoff import ALLOWANCE, JUDGED, NEW, Payoff, Record, draft_cost, expected_speedup
from selfspec.model.kept import KeptSet
from selfspec.runtimes.precision import Precision


def spend(payoff: Payoff, clock: HandClock, seconds: float) -> None:
    with payoff.selection():
        clock.now += seconds


def payoff_after(selections: list[float], rounds: list[tuple[float, int]]) -> Payoff:
    clock = HandClock()
    payoff = Payoff(clock)
    for seconds in selections:
        spend(payoff, clock, seconds)
    for seconds, tokens in rounds:
        payoff.note_round(seconds, tokens)
    return payoff


def test_the_first_selection_shows_what_it_costs() -> None:
    payoff = payoff_after([], [(1.0, 1)])
    assert payoff.cost is None
    assert payoff.pays(1, 0.0)
    assert payoff_after([2.0, 9.0, 3.0], []).cost == 3.0


@pytest.mark.parametrize(
    ("remaining", "gain", "pays"),
    [
        (100, 0.11, True),
        (100, 0.09, False),
        (200, 0.06, True),
        (200, 0.04, False),
        (100, 0.0, False),
        (100, None, False),
    ],
)
def test_it_pays_where_it_saves_more_than_it_costs(remaining: int, gain: float | None, pays: bool) -> None:
    """A selection takes 10 seconds, a token one: it has to save a tenth of 100 tokens, a twentieth of 200."""
    assert payoff_after([10.0], [(1.0, 1)] * 8).pays(remaining, gain) == pays


def test_what_is_unknown_is_paid_from_an_allowance() -> None:
    """Selections of one second each, tried in every round of one second: they take their share of all time, no more."""
    clock = HandClock()
    payoff = Payoff(clock)
    rounds = 2000
    for left in range(rounds, 0, -1):
        if payoff.pays(left, None):
            spend(payoff, clock, 1.0)
        clock.now += 1.0
        payoff.note_round(1.0, 1)
    selecting = clock.now - rounds
    assert ALLOWANCE * 0.9 < selecting / clock.now <= ALLOWANCE


def test_nothing_pays_that_the_rest_of_the_request_cannot_pay_for() -> None:
    payoff = payoff_after([1.0], [(1.0, 1)] * 1000)
    assert payoff.pays(2, None)
    assert not payoff.pays(1, 1.0)


def test_a_token_takes_what_the_last_ones_took() -> None:
    payoff = payoff_after([10.0], [(10.0, 1)] * 2)
    assert payoff.pays(12, 0.9)
    for _ in range(2000):
        payoff.note_round(0.1, 1)
    assert not payoff.pays(90, 1.0)


@given(st.floats(0, 1), st.floats(0.05, 2), st.integers(1, 20))
def test_the_expected_speedup_is_the_best_of_all_lengths(acceptance: float, cost: float, longest: int) -> None:
    """Equation 4 term by term: tokens of a round over its steps."""
    slow = max(
        sum(acceptance**power for power in range(length + 1)) / (length * cost + 1) for length in range(1, longest + 1)
    )
    assert expected_speedup(acceptance, cost, longest) == pytest.approx(slow, rel=1e-9)
    grid = tokens_per_time(acceptance, torch.arange(1, longest + 1), cost, 1.0)
    assert slow == pytest.approx(float(grid.max()), rel=1e-6)


def record(rounds: list[tuple[int, int]], cost: float | None = 0.5) -> tuple[Payoff, Record]:
    payoff = Payoff(HandClock())
    made = Record(payoff, cost)
    for drafted, accepted in rounds:
        made.note_round(drafted, accepted)
    return payoff, made


def test_the_speedup_of_rounds_by_hand() -> None:
    """Six tokens in three rounds with eight draft steps of half a target step each, and a round without a draft."""
    _, made = record([(4, 2), (1, 1), (3, 0), (0, 0)])
    assert made.drafted == 8
    assert made.speedup == pytest.approx(6 / (3 + 8 / 2), rel=0.02)  # older rounds count a little less
    assert Record(Payoff()).speedup == 1.0


def test_a_choice_that_promises_less_than_plain_decoding_is_declined() -> None:
    _, made = record([(1, 0)] * (JUDGED - 1))
    assert not made.declined, "it was judged too early"
    made.note_round(1, 0)
    assert made.declined
    assert made.speedup == pytest.approx(1 / 1.5)
    _, good = record([(4, 4)] * JUDGED)
    assert not good.declined
    _, plain = record([(4, 0)] * JUDGED, cost=None)
    assert not plain.declined


def test_old_rounds_fade() -> None:
    _, made = record([(4, 4)] * 400 + [(1, 0)] * 1000)
    assert made.declined


def test_the_gain_is_what_new_choices_have_reached() -> None:
    payoff, made = record([(4, 4)] * (NEW // 4 - 1))
    assert made.gain is None, "nothing is known yet"
    made.note_round(4, 4)
    best = 5 / 3  # five tokens for the time of three steps
    assert payoff.reached == pytest.approx(best)
    assert made.gain == pytest.approx(0.0)
    assert Record(payoff).gain == pytest.approx(1 - 1 / best), "plain decoding leaves all of it to gain"
    for _ in range(400):
        made.note_round(4, 3)
    assert made.gain == pytest.approx(1 - (4 / 3) / best, rel=0.02)
    assert payoff.reached == pytest.approx(best), "what a choice reaches later says nothing about new ones"


def test_choices_worse_than_plain_decoding_promise_no_gain() -> None:
    payoff, made = record([(1, 0)] * JUDGED)
    assert payoff.reached == 1.0
    assert made.gain == 0.0
    assert Record(payoff).gain == 0.0


def test_a_draft_step_costs_the_bits_that_it_reads() -> None:
    kept = KeptSet((0, 1, 2, 5), 8)
    assert draft_cost(kept, None, torch.bfloat16) == 4 / 8
    assert draft_cost(kept, Precision.of(4), torch.bfloat16) == 4 * 4 / (16 * 8)
    assert draft_cost(kept, Precision(attention=8), torch.float32) == (2 * 8 + 2 * 32) / (32 * 8)
