"""Low-bit weights of one linear layer, in the layout that the kernels read."""

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from selfspec.runtimes.kernels import DTYPES, load
from selfspec.runtimes.precision import BLOCK, TILE, PackedFormat
from selfspec.runtimes.structures import Linear


@dataclass(frozen=True, eq=False)
class PackedWeights:
    """Weights ``[outputs, inputs]`` as symmetric integers and bfloat16 scales, on the CPU.

    Weight rows stand in tiles of ``TILE`` side by side; ``packed.h`` describes a tile.

    Attributes:
        codes: the integers, uint8 ``[tiles, bytes of a tile]``.
        scales: uint8 ``[tiles, bytes of the scales of a tile]``.
        form: the format.
        outputs: weight rows; the last tile is filled up with zeros.
        inputs: a multiple of the format's groups.
    """

    codes: torch.Tensor
    scales: torch.Tensor
    form: PackedFormat
    outputs: int
    inputs: int

    @staticmethod
    def of(weight: torch.Tensor, form: PackedFormat) -> "PackedWeights":
        """Low-bit copies of weights.

        Of seven scales near the one that maps the value of largest magnitude to the lowest integer, a group gets that
        of least squared error. Values are rounded to the nearest integer.

        Args:
            weight: ``[outputs, inputs]``, contiguous, on the CPU, in a dtype that has kernels.
            form: the format; the inputs are a multiple of its groups.
        """
        outputs, inputs = weight.shape
        packed = PackedWeights.empty(outputs, inputs, form)
        pack = getattr(load(), f"pack_{DTYPES[weight.dtype]}")
        linear = packed.describe()
        pack(weight.data_ptr(), ctypes.byref(linear), inputs, outputs, torch.get_num_threads())
        return packed

    @staticmethod
    def empty(outputs: int, inputs: int, form: PackedFormat) -> "PackedWeights":
        """Memory for weights, not filled.

        Args:
            outputs: weight rows.
            inputs: of each; a multiple of the format's groups.
            form: the format.
        """
        tiles = -(-outputs // TILE)
        sizes = form.weight_bytes(outputs, inputs), form.scale_bytes(outputs, inputs)
        codes, scales = (torch.empty((tiles, size // tiles), dtype=torch.uint8) for size in sizes)
        return PackedWeights(codes, scales, form, outputs, inputs)

    @property
    def bytes(self) -> int:
        """What the weights take."""
        return self.codes.nbytes + self.scales.nbytes

    def describe(self, bias: torch.Tensor | None = None) -> Linear:
        """The form that the kernels take. The tensors have to outlive it.

        Args:
            bias: ``[outputs]``, in the dtype of the rows.
        """
        form, bias_address = self.form, None if bias is None else bias.data_ptr()
        return Linear(self.codes.data_ptr(), bias_address, self.scales.data_ptr(), form.bits, form.group, form.offset)

    def rows(self, first: int, count: int) -> "PackedWeights":
        """Some weight rows, as views.

        Args:
            first: a multiple of ``TILE``.
            count: a multiple of ``TILE``, or as many as are left.
        """
        assert first % TILE == 0
        tiles = slice(first // TILE, -(-(first + count) // TILE))
        outputs = min(count, self.outputs - first)
        return PackedWeights(self.codes[tiles], self.scales[tiles], self.form, outputs, self.inputs)

    def unpack(self, rows: torch.Tensor | None = None) -> torch.Tensor:
        """The values of weight rows: integers times scales.

        Args:
            rows: which, long ``[n]``; all of them if not given.

        Returns:
            float32 ``[n, inputs]``.
        """
        rows = torch.arange(self.outputs) if rows is None else rows
        tiles, lanes = rows // TILE, rows % TILE
        form, blocks = self.form, self.codes.shape[1] * 8 // (TILE * BLOCK * self.form.bits)
        integers = _integers(self.codes[tiles].view(len(rows), blocks, -1), lanes, form.bits)
        scales = self.scales[tiles].view(torch.bfloat16).view(len(rows), -1, TILE)[torch.arange(len(rows)), :, lanes]
        lacking = -form.offset % form.group  # inputs that the first group has fewer than the others
        groups = (torch.arange(blocks) + lacking // BLOCK) // (form.group // BLOCK)
        values = integers.float() * scales.float()[:, groups, None]
        lead = lacking % BLOCK
        return values.flatten(1)[:, lead : lead + self.inputs]


def packed_bytes(shape: Sequence[int], form: PackedFormat) -> int:
    """What low-bit weights take, in bytes.

    Args:
        shape: outputs and inputs.
        form: the format.
    """
    outputs, inputs = shape
    return form.weight_bytes(outputs, inputs) + form.scale_bytes(outputs, inputs)


def _integers(codes: torch.Tensor, lanes: torch.Tensor, bits: int) -> torch.Tensor:
    """The signed integers of weight rows.

    Args:
        codes: uint8 ``[n, blocks, bytes of a block of a tile]``, the tile of each row.
        lanes: long ``[n]``, its index in the tile.
        bits: of an integer.

    Returns:
        ``[n, blocks, BLOCK]``.
    """
    if bits == 8:
        each, (count, blocks, _) = torch.arange(len(codes)), codes.shape
        pairs = codes.view(torch.int8).view(count, blocks, BLOCK // 2, TILE, 2)
        return pairs[each, :, :, lanes].flatten(2)
    low_bytes = TILE * BLOCK // 2
    integers = _fields(codes[..., :low_bytes], lanes, 4)
    if bits == 6:
        integers = integers | _fields(codes[..., low_bytes:], lanes, 2) << 4
    return integers - (1 << (bits - 1))


def _fields(codes: torch.Tensor, lanes: torch.Tensor, bits: int) -> torch.Tensor:
    """The fields of words of 16 bits, one after the other for each input of a pair; see ``_integers``."""
    each, (count, blocks, _) = torch.arange(len(codes)), codes.shape
    words = codes.contiguous().view(torch.int16).view(count, blocks, -1, TILE, 2)[each, :, :, lanes]
    shifts = torch.arange(0, 16, bits, dtype=torch.int16)[:, None]
    return (words[:, :, :, None] >> shifts & ((1 << bits) - 1)).flatten(2)
