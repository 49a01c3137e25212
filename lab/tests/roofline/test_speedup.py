"""The speedup that published figures predict."""

import pytest

from selfspec.errors import InvalidParameterError
from selfspec_lab.roofline import DEVICES, MODELS, predict, step_seconds

SHAPE, DEVICE = MODELS["Llama-3-8B"], DEVICES["A100"]


def brute_force(draft: float, acceptance: float) -> float:
    """The best fixed length of a draft, where rows cost nothing and every token has one acceptance."""
    tokens = [sum(acceptance**k for k in range(length + 1)) for length in range(16)]
    return max(each / (1 + length * draft) for length, each in enumerate(tokens))


@pytest.mark.parametrize("acceptance", [0.3, 0.6, 0.806, 0.95])
def test_the_speedup_is_that_of_the_best_length(acceptance: float) -> None:
    found = predict(SHAPE, DEVICE, acceptance)
    assert found.step == step_seconds(SHAPE, DEVICE, context=1024)
    assert found.eight_rows == pytest.approx(found.step)
    assert found.speedup == pytest.approx(brute_force(found.draft / found.step, acceptance), rel=0.01)


def test_what_is_never_accepted_gains_nothing_and_more_acceptance_gains_more() -> None:
    assert predict(SHAPE, DEVICE, 0.0).speedup == 1
    speedups = [predict(SHAPE, DEVICE, acceptance).speedup for acceptance in (0.5, 0.7, 0.9)]
    assert 1 < speedups[0] < speedups[1] < speedups[2]


def test_a_draft_that_reaches_less_of_the_bandwidth_gains_less() -> None:
    ideal, slow = predict(SHAPE, DEVICE, 0.8), predict(SHAPE, DEVICE, 0.8, reached={4: 0.5})
    assert slow.draft == pytest.approx(2 * ideal.draft)
    assert slow.speedup < ideal.speedup
    assert predict(SHAPE, DEVICE, 0.8, reached={16: 0.5}).step == pytest.approx(2 * ideal.step)


def test_an_acceptance_is_a_probability() -> None:
    with pytest.raises(InvalidParameterError, match="between 0 and 1"):
        predict(SHAPE, DEVICE, 1.2)
