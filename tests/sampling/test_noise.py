"""Coupled noise: known answers, independence, and the distribution it gives."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from selfspec.sampling.rules import gumbel_noise, seed_key, uniforms

MASK = (1 << 64) - 1
GAMMA = 0x9E3779B97F4A7C15
KNOWN = [-0.6807578206, 3.5293598175, -0.2474345416, 1.2143473625, -1.1002339125, 0.0344955213]
ANY_SEED = st.one_of(st.integers(-(1 << 63), (1 << 64) - 1), st.integers(-(1 << 200), 1 << 200))


def finalise(value: int) -> int:
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & MASK
    return value ^ (value >> 31)


def splitmix64(state: int, index: int) -> int:
    """The ``index``-th output, from 0, of the generator as published."""
    return finalise((state + (index + 1) * GAMMA) & MASK)


def reference_uniform(seed: int, position: int, token: int) -> float:
    stream = splitmix64(seed_key(seed), position)
    return ((splitmix64(stream, token) >> 12) + 0.5) / 2**52


def test_the_reference_is_splitmix64() -> None:
    published = [6457827717110365317, 3203168211198807973, 9817491932198370423, 4593380528125082431]
    assert [splitmix64(1234567, index) for index in range(4)] == published


@given(ANY_SEED, st.lists(st.integers(0, 1 << 40), min_size=1, max_size=3), st.integers(1, 9))
def test_the_tensor_code_is_the_reference(seed: int, positions: list[int], vocab: int) -> None:
    expected = [[reference_uniform(seed, position, token) for token in range(vocab)] for position in positions]
    assert uniforms(seed, torch.tensor(positions), vocab).tolist() == expected


def test_known_answers() -> None:
    """Frozen: a change here changes every seeded output of the library."""
    assert seed_key(0) == finalise(GAMMA)
    assert seed_key(1 << 64) == finalise((finalise(GAMMA) + GAMMA + 1) & MASK)
    assert gumbel_noise(0, torch.tensor([0, 7]), 3).flatten().tolist() == pytest.approx(KNOWN, rel=1e-6)


def test_noise_is_the_gumbel_quantile_of_the_uniforms() -> None:
    positions = torch.arange(4)
    expected = [-math.log(-math.log(value)) for value in uniforms(5, positions, 50).flatten().tolist()]
    noise = gumbel_noise(5, positions, 50)
    assert noise.dtype == torch.float32
    assert noise.shape == (4, 50)
    assert noise.flatten().tolist() == pytest.approx(expected, rel=1e-6, abs=1e-7)


def test_the_ends_of_the_interval_are_never_reached() -> None:
    """The formula's extremes: 52 zero bits and 52 one bits."""
    lowest, highest = 0.5 * 2.0**-52, ((1 << 52) - 1 + 0.5) * 2.0**-52
    assert lowest > 0
    assert highest < 1
    assert math.isfinite(-math.log(-math.log(lowest)))
    assert math.isfinite(-math.log(-math.log(highest)))


@given(ANY_SEED)
def test_batches_and_padding_do_not_matter(seed: int) -> None:
    positions = torch.tensor([3, 0, 12345678901, 3])
    together = gumbel_noise(seed, positions, 40)
    assert torch.equal(together, torch.cat([gumbel_noise(seed, positions[i : i + 1], 40) for i in range(4)]))
    assert torch.equal(together, gumbel_noise(seed, positions, 64)[:, :40])
    assert torch.equal(together[0], together[3])


def test_seeds_that_agree_modulo_2_to_the_64_differ() -> None:
    keys = [seed_key(seed) for seed in (-1, (1 << 64) - 1, (1 << 128) - 1, 0, 1 << 64, -(1 << 64), 1 << 63, -(1 << 63))]
    assert len(set(keys)) == len(keys)
    assert all(0 <= key <= MASK for key in keys)


def test_the_noise_is_gumbel() -> None:
    sample = gumbel_noise(2, torch.arange(50), 4000).flatten().double().numpy()
    assert stats.kstest(sample, stats.gumbel_r.cdf).pvalue > 0.01
    assert stats.kstest(sample * 1.02, stats.gumbel_r.cdf).pvalue < 1e-3, "the test would not see a 2 % error"


@pytest.mark.parametrize("axis", ["token", "position", "seed"])
def test_neighbours_are_independent(axis: str) -> None:
    """Pairs of uniforms one step apart fill a 10 x 10 grid evenly, and do not correlate."""
    if axis == "seed":
        left, right = (
            torch.cat([uniforms(seed + step, torch.arange(100), 20) for seed in range(0, 200, 2)]) for step in (0, 1)
        )
    else:
        block = uniforms(11, torch.arange(448), 447)
        left, right = (block[:, :-1], block[:, 1:]) if axis == "token" else (block[:-1], block[1:])
        left, right = (left[:, ::2], right[:, ::2]) if axis == "token" else (left[::2], right[::2])
    first, second = left.flatten().numpy(), right.flatten().numpy()
    cells = np.histogram2d(first, second, bins=10, range=[[0, 1], [0, 1]])[0]
    assert stats.chisquare(cells.flatten()).pvalue > 0.01
    assert abs(np.corrcoef(first, second)[0, 1]) < 4 / math.sqrt(first.size)


def test_argmax_of_perturbed_scores_follows_the_distribution() -> None:
    probs = torch.tensor([0.45, 0.25, 0.0, 0.15, 0.1, 0.04, 0.01])
    noise = -(-uniforms(-5, torch.arange(40_000), len(probs)).log()).log()  # all positions at once, unlike gumbel_noise
    draws = (probs.log() + noise).argmax(-1)
    counts = torch.bincount(draws, minlength=len(probs)).double().numpy()
    support = probs.numpy() > 0
    assert counts[~support].sum() == 0

    def pvalue(claimed: torch.Tensor) -> float:
        expected = claimed.double().numpy()[support]
        return float(stats.chisquare(counts[support], expected / expected.sum() * counts.sum()).pvalue)

    assert pvalue(probs) > 0.01
    assert pvalue(probs + torch.tensor([0.02, -0.02, 0, 0, 0, 0, 0])) < 1e-6, "the test would not see a 2 % error"
