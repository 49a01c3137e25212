"""What ``auto`` drafts next, against brute force."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from selfspec.methods.auto.plans import MOST_DRAFTED, WorthwhileDraft, best_copy, best_guesses, best_layers, plain
from selfspec.runtimes.costs.rows import RowCosts, monotone

costs = st.lists(st.floats(0.01, 1.0), min_size=4, max_size=4).map(
    lambda steps: monotone(dict(zip((1, 2, 8, 40), [sum(steps[: n + 1]) for n in range(4)], strict=True)))
)
rates = st.floats(0.0, 1.0)


def survival_of(acceptances: list[float]) -> list[float]:
    return [math.prod(acceptances[: count + 1]) for count in range(len(acceptances))]


@given(st.lists(rates, max_size=40), costs, st.floats(0.1, 8.0))
def test_copies_are_as_long_as_pays_most(acceptances: list[float], verify: RowCosts, longest: float) -> None:
    survival = survival_of(acceptances)
    lengths = [n for n in range(1, min(len(survival), MOST_DRAFTED) + 1) if verify(n + 1) <= longest]
    promised = {n: (1 + sum(survival[:n])) / verify(n + 1) for n in lengths}
    plan = best_copy(survival, verify.table(), longest)
    if not promised:
        assert plan is None
    else:
        assert plan is not None
        assert plan.tokens_per_second == pytest.approx(max(promised.values()))
        assert plan.tokens_per_second == pytest.approx(promised[plan.length])


@given(rates, costs, costs, st.floats(0.1, 40.0))
def test_layers_promise_their_best_length(rate: float, draft: RowCosts, verify: RowCosts, longest: float) -> None:
    fits = [n for n in range(1, MOST_DRAFTED + 1) if n * draft(1) + verify(n + 1) <= longest]
    plan = best_layers(rate, draft.table(), verify.table(), longest)
    if not fits:
        assert plan is None
    else:
        assert plan is not None
        promised = [sum(rate**i for i in range(n + 1)) / (n * draft(1) + verify(n + 1)) for n in fits]
        assert plan.tokens_per_second == pytest.approx(max(promised))
        assert plan.length == max(fits)
        assert plan.forward_seconds == draft(1)


@given(st.lists(rates, min_size=1, max_size=8), costs)
def test_guesses_make_drafting_as_cheap_as_they_can(acceptances: list[float], draft: RowCosts) -> None:
    guessed, verify = survival_of(acceptances), RowCosts((1,), (1.0,))
    plan = best_layers(0.8, draft.table(), verify.table(), math.inf, guessed)
    assert plan is not None
    each = [draft(1 + n) / (1 + sum(guessed[:n])) for n in range(len(guessed) + 1)]
    count, seconds = best_guesses(draft.table(), guessed)
    assert plan.forward_seconds == seconds == pytest.approx(min(each))
    assert seconds == pytest.approx(each[count])


def test_plain_decoding_is_what_nothing_beats_where_drafts_are_dear() -> None:
    verify, draft = RowCosts((1, 2), (1.0, 2.0)).table(), RowCosts((1, 2), (0.9, 1.8)).table()
    others = [best_copy([0.5, 0.2], verify, math.inf), best_layers(0.5, draft, verify, math.inf)]
    assert all(other is not None and other.tokens_per_second < plain(verify).tokens_per_second for other in others)


def stopping(rate: float, acceptance: float, forward: float) -> WorthwhileDraft:
    verify = RowCosts((1, 32), (1.0, 1.31))  # 0.01 for every row more
    return WorthwhileDraft(rate, acceptance, lambda confidence: confidence, forward, verify.table())


def test_a_draft_ends_where_the_next_token_costs_more_than_it_is_worth() -> None:
    # The next token is accepted with 0.9 times what has survived; its time would give 1.5 * (0.3 + 0.01) tokens.
    stop = stopping(1.5, 0.9, 0.3)
    assert not stop.stops(0.8)
    assert stop.threshold == pytest.approx(1.5 * 0.31 / (0.9 * 0.8))
    assert not stop.stops(0.66)  # 0.528 survive
    assert stop.stops(0.9)  # 0.9 * 0.528 * 0.9 = 0.428 tokens for 0.465


@given(st.lists(st.floats(0.01, 1.0), min_size=1, max_size=12), st.floats(0.5, 3.0), rates, st.floats(0.01, 1.0))
def test_the_threshold_is_where_it_stops(confidences: list[float], rate: float, after: float, forward: float) -> None:
    stop = stopping(rate, after, forward)
    for confidence in confidences:
        threshold = stop.threshold
        stopped = stop.stops(confidence)
        if abs(threshold - confidence) > 1e-9 and threshold < 1:
            assert stopped == (confidence < threshold)
