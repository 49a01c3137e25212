"""What a quantised checkpoint stores for a linear layer, and what its layouts have in common."""

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import TypeAlias

import torch

from selfspec.errors import ModelLoadError, UnsupportedModelError
from selfspec.loading.quantised_grid import Grid
from selfspec.model.safetensors_files import SafetensorsFiles
from selfspec.runtimes.formats import PackedFormat

WORD = 32
"""Bits of a word that codes are packed in."""

FLOATS = ("F16", "BF16", "F32")
"""The dtypes of scales, by their names in safetensors."""


@dataclass(frozen=True, eq=False)
class StoredLinear:
    """The weights of a linear layer in a checkpoint.

    Attributes:
        names: the tensors that hold them.
        form: the format in which they keep their numbers; ``None`` where they fit none.
        grid: reads them as a grid; ``None`` where they are none.
        values: reads them in a dtype.
    """

    names: tuple[str, ...]
    form: PackedFormat | None
    grid: Callable[[], Grid] | None
    values: Callable[[torch.dtype], torch.Tensor]


Finder: TypeAlias = Callable[[SafetensorsFiles, str, tuple[int, int]], StoredLinear | None]


def stored_grid(names: tuple[str, ...], form: PackedFormat | None, grid: Callable[[], Grid]) -> StoredLinear:
    """The weights that a function reads as a grid."""
    return StoredLinear(names, form, grid, lambda dtype: grid().values(dtype))


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
    """The number of bits at which so many codes take so many words."""
    found = next((bits for bits in choices if words_of(count, bits) == words), None)
    if found is None:
        raise UnsupportedModelError(
            f"{name} has {words} words for {count} weights, which are not those of {', '.join(map(str, choices))} bits "
            "a weight; take another checkpoint"
        )
    return found


def words_of(codes: int, bits: int) -> int:
    """How many words so many codes take."""
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
