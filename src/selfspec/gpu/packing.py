"""Low-bit weights made where the weights are: ``PackedWeights.of`` as operations of torch, for any device."""

from collections.abc import Iterator

import torch
from torch.nn import functional

from selfspec.runtimes.formats import BLOCK, TILE, PackedFormat
from selfspec.runtimes.packed import PackedWeights
from selfspec.runtimes.scales import choose_scales, to_integers

_AT_ONCE = 1 << 24
"""Weights that are packed together: a few times as many floats are in memory meanwhile."""


def pack(weight: torch.Tensor, form: PackedFormat) -> PackedWeights:
    """Low-bit weights of ``[outputs, inputs]`` in a symmetric format on their device: ``PackedWeights.of``."""
    outputs, inputs = weight.shape
    step = max(1, _AT_ONCE // (TILE * inputs)) * TILE
    tiles = torch.cat([_pack_some(some, form) for some in weight.split(step)])
    return PackedWeights(tiles, form, outputs, inputs)


def _pack_some(weight: torch.Tensor, form: PackedFormat) -> torch.Tensor:
    """The tiles of some weight rows, uint8 ``[tiles, bytes of a tile]``."""
    units = weight.shape[1] // form.unit
    padded = functional.pad(weight.float(), (0, 0, 0, -len(weight) % TILE))
    groups = padded.view(-1, TILE, units, form.unit)
    offset = 1 << (form.bits - 1)
    scales = choose_scales(groups, offset)
    codes = (to_integers(groups, scales, offset) + offset).to(torch.uint8)
    # Blocks of 32 inputs: two halves, of four words with the codes of four inputs, for each of 16 rows.
    words = codes.view(-1, TILE, units, form.unit // BLOCK, 2, 4, 4).permute(0, 2, 3, 4, 5, 1, 6)
    planes = [plane.flatten(3) for plane in _planes(words, form.bits)]
    head = scales.bfloat16().transpose(1, 2).contiguous().view(torch.uint8)
    return torch.cat([head, torch.cat(planes, -1).flatten(2)], -1).flatten(1)


def _planes(words: torch.Tensor, bits: int) -> Iterator[torch.Tensor]:
    """The bytes of codes ``[tiles, units, blocks, half, word, row, byte]``, as ``codes.h`` puts their bits apart."""
    if bits == 8:
        yield words
        return
    yield (words[:, :, :, 0] & 15) | (words[:, :, :, 1] & 15) << 4
    if bits == 6:
        high = words >> 4
        yield high[..., 0, :, :] | high[..., 1, :, :] << 2 | high[..., 2, :, :] << 4 | high[..., 3, :, :] << 6
