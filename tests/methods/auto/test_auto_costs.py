"""What ``auto`` takes a forward to cost."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from helpers.models import build
from selfspec.methods.auto.allowance import PlanningTime, RoundOverhead
from selfspec.runtimes.costs.live import LiveCosts
from selfspec.runtimes.costs.rows import MOST_ROWS, RowCosts, measure_row_costs, monotone
from selfspec.runtimes.target import Target

COSTS = RowCosts((1, 2, 4, 8), (1.0, 1.2, 1.5, 2.5))


def test_between_measured_rows_costs_are_on_a_line_and_beyond_them_in_proportion() -> None:
    assert [COSTS(rows) for rows in (1, 2, 3, 4, 6, 8, 16)] == pytest.approx([1.0, 1.2, 1.35, 1.5, 2.0, 2.5, 5.0])
    assert COSTS(2.5) == pytest.approx(1.275)


def test_several_sequences_share_a_forward() -> None:
    alone, shared = COSTS.table(), COSTS.table(4)
    assert len(alone) == len(shared) == MOST_ROWS + 1
    assert alone[1:] == pytest.approx([COSTS(rows) for rows in range(1, MOST_ROWS + 1)])
    assert shared[1] == pytest.approx(1.5 / 4)
    assert shared[2] == pytest.approx(2.5 / 4)


@given(st.dictionaries(st.sampled_from([1, 2, 4, 8]), st.floats(1e-4, 1.0), min_size=4, max_size=4))
def test_costs_never_fall_with_more_rows(seconds: dict[int, float]) -> None:
    costs = monotone(seconds)
    assert list(costs.seconds) == sorted(costs.seconds)
    assert all(after >= seconds[rows] for rows, after in zip(costs.rows, costs.seconds, strict=True))


@pytest.mark.parametrize(
    "wrong", [((), ()), ((2, 4), (1.0, 2.0)), ((1, 1), (1.0, 2.0)), ((1, 2), (1.0,)), ((1,), (0.0,)), ((1,), (-1.0,))]
)
def test_damaged_costs_are_refused(wrong: tuple[tuple[int, ...], tuple[float, ...]]) -> None:
    with pytest.raises(ValueError, match=r"row costs|seconds"):
        RowCosts(*wrong)


def test_live_rounds_move_the_costs_and_one_outlier_hardly_does() -> None:
    live = LiveCosts(COSTS)
    live.note(1.0, 1000.0)
    assert live.now()[1] < 1.25
    for _ in range(100):
        live.note(live.now()[4], 3.0)
    assert live.now()[4] == pytest.approx(3.0, rel=1e-3)
    assert live.now()[1] == pytest.approx(2.0, rel=1e-3)
    assert live.now(4)[1] == pytest.approx(3.0 / 4, rel=1e-3)


def test_rounds_of_several_requests_move_the_cost_of_their_own_rows() -> None:
    live, true = LiveCosts(COSTS), {4: 3.0, 8: 3.2, 16: 6.4}  # measured: 1.5, 2.5 and in proportion
    for _ in range(200):
        for rows, seconds in true.items():
            live.note_rows([rows], seconds)
    assert live.now(4)[1] == pytest.approx(3.0 / 4, rel=0.03)
    assert live.now(4)[2] == pytest.approx(3.2 / 4, rel=0.03)
    assert live.now(8)[2] == pytest.approx(6.4 / 8, rel=0.03)
    assert list(live.now()) == sorted(live.now()), "costs never fall with more rows"


def test_forwards_that_were_timed_together_count_together() -> None:
    live = LiveCosts(COSTS)
    live.note_rows([4, 2, 1], 1.5 + 1.2 + 1.0)
    assert live.now() == pytest.approx(COSTS.table())
    live.note_rows([4, 2, 1], 1000.0)
    assert live.now()[4] < 1.2 * 1.5


def test_costs_follow_others_of_the_same_machine() -> None:
    verify = LiveCosts(COSTS)
    draft = LiveCosts(RowCosts((1, 8), (0.5, 1.0)), verify)
    for _ in range(100):
        verify.note(verify.now()[4], 3.0)
    assert draft.now()[1] == pytest.approx(1.0, rel=1e-3)
    for _ in range(100):
        draft.note(draft.now()[1], 0.6)
    assert draft.now()[1] == pytest.approx(0.6, rel=1e-3)
    assert verify.now()[4] == pytest.approx(3.0, rel=1e-3)


def test_overhead_is_a_mean_that_one_outlier_hardly_moves() -> None:
    overhead = PlanningTime()
    assert overhead.note(2.0) == 2.0
    assert overhead.note(1000.0) == pytest.approx(2.2)
    for _ in range(100):
        overhead.note(1.0)
    assert overhead.mean == pytest.approx(1.0, rel=1e-3)


def test_forwards_of_all_row_counts_are_measured() -> None:
    target = Target(build("llama"))
    costs = measure_row_costs(target, range(target.sublayer_count), row_counts=(1, 2, 8))
    assert costs.rows == (1, 2, 8)
    assert 0 < costs(1) <= costs(2) <= costs(8)


def test_where_time_is_short_few_rows_are_measured() -> None:
    target = Target(build("llama"))
    assert measure_row_costs(target, (0, 1), row_counts=(1, 4, 16, 32), most_seconds=0.0).rows == (1, 4)


def test_rows_of_a_round_cost_more_than_their_forward() -> None:
    overhead = RoundOverhead()
    assert overhead.added_to([0.0, 1.0, 1.2])[1:] == [1.0, 1.2]
    overhead.note(1, 0.5)
    assert overhead.added_to([0.0, 1.0, 1.2])[1:] == pytest.approx([1.5, 1.7]), "more rows are free at first"
    for rows in (1, 4, 2, 3, 8, 1):
        overhead.note(rows, 0.4 + 0.1 * rows)
    assert (overhead.first, overhead.each) == pytest.approx((0.5, 0.1))
    assert overhead.added_to([0.0, 1.0, 1.2])[1:] == pytest.approx([1.5, 1.8])


@given(st.lists(st.tuples(st.integers(1, 33), st.floats(0.0, 10.0)), max_size=40))
def test_rows_never_cost_less_than_nothing(rounds: list[tuple[int, float]]) -> None:
    overhead = RoundOverhead()
    for rows, seconds in rounds:
        overhead.note(rows, seconds)
        assert overhead.first >= 0
        assert overhead.each >= 0
