"""The formulas of the papers against simulated rounds, hand-worked numbers, and states within a bound."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from selfspec_lab.formulas import ideal_speedup, sufficient_cosine


def simulated_rounds(alpha: float, draft_length: int, rounds: int) -> np.ndarray:
    """Accepted draft tokens of each round, every token accepted with the same probability."""
    accepted = np.random.default_rng(0).random((rounds, draft_length)) < alpha
    return np.cumprod(accepted, axis=1).sum(axis=1)


@pytest.mark.parametrize(("alpha", "draft_length", "cost"), [(0.8, 1, 0.4), (0.6, 4, 0.5), (0.95, 10, 0.25)])
def test_ideal_speedup_is_that_of_simulated_rounds(alpha: float, draft_length: int, cost: float) -> None:
    rounds = 20_000
    accepted = simulated_rounds(alpha, draft_length, rounds).sum()
    seconds = rounds * (draft_length * cost + 1)
    measured_length, measured_alpha = 1 + accepted / rounds, accepted / (rounds * draft_length)
    assert float(ideal_speedup(measured_length, measured_alpha, cost)) == pytest.approx((accepted + rounds) / seconds)


def test_ideal_speedup_by_hand() -> None:
    assert float(ideal_speedup(3.0, 0.9, 0.5)) == pytest.approx(3 * 0.9 / (2 * 0.5 + 0.9))
    assert float(ideal_speedup(1.0, 0.0, 0.5)) == 1.0, "plain decoding"
    speedups = ideal_speedup(torch.tensor([1.0, 3.0]), torch.tensor([0.0, 0.9]), 0.5)
    torch.testing.assert_close(speedups, torch.tensor([1.0, 2.7 / 1.9]))


@given(st.integers(0, 2**32 - 1), st.integers(2, 6), st.integers(2, 40), st.floats(0, 1))
def test_states_within_the_bound_choose_the_same_token(seed: int, hidden: int, vocabulary: int, share: float) -> None:
    """Lemma 4.1 of KnapSpec: the other state stands anywhere in the cone that the bound allows, its rim included."""
    generator = torch.Generator().manual_seed(seed)
    state, away = torch.randn(2, hidden, dtype=torch.float64, generator=generator)
    head = torch.randn(vocabulary, hidden, dtype=torch.float64, generator=generator)
    bound = float(sufficient_cosine(state, head))
    cosine = 1 - share * (1 - bound) * (1 - 1e-9)
    direction = state / state.norm()
    across = away - (away @ direction) * direction
    other = state.norm() * (cosine * direction + (1 - min(1, cosine**2)) ** 0.5 * across / across.norm())
    assert float(torch.cosine_similarity(state, other, dim=0)) >= bound - 1e-12
    assert int((head @ other).argmax()) == int((head @ state).argmax())


def test_bounds_of_many_states_are_those_of_the_formula() -> None:
    """Every distance by subtraction, state by state."""
    generator = torch.Generator().manual_seed(0)
    states, head = (torch.randn(rows, 6, dtype=torch.float64, generator=generator) for rows in (5, 40))
    for state, bound in zip(states, sufficient_cosine(states, head), strict=True):
        scores = head @ state
        best, second = scores.topk(2).values
        distance = max(float((head[scores.argmax()] - other).square().sum()) for other in head)
        margin = float(best - second) ** 2 / (2 * float(state.square().sum()) * distance)
        assert float(bound) == pytest.approx(1 - margin, rel=1e-12)


def test_outside_of_the_bound_another_token_may_be_chosen() -> None:
    """With two tokens the bound is tight: half a margin beyond it the choice turns."""
    state, head = torch.tensor([1.0, 0.2]).double(), torch.tensor([[0.0, 1.0], [0.0, -1.0]]).double()
    cosine = float(sufficient_cosine(state, head))
    assert 0.9 < cosine < 1
    angle = torch.tensor(1.2 * np.arccos(cosine))
    turn = torch.stack([torch.stack([angle.cos(), angle.sin()]), torch.stack([-angle.sin(), angle.cos()])]).double()
    assert int((head @ (turn @ state)).argmax()) != int((head @ state).argmax())
