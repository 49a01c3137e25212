"""The objectives against the sums they abbreviate, hand-worked numbers, and simulated rounds."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from selfspec.methods.objective import (
    expected_tokens,
    tokens_per_layer,
    tokens_per_time,
)

ALPHAS = st.floats(0, 1)
LENGTHS = st.integers(0, 30)
GRID = torch.linspace(0, 1, 11, dtype=torch.float64)


def summed(alpha: float, draft_length: int) -> float:
    return sum(alpha**step for step in range(draft_length + 1))


def simulated_rounds(alpha: float, draft_length: int, rounds: int) -> np.ndarray:
    """Accepted draft tokens of each round, every token accepted with the same probability."""
    accepted = np.random.default_rng(0).random((rounds, draft_length)) < alpha
    return np.cumprod(accepted, axis=1).sum(axis=1)


@given(ALPHAS, LENGTHS)
def test_expected_tokens_is_the_sum_it_abbreviates(alpha: float, draft_length: int) -> None:
    assert float(expected_tokens(alpha, draft_length)) == pytest.approx(summed(alpha, draft_length), rel=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_expected_tokens_near_one(dtype: torch.dtype) -> None:
    gaps = torch.cat([torch.zeros(1), torch.logspace(-7.2, -1, 60)]).to(dtype)
    alphas = 1 - gaps
    sums = [[summed(alpha, length) for length in (0, 1, 18)] for alpha in alphas.double().tolist()]
    wanted = torch.tensor(sums, dtype=torch.float64).to(dtype)
    tokens = expected_tokens(alphas[:, None], torch.tensor([0, 1, 18]))
    assert tokens.dtype == dtype
    torch.testing.assert_close(tokens, wanted, rtol=4e-7 if dtype == torch.float32 else 1e-13, atol=0)


@pytest.mark.parametrize(("alpha", "draft_length"), [(0.0, 3), (0.3, 2), (0.8, 6), (0.97, 18), (1.0, 5)])
def test_expected_tokens_is_what_rounds_commit(alpha: float, draft_length: int) -> None:
    committed = 1 + simulated_rounds(alpha, draft_length, 200_000)
    standard_error = committed.std() / len(committed) ** 0.5
    assert abs(committed.mean() - float(expected_tokens(alpha, draft_length))) <= 4 * standard_error


@given(ALPHAS, st.integers(1, 40), LENGTHS, st.integers(41, 80))
def test_tokens_per_layer_is_the_sum_it_abbreviates(alpha: float, exit_layer: int, length: int, layers: int) -> None:
    wanted = summed(alpha, length) / (length * exit_layer + layers)
    assert float(tokens_per_layer(alpha, exit_layer, length, layers)) == pytest.approx(wanted, rel=1e-12)


def test_tokens_per_layer_by_hand() -> None:
    assert float(tokens_per_layer(0.5, 2, 3, 10)) == pytest.approx((1 + 0.5 + 0.25 + 0.125) / 16)
    assert float(tokens_per_layer(0.9, 7, 0, 32)) == pytest.approx(1 / 32), "no draft is plain decoding"
    assert float(tokens_per_layer(1.0, 8, 6, 32)) == pytest.approx(7 / 80)


def test_a_grid_is_scored_at_once() -> None:
    layers, lengths = torch.arange(1, 12), torch.arange(0, 19)
    grid = tokens_per_layer(GRID[:, None], layers[:, None], lengths, 12)
    assert grid.shape == (11, 19)
    for row, (alpha, layer) in enumerate(zip(GRID.tolist(), layers.tolist(), strict=True)):
        for length in lengths.tolist():
            assert float(grid[row, length]) == pytest.approx(float(tokens_per_layer(alpha, layer, length, 12)))


@given(ALPHAS, st.integers(1, 11), LENGTHS)
def test_tokens_per_time_with_equal_times_is_tokens_per_layer(alpha: float, layers: int, length: int) -> None:
    per_time = tokens_per_time(alpha, length, draft_time=0.25 * layers, target_time=0.25 * 12)
    assert float(per_time) == pytest.approx(4 * float(tokens_per_layer(alpha, layers, length, 12)), rel=1e-12)


def test_tokens_per_time_by_hand() -> None:
    paper = tokens_per_time(0.5, 2, draft_time=3.0, target_time=8.0)
    assert float(paper) == pytest.approx(1.75 / 14)
    with_head = tokens_per_time(0.5, 2, draft_time=3.0, target_time=8.0, head_time=1.0)
    assert float(with_head) == pytest.approx(1.75 / 17), "two draft steps and the verification each pay for the head"


def test_the_head_makes_short_drafts_of_many_sublayers_better() -> None:
    times, alphas = torch.tensor([1.0, 6.0]), torch.tensor([0.7, 0.9])
    lengths = torch.arange(1, 11)
    paper = tokens_per_time(alphas[:, None], lengths, times[:, None], 12.0)
    with_head = tokens_per_time(alphas[:, None], lengths, times[:, None], 12.0, head_time=6.0)
    assert int(paper.amax(1).argmax()) == 0
    assert float(with_head[0].amax() / with_head[1].amax()) < float(paper[0].amax() / paper[1].amax())
