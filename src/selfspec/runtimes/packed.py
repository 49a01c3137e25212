"""Low-bit weights in the layout that the kernels read, and the modules that hold them.

The modules stand in the places of a model's linear layers and of its embedding. They compute by the kernels of the CPU,
so that a row gets the same bits whichever rows run with it, and whether transformers or a native forward runs them.
"""

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

from selfspec.runtimes.kernels import DTYPES, load
from selfspec.runtimes.precision import BLOCK, TILE, PackedFormat
from selfspec.runtimes.structures import Linear


@dataclass(frozen=True, eq=False)
class PackedWeights:
    """Weights ``[outputs, inputs]`` as symmetric integers and bfloat16 scales, on the CPU.

    Weight rows stand in tiles of ``TILE`` side by side, the last one filled up with zeros; ``packed.h`` describes a
    tile. The inputs are a multiple of the format's groups.
    """

    codes: torch.Tensor
    """The integers, uint8 ``[tiles, bytes of a tile]``."""
    scales: torch.Tensor
    """uint8 ``[tiles, bytes of the scales of a tile]``."""
    form: PackedFormat
    outputs: int
    inputs: int

    @staticmethod
    def of(weight: torch.Tensor, form: PackedFormat) -> "PackedWeights":
        """Low-bit copies of weights ``[outputs, inputs]``, contiguous, in a dtype that has kernels.

        Of seven scales near the one that maps the value of largest magnitude to the lowest integer, a group gets that
        of least squared error. Values are rounded to the nearest integer.
        """
        outputs, inputs = weight.shape
        packed = PackedWeights.empty(outputs, inputs, form)
        pack = getattr(load(), f"pack_{DTYPES[weight.dtype]}")
        linear = packed.describe()
        pack(weight.data_ptr(), ctypes.byref(linear), inputs, outputs, torch.get_num_threads())
        return packed

    @staticmethod
    def empty(outputs: int, inputs: int, form: PackedFormat) -> "PackedWeights":
        """Memory for weights, not filled."""
        tiles = -(-outputs // TILE)
        sizes = form.weight_bytes(outputs, inputs), form.scale_bytes(outputs, inputs)
        codes, scales = (torch.empty((tiles, size // tiles), dtype=torch.uint8) for size in sizes)
        return PackedWeights(codes, scales, form, outputs, inputs)

    @property
    def bytes(self) -> int:
        """What the weights take."""
        return self.codes.nbytes + self.scales.nbytes

    def describe(self, bias: torch.Tensor | None = None) -> Linear:
        """The form that the kernels take, with a bias ``[outputs]`` if any. The tensors have to outlive it."""
        bias_address = None if bias is None else bias.data_ptr()
        return Linear(self.codes.data_ptr(), bias_address, self.scales.data_ptr(), self.form.bits, self.form.group)

    def rows(self, first: int, count: int) -> "PackedWeights":
        """Some weight rows, as views: from a multiple of ``TILE`` on, a multiple of it or as many as are left."""
        assert first % TILE == 0
        tiles = slice(first // TILE, -(-(first + count) // TILE))
        outputs = min(count, self.outputs - first)
        return PackedWeights(self.codes[tiles], self.scales[tiles], self.form, outputs, self.inputs)

    def unpack(self, rows: torch.Tensor | None = None) -> torch.Tensor:
        """Integers times scales of some weight rows (long ``[n]``; all if not given), float32 ``[n, inputs]``."""
        rows = torch.arange(self.outputs) if rows is None else rows
        tiles, lanes = rows // TILE, rows % TILE
        form, blocks = self.form, self.inputs // BLOCK
        integers = _integers(self.codes[tiles].view(len(rows), blocks, -1), lanes, form.bits)
        scales = self.scales[tiles].view(torch.bfloat16).view(len(rows), -1, TILE)[torch.arange(len(rows)), :, lanes]
        groups = torch.arange(blocks) // (form.group // BLOCK)
        return (integers.float() * scales.float()[:, groups, None]).flatten(1)


def packed_bytes(shape: Sequence[int], form: PackedFormat) -> int:
    """What low-bit weights of a shape (outputs, inputs) take, in bytes."""
    outputs, inputs = shape
    return form.weight_bytes(outputs, inputs) + form.scale_bytes(outputs, inputs)


def _integers(codes: torch.Tensor, lanes: torch.Tensor, bits: int) -> torch.Tensor:
    """The signed integers of weight rows, ``[n, blocks, BLOCK]``.

    ``codes`` is uint8 ``[n, blocks, bytes of a block of a tile]``, the tile of each row; ``lanes`` its index there.
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


class LowBitLinear(nn.Module):
    """A linear layer whose weights are integers with a scale for each group of inputs.

    Rows are multiplied as in ``packed.h``; a sum is rounded once. Codes and scales are parameters, so that they count
    as weights of the model. ``dtype`` is that of inputs and outputs, and follows ``module.to(dtype)``.
    """

    _like: torch.Tensor

    def __init__(self, packed: PackedWeights, bias: torch.Tensor | None, dtype: torch.dtype) -> None:
        super().__init__()
        self.codes = nn.Parameter(packed.codes, requires_grad=False)
        self.scales = nn.Parameter(packed.scales, requires_grad=False)
        self.bias = None if bias is None else nn.Parameter(bias.detach(), requires_grad=False)
        self.register_buffer("_like", torch.empty(0, dtype=dtype), persistent=False)
        self.form, self.in_features, self.out_features = packed.form, packed.inputs, packed.outputs

    @property
    def packed(self) -> PackedWeights:
        """The weights, as they are now."""
        return PackedWeights(self.codes.data, self.scales.data, self.form, self.out_features, self.in_features)

    @property
    def dtype(self) -> torch.dtype:
        """Of inputs and outputs."""
        return self._like.dtype

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """``[..., inputs]`` to ``[..., outputs]``."""
        rows = hidden_states.reshape(-1, self.in_features).contiguous()
        return multiply(rows, self.packed, self.bias).view(*hidden_states.shape[:-1], self.out_features)

    def outputs(self, first: int, count: int) -> "LowBitLinear":
        """Some outputs as a layer of its own, whose weights are views; see ``PackedWeights.rows``."""
        bias = None if self.bias is None else self.bias.data[first : first + count]
        return LowBitLinear(self.packed.rows(first, count), bias, self.dtype)

    def extra_repr(self) -> str:
        """What ``print(model)`` shows."""
        return f"{self.in_features}, {self.out_features}, bits={self.form.bits}, group={self.form.group}"


class LowBitEmbedding(nn.Module):
    """An embedding whose table is integers with scales; rows that are looked up are rounded to the dtype.

    It has the table of a linear layer, the LM head or one made for it. ``dtype`` follows ``module.to(dtype)``.
    """

    _like: torch.Tensor

    def __init__(self, linear: LowBitLinear, dtype: torch.dtype) -> None:
        super().__init__()
        self.codes, self.scales = linear.codes, linear.scales
        self.register_buffer("_like", torch.empty(0, dtype=dtype), persistent=False)
        self.form, self.embedding_dim, self.num_embeddings = linear.form, linear.in_features, linear.out_features

    def forward(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Long ``[...]`` to ``[..., hidden]``."""
        table = PackedWeights(self.codes.data, self.scales.data, self.form, self.num_embeddings, self.embedding_dim)
        return look_up(table, token_ids.reshape(-1), self._like.dtype).view(*token_ids.shape, self.embedding_dim)


def parameter_count(model: nn.Module) -> int:
    """Number of parameters; each low-bit weight counts as one, and a shared one once."""
    counts = {id(parameter): parameter.numel() for parameter in model.parameters()}
    for module in model.modules():
        if isinstance(module, LowBitLinear):
            counts |= {id(module.codes): module.in_features * module.out_features, id(module.scales): 0}
        elif isinstance(module, LowBitEmbedding):
            counts |= {id(module.codes): module.embedding_dim * module.num_embeddings, id(module.scales): 0}
    return sum(counts.values())


def look_up(packed: PackedWeights, rows: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The values of weight rows (long ``[n]``), rounded to a dtype: ``PackedWeights.unpack`` in the kernels."""
    out = torch.empty(len(rows), packed.inputs, dtype=dtype)
    if len(rows) == 0:
        return out
    lowest, highest = torch.aminmax(rows)
    if lowest < 0 or highest >= packed.outputs:
        raise IndexError(f"rows {int(lowest)} to {int(highest)} of a table with {packed.outputs} rows")
    call, linear, contiguous = getattr(load(), f"unpack_{DTYPES[dtype]}"), packed.describe(), rows.contiguous()
    call(ctypes.byref(linear), contiguous.data_ptr(), out.data_ptr(), len(rows), packed.inputs)
    return out


def multiply(rows: torch.Tensor, packed: PackedWeights, bias: torch.Tensor | None) -> torch.Tensor:
    """The product of contiguous rows ``[rows, inputs]`` and low-bit weights, ``[rows, outputs]``."""
    assert rows.is_contiguous()
    out = rows.new_empty(len(rows), packed.outputs)
    call, linear = getattr(load(), f"product_{DTYPES[rows.dtype]}"), packed.describe(bias)
    sizes = len(rows), packed.inputs, packed.outputs
    call(ctypes.byref(linear), rows.data_ptr(), out.data_ptr(), *sizes, torch.get_num_threads())
    return out
