"""What ``auto`` drafts next, against brute force."""

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from selfspec.planning.acceptance_tables import PROBABILITY, AcceptanceRate
from selfspec.planning.plans import (
    MOST_DRAFTED,
    MOST_PROBES,
    Known,
    best_guesses,
    fill_rows,
    gain_of_probe,
    most_that_fits,
    plain,
    share_rows,
)
from selfspec.runtimes.costs.rows import CostTable, RowCosts

rates = st.floats(0.0, 1.0)
tables = st.lists(st.floats(0.1, 1.0), min_size=36, max_size=36).map(lambda seconds: (0.0, *seconds))
"""Costs of any shape."""

rising = st.lists(st.floats(0.01, 1.0), min_size=4, max_size=4).map(
    lambda steps: RowCosts((1, 2, 8, 40), tuple(sum(steps[: n + 1]) for n in range(4)))
)


def survival_of(acceptances: list[float]) -> list[float]:
    return [math.prod(acceptances[: count + 1]) for count in range(len(acceptances))]


@given(st.lists(rates, max_size=40), tables, st.floats(0.5, 8.0), st.floats(0.5, 4.0))
def test_as_many_tokens_are_verified_as_are_worth_most(
    acceptances: list[float], verify: CostTable, longest: float, pace: float
) -> None:
    survival, rate = survival_of(acceptances), pace / verify[1]
    known = Known("lookup", list(range(len(acceptances))), survival)
    worth = {
        n: 1 + sum(survival[:n]) - rate * verify[n + 1]
        for n in range(min(len(survival), MOST_DRAFTED) + 1)
        if n == 0 or verify[n + 1] <= longest
    }
    filled = fill_rows(known, verify, rate, longest, 0.0, 1.0)
    assert not filled.probed
    assert filled.worth(rate, 1.0) == pytest.approx(max(worth.values()))
    assert filled.worth(rate, 1.0) == pytest.approx(worth[filled.plan.length])
    assert len(filled.token_ids) == filled.plan.length


@given(st.lists(rates, max_size=8), rising, st.floats(0.5, 3.0), st.floats(0.0, 1.0))
def test_probes_stand_where_they_pay(acceptances: list[float], verify: RowCosts, pace: float, gain: float) -> None:
    survival, table = survival_of(acceptances), verify.table()
    rate = pace / table[1]
    filled = fill_rows(Known("lookup", list(range(len(survival))), survival), table, rate, math.inf, gain, 1.0)
    count, probed = filled.plan.length, filled.probed
    assert len(probed) <= MOST_PROBES
    assert all(0 <= row <= count for row in probed)
    at = [1.0, *survival[:count], 0.0]
    last = [at[row] - at[row + 1] for row in range(count + 1)]
    value = 1 + sum(survival[:count]) + gain * sum(last[row] for row in probed)
    assert filled.worth(rate, 1.0) == pytest.approx(value - rate * table[1 + count + len(probed)])
    one_less = [1 + sum(survival[:count]) + gain * sum(last[row] for row in probed if row != left) for left in probed]
    for less in one_less:
        assert less - rate * table[count + len(probed)] <= filled.worth(rate, 1.0) + 1e-9
    if not probed and count <= MOST_PROBES:
        for row in range(count + 1):
            more = value + gain * last[row] - rate * table[2 + count]
            assert more <= filled.worth(rate, 1.0) + 1e-9


@given(
    st.lists(rates, min_size=1, max_size=4),
    st.lists(rates, max_size=3),
    tables,
    st.floats(0.5, 8.0),
    st.floats(0.3, 3.0),
)
def test_no_other_tokens_of_chain_and_siblings_are_worth_more(
    acceptances: list[float], others: list[float], verify: CostTable, longest: float, pace: float
) -> None:
    """Where siblings are taken after the first of the chain, which is the likeliest."""
    survival, rate = survival_of(acceptances), pace / verify[1]
    chances = sorted((min(each, survival[0]) for each in others), reverse=True)
    siblings = [(100 + place, chance) for place, chance in enumerate(chances)]
    known = Known("lookup", list(range(len(survival))), survival, siblings)
    worth = {
        (count, beside): 1 + sum(survival[:count]) + sum(chances[:beside]) - rate * verify[1 + count + beside]
        for count in range(len(survival) + 1)
        for beside in range(len(siblings) + 1 if count else 1)
        if count == 0 or verify[1 + count + beside] <= longest
    }
    filled = fill_rows(known, verify, rate, longest, 0.0, 1.0)
    assert filled.worth(rate, 1.0) == pytest.approx(max(worth.values()))
    assert filled.worth(rate, 1.0) == pytest.approx(worth[filled.plan.length, filled.beside])
    assert filled.siblings == tuple(range(100, 100 + filled.beside))
    assert filled.rows == 1 + filled.plan.length + filled.beside


