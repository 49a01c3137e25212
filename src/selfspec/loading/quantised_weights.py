"""What a quantised checkpoint stores for a weight, and what its layouts have in common."""

from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from typing import TypeAlias

import torch

from selfspec.errors import ModelLoadError, UnsupportedModelError
from selfspec.loading.filling import StoredWeight
from selfspec.model.safetensors_files import SafetensorsFiles
from selfspec.runtimes.formats import GROUPS, PackedFormat
from selfspec.runtimes.packed import PackedWeights
from selfspec.runtimes.packed_codes import PackedCodes

WORD = 32
"""Bits of a word that codes are packed in."""

FLOATS = ("F16", "BF16", "F32")
"""The dtypes of scales, by their names in safetensors."""

_AT_ONCE = 1 << 22
"""Numbers that are unpacked together."""


Finder: TypeAlias = Callable[[SafetensorsFiles, str, tuple[int, int]], StoredWeight | None]
"""What is stored for a linear layer, by its name and shape, after a check of shapes and dtypes; ``None`` for ordinary
numbers."""


@dataclass(frozen=True, eq=False)
class Grid:
    """Weights ``[outputs, inputs]`` that are ``(code - zero) * scale``, with a zero and a scale for a group of inputs.

    Attributes:
        codes: the integers.
        scales: float32 ``[outputs, groups]``.
        zeros: int16 ``[outputs, groups]``, the code that stands for zero.
    """

    codes: PackedCodes
    scales: torch.Tensor
    zeros: torch.Tensor


def grid_weight(
    layer: str, names: Collection[str], method: str, bits: int, groups: torch.Tensor, read: Callable[[], Grid]
) -> StoredWeight:
    """The weights of a linear layer that are a grid.

    They keep their numbers where a group is a multiple of 32 inputs.

    Args:
        layer: its name.
        names: the tensors that hold them.
        method: of quantising.
        bits: of a code.
        groups: long ``[inputs]``, the group of each input, in any order.
        read: reads the grid.
    """

    def checked() -> Grid:
        grid = read()
        if not grid.scales.isfinite().all():
            raise ModelLoadError(f"scales of {layer} are no finite numbers; the checkpoint is damaged")
        return grid

    counts = torch.bincount(groups)
    unit = next((size for size in reversed(GROUPS) if not (counts % size).any()), None)
    form = None if unit is None else PackedFormat(bits, unit, method)
    pack = None if form is None else lambda: _pack(checked(), groups, form)
    return StoredWeight(tuple(names), lambda dtype: _values(checked(), groups, dtype), form, pack)


def _pack(grid: Grid, groups: torch.Tensor, form: PackedFormat) -> PackedWeights:
    """The same numbers as the kernels read them; inputs that share a scale are put side by side."""
    order = None
    units, codes = groups[:: form.unit], grid.codes
    if not torch.equal(units.repeat_interleave(form.unit), groups):
        places = groups.argsort(stable=True)
        units, order = groups[places][:: form.unit], places.to(torch.int32)
        codes = replace(codes, inputs=codes.inputs[places])
    zeros = (grid.zeros - (1 << (codes.bits - 1))).to(torch.int8)
    return PackedWeights.of_grid(codes, form, grid.scales[:, units], zeros[:, units], order)


def _values(grid: Grid, groups: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    made = torch.empty(len(grid.codes.outputs), len(groups), dtype=dtype)
    step = max(1, _AT_ONCE // len(groups))
    for first in range(0, len(made), step):
        rows = slice(first, first + step)
        distances = grid.codes.read(first, first + step) - grid.zeros[rows, groups]
        made[rows] = distances.float() * grid.scales[rows, groups]
    return made


def steps(count: int, step: int = 1) -> torch.Tensor:
    """Places from 0 on."""
    return torch.arange(count) * step


def first_size(files: SafetensorsFiles, name: str) -> int:
    """The rows of a matrix; refuses a tensor that is none."""
    shape = files.shape(name) if name in files.names else ()
    if len(shape) != 2 or shape[0] == 0:
        raise ModelLoadError(f"the tensor {name} is missing or no matrix; download the checkpoint again")
    return shape[0]


def find_bits(name: str, words: int, count: int, choices: Collection[int]) -> int:
    """The number of bits at which ``count`` codes take ``words`` words."""
    found = next((bits for bits in choices if words_of(count, bits) == words), None)
    if found is None:
        raise UnsupportedModelError(
            f"{name} has {words} words for {count} weights, which are not those of {', '.join(map(str, choices))} bits "
            "a weight; take another checkpoint"
        )
    return found


def words_of(codes: int, bits: int) -> int:
    """The number of words that ``codes`` codes take."""
    return -(-codes * bits // WORD)


def even_groups(inputs: int, groups: int) -> torch.Tensor | None:
    """The group of each input, where as many inputs that follow each other are in each."""
    return steps(inputs) // (inputs // groups) if groups and inputs % groups == 0 else None


def whole_groups(scales: str, inputs: int, groups: int) -> torch.Tensor:
    """The same; refuses another number of groups."""
    found = even_groups(inputs, groups)
    if found is None:
        raise ModelLoadError(f"the {inputs} inputs of a layer do not divide into the {groups} groups of {scales}")
    return found
