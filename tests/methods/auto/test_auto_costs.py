"""What ``auto`` takes a forward to cost."""

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from helpers.kernels import needs_kernels
from helpers.low_bit_model import random_model
from helpers.models import build
from selfspec.planning.allowance import PlanningTime, RoundOverhead
from selfspec.runtimes.costs import measuring
from selfspec.runtimes.costs.live import LiveCosts
from selfspec.runtimes.costs.measuring import estimate_row_costs, measure_row_costs
from selfspec.runtimes.costs.rows import MOST_ROWS, RowCosts
from selfspec.runtimes.precision import Precision
from selfspec.runtimes.target import Target

COSTS = RowCosts((1, 2, 4, 8), (1.0, 1.2, 1.5, 2.5))


def test_between_measured_rows_costs_are_on_a_line_and_beyond_them_they_rise_as_in_the_last_doubling() -> None:
    assert [COSTS(rows) for rows in (1, 2, 3, 4, 6, 8, 16)] == pytest.approx([1.0, 1.2, 1.35, 1.5, 2.0, 2.5, 4.5])
    assert COSTS(2.5) == pytest.approx(1.275)


def test_costs_beyond_the_measured_rows_are_never_flat() -> None:
    flat = RowCosts((1, 16, 32), (1.0, 1.0, 0.98))
    assert flat(64) == pytest.approx(0.98 * 1.1)
    assert RowCosts((1,), (1.0,))(4) == 4.0


def test_rounds_of_large_batches_say_what_their_rows_take_and_leave_fewer_rows_as_they_were() -> None:
    """With 32 rows measured, those of 64 sequences moved what 32 rows were taken to cost."""
    live = LiveCosts(RowCosts((1, 16, 32), (1.0, 1.3, 1.9)))
    for _ in range(60):
        live.note([32], 1.9)
        live.note([64], 5.0)  # beyond 2.9 in a line
    assert live(32) == pytest.approx(1.9, rel=0.03)
    assert live(64) == pytest.approx(5.0, rel=0.03)
    assert live(48) > 2.6


def test_several_sequences_share_a_forward() -> None:
    alone, shared = COSTS.table(), COSTS.table(4)
    assert len(alone) == len(shared) == MOST_ROWS + 1
    assert alone[1:] == pytest.approx([COSTS(rows) for rows in range(1, MOST_ROWS + 1)])
    assert shared[1] == pytest.approx(1.5 / 4)
    assert shared[2] == pytest.approx(2.5 / 4)


@pytest.mark.parametrize("disturbed", [0, 1, 2])
def test_costs_that_other_processes_disturbed_are_measured_once_more(
    monkeypatch: pytest.MonkeyPatch, disturbed: int
) -> None:
    measured = [*disturbed * [RowCosts((1, 2), (9.0, 1.2))], COSTS, COSTS]
    left = iter(measured)
    monkeypatch.setattr(measuring, "measure_together", lambda *_, **__: [next(left)])
    assert measure_row_costs(Target(build("llama")), (0, 1)) is measured[min(disturbed, 1)]
    assert len([*left]) == len(measured) - min(disturbed + 1, 2)


@pytest.mark.parametrize("share", [1.0, 0.5])
def test_a_measurement_whose_thread_had_to_wait_was_disturbed(monkeypatch: pytest.MonkeyPatch, share: float) -> None:
    began = time.perf_counter()
    monkeypatch.setattr(measuring.time, "thread_time", lambda: share * (time.perf_counter() - began))
    costs = measure_row_costs(Target(build("llama")), (0, 1), row_counts=(1,))
    assert costs.alone == pytest.approx(share, abs=0.1)
    assert costs.disturbed is (share < 0.7)


@pytest.mark.parametrize(
    "wrong", [((), ()), ((2, 4), (1.0, 2.0)), ((1, 1), (1.0, 2.0)), ((1, 2), (1.0,)), ((1,), (0.0,)), ((1,), (-1.0,))]
)
def test_damaged_costs_are_refused(wrong: tuple[tuple[int, ...], tuple[float, ...]]) -> None:
    with pytest.raises(ValueError, match=r"row costs|seconds"):
        RowCosts(*wrong)


def test_live_rounds_move_the_costs_and_one_outlier_hardly_does() -> None:
    live = LiveCosts(COSTS)
    for _ in range(20):
        live.note([1], 1.0)
    live.note([1], 1000.0)
    assert live.now()[1] < 1.25
    for _ in range(100):
        live.note([1], 2.0)
        live.note([4], 3.0)
    assert live.now()[4] == pytest.approx(3.0, rel=0.02)
    assert live.now()[1] == pytest.approx(2.0, rel=0.02)
    assert live.now(4)[1] == pytest.approx(3.0 / 4, rel=0.02)


