"""Low-bit weights by operations of torch: those that the kernels of the CPU make."""

import pytest
import torch

from helpers.device import DEVICE
from helpers.kernels import needs_kernels
from selfspec.gpu import packing
from selfspec.runtimes.formats import GROUPS, LOW_BITS, PackedFormat
from selfspec.runtimes.packed import PackedWeights

pytestmark = needs_kernels


def some_weights(outputs: int, inputs: int, dtype: torch.dtype) -> torch.Tensor:
    """Random ones, with a group of zeros, one of a single value, and one whose largest value is negative."""
    weight = torch.randn(outputs, inputs, generator=torch.Generator().manual_seed(outputs)).to(dtype)
    weight[0, :128], weight[1, :128], weight[2, 5] = 0, 1, -9
    return weight


@pytest.mark.parametrize("form", [PackedFormat(bits, group) for bits in LOW_BITS for group in GROUPS], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_low_bit_weights_are_those_of_the_kernels(form: PackedFormat, dtype: torch.dtype) -> None:
    """But for a few groups, in which two scales have the same error but for its rounding."""
    weight = some_weights(40, 256, dtype)
    found, expected = packing.pack(weight.to(DEVICE), form), PackedWeights.of(weight, form)
    assert found.tiles.shape == expected.tiles.shape
    different = (found.tiles.cpu() != expected.tiles).view(len(expected.tiles), 256 // form.unit, -1).any(-1)
    assert different.float().mean() <= 0.1


def test_many_weights_are_packed_some_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    weight, form = some_weights(40, 256, torch.float32).to(DEVICE), PackedFormat(6, 32)
    whole = packing.pack(weight, form)
    monkeypatch.setattr(packing, "_AT_ONCE", 256 * 20)
    assert torch.equal(packing.pack(weight, form).tiles, whole.tiles)
    assert (whole.outputs, whole.inputs) == (40, 256)
