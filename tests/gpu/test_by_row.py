"""Norms, rope and activations as Triton's kernels: what torch's operations give, and rows that are alone."""

import pytest
import torch
from torch import nn
from torch.nn import functional

from helpers.device import DEVICE, IS_INTERPRETED
from selfspec.runtimes import fused
from selfspec.runtimes.activations import activate_gated

pytest.importorskip("triton", reason="the extra triton is not installed")
from selfspec.gpu import by_row

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class Weighted(nn.Module):
    """A norm module as ``RowNorm`` reads it."""

    def __init__(self, size: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(rows_of((size,), dtype, 7), requires_grad=False)
        self.eps = 1e-5


def rows_of(shape: tuple[int, ...], dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


def assert_rounded(found: torch.Tensor, expected: torch.Tensor, units: int = 1) -> None:
    """They differ by some units of the last place at most."""
    epsilon = torch.finfo(found.dtype).eps
    torch.testing.assert_close(found, expected, rtol=units * epsilon, atol=units * epsilon)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("options", [{}, {"rounds": True}, {"added": 1.0}], ids=["once", "rounds", "added"])
@pytest.mark.parametrize("size", [16, 80])
def test_norms(dtype: torch.dtype, options: dict[str, float], size: int) -> None:
    norm = fused.RmsNorm(Weighted(size, dtype), **options)
    kernel, rows = by_row.norm_of(norm), rows_of((3, size), dtype)
    assert isinstance(kernel, by_row.KernelNorm)
    found = kernel(rows)
    assert_rounded(found, norm(rows), 4 if options.get("rounds") else 2)
    assert torch.equal(kernel(rows[1:2])[0], found[1])


def test_norms_of_heads_between_others() -> None:
    norm = fused.RmsNorm(Weighted(32, torch.float32), rounds=True)
    heads = rows_of((3, 5, 32), torch.float32).narrow(1, 1, 2)
    assert_rounded(by_row.norm_of(norm)(heads), norm(heads), 4)


def test_other_norms_stay_as_they_are() -> None:
    layer = fused.LayerNorm(nn.LayerNorm(16).to(DEVICE))
    module = nn.RMSNorm(16)
    assert by_row.norm_of(layer) is layer
    assert by_row.norm_of(module) is module
    assert by_row.norm_of(None) is None


@pytest.mark.parametrize("neighbours", [False, True])
@pytest.mark.parametrize("dim", [16, 24])
@pytest.mark.parametrize("dtypes", [(each, each) for each in DTYPES] + [(torch.bfloat16, torch.float32)])
def test_rope(neighbours: bool, dim: int, dtypes: tuple[torch.dtype, torch.dtype]) -> None:
    """In place, bit for bit, of heads that others follow, of which the last entries stay.

    The interpreter cuts bfloat16 off where a device rounds it.
    """
    own, of_turn = dtypes
    whole = rows_of((3, 4, 24), own)
    expected = whole.clone()
    turn = rows_of((3, 1, dim), of_turn, 1), rows_of((3, 1, dim), of_turn, 2)
    fused.turn_heads(expected.narrow(1, 0, 3), *turn, neighbours=neighbours)
    by_row.turn_heads(whole.narrow(1, 0, 3), *turn, neighbours=neighbours)
    if IS_INTERPRETED and own == torch.bfloat16:
        assert_rounded(whole, expected, 16)
    else:
        assert torch.equal(whole, expected)
    assert not torch.allclose(whole, rows_of((3, 4, 24), own), atol=0.1)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("inner", [24, 1500])
def test_gated_silu(dtype: torch.dtype, inner: int) -> None:
    entered = rows_of((2, 2 * inner), dtype)
    assert_rounded(activate_gated(by_row.GatedSilu(), entered), activate_gated(functional.silu, entered), 2)
