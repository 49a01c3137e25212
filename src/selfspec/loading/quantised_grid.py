"""Weights of a quantised checkpoint whose values are ``(code - zero) * scale``, with a scale and a zero for a group."""

from dataclasses import dataclass

import torch

from selfspec.errors import ModelLoadError
from selfspec.runtimes.formats import GROUPS, PackedFormat
from selfspec.runtimes.packed import PackedWeights
from selfspec.runtimes.packed_codes import PackedCodes

_AT_ONCE = 1 << 22
"""Numbers that are unpacked together."""


def find_form(bits: int, groups: torch.Tensor, method: str) -> PackedFormat | None:
    """The format for weights in groups, ``None`` where a group is not a multiple of 32 inputs.

    Args:
        bits: of a code.
        groups: long ``[inputs]``, the group of each input, in any order.
        method: of quantising.
    """
    counts = torch.bincount(groups)
    unit = next((size for size in reversed(GROUPS) if not (counts % size).any()), None)
    return None if unit is None else PackedFormat(bits, unit, method)


@dataclass(frozen=True, eq=False)
class Grid:
    """Weights ``[outputs, inputs]``.

    Attributes:
        codes: the integers.
        scales: float32 ``[outputs, groups]``.
        zeros: int16 ``[outputs, groups]``, the code that stands for zero.
        groups: long ``[inputs]``, the group of each input.
    """

    codes: PackedCodes
    scales: torch.Tensor
    zeros: torch.Tensor
    groups: torch.Tensor

    def check(self, name: str) -> "Grid":
        """Refuses scales that are no numbers, which damaged files have; ``name`` is the layer's."""
        if not self.scales.isfinite().all():
            raise ModelLoadError(f"scales of {name} are no finite numbers; the checkpoint is damaged")
        return self

    def pack(self, form: PackedFormat) -> PackedWeights:
        """The same numbers as the kernels read them; inputs that share a scale are put side by side."""
        order = None
        units, codes = self.groups[:: form.unit], self.codes
        if not torch.equal(units.repeat_interleave(form.unit), self.groups):
            places = self.groups.argsort(stable=True)
            units, order = self.groups[places][:: form.unit], places.to(torch.int32)
            codes = PackedCodes(codes.data, codes.bits, codes.outputs, codes.inputs[places], codes.flipped)
        zeros = (self.zeros - (1 << (codes.bits - 1))).to(torch.int8)
        return PackedWeights.of_grid(codes, form, self.scales[:, units], zeros[:, units], order)

    def values(self, dtype: torch.dtype) -> torch.Tensor:
        """The weights in a dtype."""
        outputs, inputs = len(self.codes.outputs), len(self.groups)
        made = torch.empty(outputs, inputs, dtype=dtype)
        step = max(1, _AT_ONCE // inputs)
        for first in range(0, outputs, step):
            rows = slice(first, first + step)
            distances = self.codes.read(first, first + step) - self.zeros[rows, self.groups]
            made[rows] = distances.float() * self.scales[rows, self.groups]
        return made
