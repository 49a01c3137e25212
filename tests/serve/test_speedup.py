"""The estimate of what drafts are worth."""

import pytest

from selfspec.runtimes.costs.live import LiveCosts
from selfspec.runtimes.costs.rows import RowCosts
from selfspec.serve.metrics import _TOGETHER, Savings
from selfspec.types import PhaseSeconds, Round

COSTS = RowCosts((1, 2, 4, 8), (1.0, 1.5, 2.0, 3.0))


def round_of(tokens: int, candidates: int, **seconds: float) -> Round:
    return Round(candidates, candidates, tokens - 1, tuple(range(tokens)), None, None, PhaseSeconds(**seconds))


def test_the_speedup_is_tokens_of_plain_steps_by_the_time_of_the_round() -> None:
    savings = Savings(LiveCosts(COSTS))
    savings.note([round_of(4, 3, draft=0.5, verify=2.0, other=0.1)], sequences=1)
    assert savings.seconds[0] == pytest.approx(4 * (1.0 + 0.1))
    assert savings.seconds[1] == pytest.approx(2.6)


def test_a_step_is_shared() -> None:
    savings = Savings(LiveCosts(COSTS))
    savings.note([round_of(2, 1, verify=3.0 / 4)], sequences=4)  # eight rows
    assert savings.seconds[0] == pytest.approx(2 * 2.0 / 4)


def note_alone(costs: LiveCosts, record: Round, sequences: int) -> None:
    """Counts a round of a request of its own."""
    savings = Savings(costs)
    savings.note([record], sequences)
    assert savings.seconds[1] == record.seconds.total


def test_plain_decoding_has_no_speedup() -> None:
    costs = LiveCosts(COSTS)
    for _ in range(400):
        note_alone(costs, round_of(1, 0, verify=30.0, other=0.2), 2)  # the machine became 40 times slower
    savings = Savings(costs)
    for _ in range(5):
        savings.note([round_of(1, 0, verify=30.0, other=0.2)], sequences=2)
    assert savings.seconds[0] == pytest.approx(savings.seconds[1], rel=0.02)


def test_rounds_are_counted_some_at_a_time_and_where_others_begin_to_run_beside_them() -> None:
    costs, noted = LiveCosts(COSTS), list[tuple[list[int], float]]()
    costs.note = lambda rows, seconds: noted.append((list(rows), seconds))  # type: ignore[method-assign, assignment]
    savings = Savings(costs)
    for _ in range(_TOGETHER + 8):
        savings.note([round_of(2, 1, verify=1.5)], 1)
    assert noted == [([2] * _TOGETHER, 1.5 * _TOGETHER)], "an observation of many rounds"
    savings.note([round_of(1, 0, verify=0.75)], 2)
    assert noted[1:] == [([2] * 8, 12.0)], "rounds of other rows are not mixed with these"
    assert savings.seconds[1] == pytest.approx((_TOGETHER + 8) * 1.5 + 0.75)
    assert savings.seconds[0] == pytest.approx((_TOGETHER + 8) * 2 * 1.0 + 0.75)
    assert noted[2:] == [([2], 1.5)], "reading a figure counts what is left, once"


def test_a_slower_machine_is_noticed_by_rounds_with_drafts() -> None:
    costs = LiveCosts(COSTS)
    for verify, factor in ((6.0, 3.0), (2.0, 1.0)):
        for _ in range(200):
            note_alone(costs, round_of(4, 3, verify=verify), 1)
            note_alone(costs, round_of(1, 0, verify=verify / 2), 1)
        assert costs(1) == pytest.approx(factor, rel=0.02)


def test_nothing_is_estimated_without_a_measurement() -> None:
    savings = Savings(None)
    savings.note([round_of(2, 1, verify=1.0)], 1)
    assert (savings.seconds[0], savings.seconds[1]) == (0.0, 0.0)