def test_rounds_in_which_something_was_recorded_say_nothing_of_costs() -> None:
    recorded = 3
    live = LiveCosts(COSTS, recorded=lambda: recorded)
    draft = LiveCosts(COSTS, live)
    recorded += 1
    live.note([4], 100.0)
    draft.note([4], 100.0)
    assert (live(4), draft(4)) == (COSTS(4), COSTS(4))
    for _ in range(2):
        live.note([4], 100.0)
    assert live(4) > COSTS(4)


@pytest.mark.parametrize("shape_doubt", [0.08, 0.25])
def test_one_slow_round_does_not_make_its_rows_dear(shape_doubt: float) -> None:
    """Until the next one of several rows is slow, too."""
    live = LiveCosts(COSTS, shape_doubt=shape_doubt)
    for _ in range(3):
        live.note([1], COSTS(1))
    live.note([4], 3 * COSTS(4))
    live.note([1], COSTS(1))
    assert live(4) == pytest.approx(COSTS(4), rel=0.01)
    live.note([2], 1.3 * COSTS(2))
    assert COSTS(2) * 1.05 < live(2) < COSTS(2) * 1.31


def test_a_busy_machine_makes_all_rows_dear_and_a_wrong_shape_does_not() -> None:
    """A number of rows that was measured wrong moves itself; it does not drift into what a step is taken to cost."""
    live = LiveCosts(COSTS)
    for _ in range(30):
        live.note([1], 1.0)
        live.note([4], 2.4)  # measured: 1.5
    assert live(1) == pytest.approx(1.0, rel=0.05)
    assert live(4) == pytest.approx(2.4, rel=0.07)
    assert live(3) > COSTS(3) * 1.1, "near numbers of rows follow"
    for _ in range(60):
        live.note([4], 4.8)
    assert live(1) > 1.5, "the machine became busy"


def test_rounds_of_several_requests_move_the_cost_of_their_own_rows() -> None:
    live, true = LiveCosts(COSTS), {4: 3.0, 8: 3.2}  # measured: 1.5 and 2.5
    for _ in range(300):
        for rows, seconds in true.items():
            live.note([rows], seconds)
    assert live.now(4)[1] == pytest.approx(3.0 / 4, rel=0.03)
    assert live.now(4)[2] == pytest.approx(3.2 / 4, rel=0.03)


@given(st.lists(st.floats(1e-4, 1.0), min_size=4, max_size=4))
def test_fewer_rows_are_filled_up_to_more_that_cost_less(seconds: list[float]) -> None:
    costs = RowCosts((1, 2, 4, 8), tuple(seconds))
    now, fills = LiveCosts(costs, shape_doubt=1e-9).filled_up()
    for rows in range(1, MOST_ROWS + 1):
        assert fills[rows] >= rows
        assert now[rows] == pytest.approx(costs(fills[rows])), "what is planned is what runs"
        least = min(costs(more) for more in range(rows, MOST_ROWS + 1))
        assert least <= now[rows] * (1 + 1e-9)
        assert now[rows] <= least / 0.98 + 1e-9
        assert fills[rows] == rows or costs(fills[rows]) < costs(rows)


def test_rows_are_filled_up_where_more_cost_less_beyond_doubt() -> None:
    costs = RowCosts((1, 2, 4), (1.0, 0.95, 2.0))
    for doubt, rows in ((0.08, 1), (0.04, 2)):
        assert LiveCosts(costs, shape_doubt=doubt).filled_up()[1][1] == rows


def test_forwards_of_one_kind_that_count_together_say_more_than_one_of_them() -> None:
    one, many = LiveCosts(COSTS), LiveCosts(COSTS)
    one.note([1], 1.2 * COSTS(1))
    many.note([1] * 20, 20 * 1.2 * COSTS(1))
    assert COSTS(1) < one(1) < many(1) < 1.2 * COSTS(1)
    assert many.doubt < one.doubt


def test_costs_are_as_they_were_measured_where_nothing_is_filled_up() -> None:
    """Rows of a draft's forward, and those of a batch: a dip does not make fewer rows cheaper."""
    dip = RowCosts((1, 2, 4, 8), (1.0, 0.7, 1.5, 2.5))
    assert LiveCosts(dip).now() == pytest.approx(dip.table())
    assert LiveCosts(dip).now(2) == pytest.approx(dip.table(2))


def test_estimates_follow_the_first_rounds_but_for_the_very_first() -> None:
    live = LiveCosts(COSTS, load_doubt=1.0, shape_doubt=0.25)
    assert live.doubt == 1.0
    live.note([1], 100.0)
    assert (live(1), live.doubt) == (1.0, 1.0)
    live.note([1], 5.0)
    live.note([1], 5.0)
    assert live(1) == pytest.approx(5.0, rel=0.05)
    assert live.doubt < 0.1


