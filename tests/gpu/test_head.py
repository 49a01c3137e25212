"""What the kernels choose from logits is what the readable form chooses."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers.device import DEVICE
from selfspec.model.cache import KeyValueCache
from selfspec.model.forward import Drawing, Forward, Rows, SequenceState
from selfspec.runtimes.logits import Logits
from selfspec.sampling.rules import Coupled, gumbel_noise, seed_key

pytest.importorskip("triton", reason="the extra triton is not installed")
from selfspec.gpu.head import SPAN, Draws, choose, choose_for

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
vocabularies = st.integers(1, 3 * SPAN) | st.sampled_from([SPAN, SPAN + 1, 2 * SPAN - 1])


def some_logits(rows: int, vocab: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    made = torch.Generator().manual_seed(seed)
    return (4 * torch.randn(rows, vocab, generator=made)).to(DEVICE, dtype)


@settings(max_examples=15)
@given(
    rows=st.integers(1, 16),
    vocab=vocabularies,
    dtype=st.sampled_from(DTYPES),
    seed=st.integers(0, 1000),
    coarse=st.booleans(),
)
def test_the_first_of_the_largest_and_its_probability(
    rows: int, vocab: int, dtype: torch.dtype, seed: int, coarse: bool
) -> None:
    """Coarse logits have many equal largest ones."""
    logits = some_logits(rows, vocab, dtype, seed)
    logits = logits.div(4).round() if coarse else logits
    got, expected = choose(logits), Logits(logits)
    assert got.values is logits
    assert not got.drawn
    assert got.best.tolist() == logits.float().cpu().numpy().argmax(-1).tolist()
    torch.testing.assert_close(got.confidence, expected.confidence, atol=1e-7, rtol=1e-5)
    assert torch.equal(got.finite, expected.finite)
    alone = [choose(logits[row : row + 1]) for row in range(rows)]
    assert torch.equal(torch.cat([each.confidence for each in alone]), got.confidence)


@settings(max_examples=15)
@given(
    vocab=vocabularies,
    dtype=st.sampled_from(DTYPES),
    seeds=st.lists(st.none() | st.integers(-(2**70), 2**70), min_size=1, max_size=8),
    position=st.integers(0, 100_000),
    temperature=st.floats(0.01, 50),
)
def test_a_row_draws_what_the_noise_says(
    vocab: int, dtype: torch.dtype, seeds: list[int | None], position: int, temperature: float
) -> None:
    """Each row by its own seed, or not at all; from the sharpest distribution to one that is nearly uniform."""
    logits = some_logits(len(seeds), vocab, dtype, position)
    drawings = [None if seed is None else Drawing(seed_key(seed), temperature) for seed in seeds]
    sent = Draws.send([(drawing, position + row) for row, drawing in enumerate(drawings)], logits.device)
    assert (sent is None) == (not any(drawings))
    got = choose(logits, sent)
    assert got.drawn == any(drawings)
    for row, seed in enumerate(seeds):
        scores = logits[row].float()
        if seed is not None:
            scores = scores / temperature + gumbel_noise(seed, torch.tensor([position + row]), vocab)[0].to(DEVICE)
        assert got.best[row] == scores.argmax()
    torch.testing.assert_close(got.confidence, Logits(logits).confidence, atol=1e-7, rtol=1e-5)


def test_a_draw_is_that_of_coupled_sampling() -> None:
    logits = some_logits(4, 5000, torch.float32, 1)
    draws = Draws.send([(Drawing(seed_key(9), 4.0), 20 + row) for row in range(4)], logits.device)
    rule = Coupled(9)
    expected = [int(rule.preferences(logits[row] / 4, 20 + row).argmax()) for row in range(4)]
    assert choose(logits, draws).best.tolist() == expected
    assert expected != logits.argmax(-1).tolist()


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("place", [0, SPAN - 1, SPAN, 2 * SPAN + 6])
def test_a_row_with_a_logit_that_is_not_finite_says_so(bad: float, place: int) -> None:
    logits = some_logits(3, 2 * SPAN + 7, torch.bfloat16, 2)
    logits[1, place] = bad
    draws = Draws.send([(Drawing(1, 0.8), row) for row in range(3)], logits.device)
    for got in (choose(logits), choose(logits, draws)):
        assert got.finite.tolist() == Logits(logits).finite.tolist() == [True, False, True]
        assert 0 <= int(got.best[1]) < logits.shape[1]
    clean = choose(logits[[0, 2]])
    assert torch.equal(choose(logits).best[[0, 2]], clean.best)
    assert torch.equal(choose(logits).confidence[[0, 2]], clean.confidence)


def test_a_row_of_which_nothing_is_a_number_has_a_token_all_the_same() -> None:
    for bad in (torch.nan, -torch.inf):
        got = choose(torch.full((1, SPAN + 3), bad, device=DEVICE))
        assert got.best.tolist() == [0]
        assert got.finite.tolist() == [False]


def test_logits_of_a_wider_tensor_are_read_in_place() -> None:
    wide = some_logits(3, 300, torch.float32, 3)
    assert torch.equal(choose(wide[:, 7:250]).best, wide[:, 7:250].argmax(-1))
    with pytest.raises(AssertionError, match="side by side"):
        choose(wide.T)


def test_each_row_of_a_forward_is_drawn_as_its_sequence_says() -> None:
    device, logits = DEVICE, some_logits(3, 700, torch.float32, 4)
    state = SequenceState(KeyValueCache(1, 1, 32, 8, dtype=torch.float32, device=device))
    greedy, drawn = Rows(state, 9, 1, 9), Rows(state, 20, 2, 20, drawing=Drawing(seed_key(3), 4.0))
    forward = Forward((greedy, drawn), None, logits)
    rule = Coupled(3)
    expected = [int(rule.preferences(logits[row] / 4, 20 + row).argmax()) for row in (1, 2)]
    assert choose_for(logits, forward).best.tolist() == [int(logits[0].argmax()), *expected]
    assert expected != logits[1:].argmax(-1).tolist()
    assert not choose_for(logits[:1], Forward((greedy,), None, logits)).drawn
