"""The estimate of what drafts are worth."""

import pytest

from selfspec.methods.auto.row_costs import RowCosts
from selfspec.serve.speedup import PlainSteps, Savings
from selfspec.types import PhaseSeconds, Round

COSTS = RowCosts((1, 2, 4, 8), (1.0, 1.5, 2.0, 3.0))


def round_of(tokens: int, candidates: int, **seconds: float) -> Round:
    return Round(candidates, candidates, tokens - 1, tuple(range(tokens)), None, None, PhaseSeconds(**seconds))


def test_a_step_is_shared() -> None:
    plain = PlainSteps(COSTS)
    assert (plain.share(1), plain.share(2), plain.share(4)) == (1.0, 0.75, 0.5)


def test_the_speedup_is_tokens_of_plain_steps_by_the_time_of_the_round() -> None:
    savings = Savings(PlainSteps(COSTS))
    savings.note(round_of(4, 3, draft=0.5, verify=2.0, other=0.1), sequences=1)
    assert savings.plain_seconds == pytest.approx(4 * (1.0 + 0.1))
    assert savings.round_seconds == pytest.approx(2.6)


def test_plain_decoding_has_no_speedup() -> None:
    savings = Savings(PlainSteps(COSTS))
    for _ in range(5):
        savings.note(round_of(1, 0, verify=30.0, other=0.2), sequences=2)  # however slow the machine has become
    assert savings.plain_seconds == pytest.approx(savings.round_seconds)


def test_a_slower_machine_is_noticed_by_rounds_with_drafts() -> None:
    plain = PlainSteps(COSTS)
    for _ in range(10):
        plain.learn(round_of(4, 3, verify=6.0), 1)  # three times what was measured
    assert plain.share(1) == pytest.approx(3.0)
    for _ in range(500):
        plain.learn(round_of(4, 3, verify=2.0), 1)
    assert plain.share(1) == pytest.approx(1.0, rel=0.01)


def test_nothing_is_estimated_without_a_measurement() -> None:
    savings = Savings(None)
    savings.note(round_of(2, 1, verify=1.0), 1)
    assert (savings.plain_seconds, savings.round_seconds) == (0.0, 0.0)