def test_rounds_of_many_rows_say_what_these_take_and_leave_one_row_in_doubt() -> None:
    live = LiveCosts(COSTS, load_doubt=3.0, shape_doubt=0.25)
    assert live.doubt_of(1) == live.doubt
    for _ in range(4):
        live.note([8], 5.0)
    assert live(8) == pytest.approx(5.0, rel=0.05)
    assert live.doubt_of(8) < 0.1 < 0.4 < live.doubt


def test_forwards_that_were_timed_together_count_together() -> None:
    live = LiveCosts(COSTS)
    live.note([4, 2, 1], 1.5 + 1.2 + 1.0)
    assert live.now() == pytest.approx(COSTS.table())


def test_costs_follow_others_of_the_same_machine() -> None:
    verify = LiveCosts(COSTS)
    draft = LiveCosts(RowCosts((1, 8), (0.5, 1.0)), verify)
    for _ in range(100):
        verify.note([1], 2.0)
    assert draft.now()[1] == pytest.approx(1.0, rel=0.02)
    for _ in range(100):
        draft.note([1], 0.6)
    assert draft.now()[1] == pytest.approx(0.6, rel=0.02)
    assert verify.now()[1] == pytest.approx(2.0, rel=0.02)


@needs_kernels
def test_costs_are_estimated_by_what_is_read() -> None:
    target = Target(random_model())
    whole, half, quarter = (estimate_row_costs(target, bits and Precision.of(bits)) for bits in (None, 8, 4))
    assert list(whole.seconds) == sorted(whole.seconds)
    assert whole(1) > half(1) > quarter(1)
    assert whole(8) - whole(1) == pytest.approx(quarter(8) - quarter(1)), "products are as many"


def test_overhead_is_a_mean_that_one_outlier_hardly_moves() -> None:
    overhead = PlanningTime()
    overhead.note(2.0)
    assert overhead.mean == 2.0
    overhead.note(1000.0)
    assert overhead.mean == pytest.approx(2.2)
    for _ in range(100):
        overhead.note(1.0)
    assert overhead.mean == pytest.approx(1.0, rel=1e-3)


def test_forwards_of_all_row_counts_are_measured() -> None:
    target = Target(build("llama"))
    costs = measure_row_costs(target, range(target.sublayer_count), row_counts=(1, 2, 8))
    assert costs.rows == (1, 2, 8)
    assert min(costs.seconds) > 0


def test_where_time_is_short_few_rows_are_measured_and_more_have_the_shape_of_an_estimate(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    target, counts = Target(build("llama")), (1, 4, 16, 32)
    monkeypatch.setattr(measuring, "timed", lambda *_: 2.0)
    monkeypatch.setattr(measuring, "estimate_row_costs", lambda *_: RowCosts(counts, (1.0, 1.1, 1.5, 2.2)))
    costs = measure_row_costs(target, (0, 1), row_counts=counts, most_seconds=0.0)
    assert costs.seconds == pytest.approx((2.0, 2.0, 2.0 * 1.5 / 1.1, 4.0))


def test_forwards_are_warm_before_they_are_measured() -> None:
    taken = [4.0, 2.0, 1.5, 1.4, 1.4]
    measuring._settle(lambda: taken.pop(0))
    assert taken == [1.4], "the last one took about as long as the one before"


def test_rows_of_a_round_cost_more_than_their_forward() -> None:
    overhead = RoundOverhead()
    assert overhead.added_to([0.0, 1.0, 1.2], 0.0)[1:] == [1.0, 1.2]
    assert overhead.added_to([0.0, 1.0, 1.2], 0.3)[1:] == [1.0, 1.5], "steps of plain decoding are hardly planned"
    overhead.note_steps(4, 2.0)
    assert overhead.added_to([0.0, 1.0, 1.2], 0.0)[1:] == pytest.approx([1.5, 1.7]), "more rows are free at first"
    for rows in (5, 4, 2, 3, 8, 5):
        overhead.note(rows, 0.4 + 0.1 * rows)
    assert (overhead.first, overhead.each) == pytest.approx((0.5, 0.1))
    assert overhead.added_to([0.0, 1.0, 1.2], 0.0)[1:] == pytest.approx([1.5, 1.8])
    assert overhead.added_to([0.0, 1.0, 1.2], 0.3)[1:] == pytest.approx([1.5, 2.1])


@given(st.lists(st.tuples(st.integers(1, 33), st.floats(0.0, 10.0)), max_size=40))
def test_rows_never_cost_less_than_nothing(rounds: list[tuple[int, float]]) -> None:
    overhead = RoundOverhead()
    for rows, seconds in rounds:
        overhead.note(rows, seconds)
        assert overhead.first >= 0
        assert overhead.each >= 0