def test_probes_stand_after_siblings_that_may_be_the_last_accepted() -> None:
    free = [0.0, *[1.0] * 36]
    known = Known("probe", [7], [0.4], [(8, 0.35), (9, 0.05)])
    filled = fill_rows(known, free, 1.0, math.inf, 0.5, 1.0)
    assert (filled.token_ids, filled.siblings) == ((7,), (8, 9))
    assert filled.probed == (0, 1, 2)  # 0.2 that none is accepted, 0.4 and 0.35; not after the one of 0.05
    assert filled.plan.tokens == pytest.approx(1.8)
    assert filled.gain == pytest.approx(0.5 * 0.95)


def test_a_dip_is_used() -> None:
    verify = [0.0, 1.0, 1.6, 1.6, 1.6, 0.9, *[2.0] * 31]
    known = Known("lookup", [1, 2, 3, 4], [0.5, 0.1, 0.05, 0.02])
    assert fill_rows(known, verify, 1.0, math.inf, 0.0, 1.0).plan.length == 4


def test_what_is_not_trusted_counts_less() -> None:
    known, verify = Known("lookup", [1], [0.4]), [0.0, 1.0, 1.3, *[2.0] * 34]
    assert fill_rows(known, verify, 1.0, math.inf, 0.0, 1.0).plan.length == 1
    assert fill_rows(known, verify, 1.0, math.inf, 0.0, 0.5).plan.length == 0


def test_a_probe_is_worth_what_its_row_does_not_cost() -> None:
    outlook = AcceptanceRate(PROBABILITY).outlook()
    assert gain_of_probe(outlook, 0.0, 1.0) == pytest.approx(outlook.mean)
    assert 0 < gain_of_probe(outlook, 0.3, 1.0) < outlook.mean
    assert gain_of_probe(outlook, 1.0, 1.0) == 0


@given(rising, rising, st.floats(0.1, 40.0))
def test_as_many_tokens_fit_as_take_the_time(draft: RowCosts, verify: RowCosts, longest: float) -> None:
    fits = [n for n in range(1, MOST_DRAFTED + 1) if n * draft(1) + verify(n + 1) <= longest]
    assert most_that_fits(draft(1), verify.table(), longest) == max(fits, default=0)


@given(st.lists(rates, min_size=1, max_size=8), rising)
def test_guesses_make_drafting_as_cheap_as_they_can(acceptances: list[float], draft: RowCosts) -> None:
    guessed = survival_of(acceptances)
    each = [draft(1 + n) / (1 + sum(guessed[:n])) for n in range(len(guessed) + 1)]
    count, seconds = best_guesses(draft.table(), guessed)
    assert seconds == pytest.approx(min(each))
    assert seconds == pytest.approx(each[count])


def test_plain_decoding_is_what_nothing_beats_where_drafts_are_dear() -> None:
    verify = RowCosts((1, 2), (1.0, 2.0)).table()
    filled = fill_rows(Known("lookup", [1, 2], [0.5, 0.2]), verify, 1.0, math.inf, 0.3, 1.0)
    assert (filled.plan, filled.probed) == (plain(verify), ())


@given(
    st.lists(st.tuples(st.lists(rates, max_size=3), st.floats(0.01, 1.0)), min_size=1, max_size=3),
    tables,
)
def test_texts_share_the_rows_that_are_worth_most_together(
    texts: list[tuple[list[float], float]], costs: CostTable
) -> None:
    survivals, values = [survival_of(own) for own, _ in texts], [value for _, value in texts]

    def worth(lengths: tuple[int, ...]) -> float:
        saved = sum(value * sum(own[:length]) for own, value, length in zip(survivals, values, lengths, strict=True))
        return saved - (costs[1 + sum(lengths)] - costs[1])

    every = itertools.product(*(range(len(own) + 1) for own in survivals))
    lengths = share_rows(survivals, lambda rows: costs[1 + rows] - costs[1], values)
    assert worth(tuple(lengths)) == pytest.approx(max(map(worth, every)))
