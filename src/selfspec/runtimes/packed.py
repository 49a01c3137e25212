"""Weights of few bits in the layout that the kernels read, and the modules that hold them.

The modules stand in the places of a model's linear layers and of its embedding. They compute by the kernels of the CPU,
or by those of Triton where they have been moved to an accelerator, so that a row gets the same bits whichever rows run
with it, and whether transformers or a native forward runs them.
"""

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import nn

from selfspec.errors import UnsupportedModelError
from selfspec.gpu import load_kernels
from selfspec.memory import empty_in_large_pages
from selfspec.runtimes.activations import activate_gated, activation_of
from selfspec.runtimes.formats import GGUF_FORMATS, TILE, PackedFormat
from selfspec.runtimes.kernels import DTYPES, load
from selfspec.runtimes.packed_codes import PackedCodes
from selfspec.runtimes.structures import Linear, Stored


@dataclass(frozen=True, eq=False)
class PackedWeights:
    """Weights ``[outputs, inputs]`` of few bits.

    Weight rows stand in tiles of ``TILE`` side by side, the last one filled up with zeros; ``formats.h`` describes a
    tile. The inputs are a multiple of the format's unit.
    """

    tiles: torch.Tensor
    """uint8 ``[tiles, bytes of a tile]``."""
    form: PackedFormat
    outputs: int
    inputs: int
    order: torch.Tensor | None = None
    """int32 ``[inputs]``: the place in a row of each input that is stored; ``None`` where it is the same."""

    @staticmethod
    def of(weight: torch.Tensor, form: PackedFormat, *, into: "PackedWeights | None" = None) -> "PackedWeights":
        """Low-bit weights of ``[outputs, inputs]``, contiguous, in a dtype that has kernels.

        The format is a symmetric one. Of some scales near the one that maps the value of largest magnitude to the
        lowest integer, a group gets that of least squared error. Values are rounded to the nearest integer. They are
        written ``into`` others where given.
        """
        outputs, inputs = weight.shape
        packed = into or PackedWeights.empty(outputs, inputs, form)
        assert (packed.outputs, packed.inputs, packed.form) == (outputs, inputs, form)
        pack = getattr(load(), f"pack_{DTYPES[weight.dtype]}")
        sizes = inputs, outputs, torch.get_num_threads()
        pack(weight.data_ptr(), form.number, packed.tiles.data_ptr(), *sizes)
        return packed

    @staticmethod
    def of_gguf(
        data: np.ndarray,
        form: PackedFormat,
        shape: tuple[int, int],
        order: np.ndarray | None = None,
        *,
        into: "PackedWeights | None" = None,
        threads: int | None = None,
    ) -> "PackedWeights":
        """The weights of a GGUF file, whose numbers stay what they are.

        ``data`` are the bytes of weight rows, ``[rows, bytes of a row]``; ``order`` (int64 ``[outputs]``) gives the
        place of each weight row in it, of which it may leave some out. They are written ``into`` others where given.
        """
        outputs, inputs = shape
        packed = into or PackedWeights.empty(outputs, inputs, form)
        assert (packed.outputs, packed.inputs, packed.form) == (outputs, inputs, form)
        places = None if order is None else np.ascontiguousarray(order, dtype=np.int64)
        assert data.dtype == np.uint8
        assert data.flags.c_contiguous
        assert len(data if places is None else places) == outputs
        assert places is None or (places.min() >= 0 and places.max() < len(data))
        addresses = data.ctypes.data, None if places is None else places.ctypes.data, packed.tiles.data_ptr()
        load().lay_out_gguf(form.number, *addresses, inputs, outputs, threads or torch.get_num_threads())
        return packed

    @staticmethod
    def of_grid(
        codes: PackedCodes,
        form: PackedFormat,
        scales: torch.Tensor,
        zeros: torch.Tensor,
        order: torch.Tensor | None = None,
    ) -> "PackedWeights":
        """The weights of a quantised checkpoint, whose numbers stay what they are: ``(code - zero) * scale``.

        ``scales`` (float32) and ``zeros`` (int8, less half of the codes) are ``[outputs, units]`` of the format. The
        inputs are given as they are stored, whose ``order`` says their places in a row.
        """
        outputs, inputs = len(codes.outputs), len(codes.inputs)
        packed = replace(PackedWeights.empty(outputs, inputs, form), order=order)
        assert scales.shape == zeros.shape == (outputs, inputs // form.unit)
        assert (scales.dtype, zeros.dtype) == (torch.float32, torch.int8)
        assert codes.data.is_contiguous()
        assert int(codes.outputs.max() + codes.inputs.max()) + codes.bits <= 8 * codes.data.nbytes
        held = codes.data, codes.outputs, codes.inputs, scales.contiguous(), zeros.contiguous()
        data, rows, columns, *grid = (tensor.data_ptr() for tensor in held)
        sizes = inputs, outputs, torch.get_num_threads()
        shape = codes.bits, codes.flipped
        load().lay_out_grid(form.number, data, rows, columns, *shape, *grid, packed.tiles.data_ptr(), *sizes)
        return packed

    @staticmethod
    def of_mxfp4(blocks: torch.Tensor, scales: torch.Tensor) -> "PackedWeights":
        """The weights of an MXFP4 checkpoint, whose numbers stay what they are.

        ``blocks`` (uint8 ``[outputs, units, 16]``) have two inputs a byte, ``scales`` (uint8 ``[outputs, units]``) the
        exponents of powers of two, with 127 added.
        """
        form, (outputs, units) = GGUF_FORMATS["MXFP4"], scales.shape
        packed = PackedWeights.empty(outputs, units * form.unit, form)
        assert blocks.shape == (outputs, units, form.unit // 2)
        held = blocks.contiguous(), scales.contiguous()
        addresses = held[0].data_ptr(), held[1].data_ptr(), packed.tiles.data_ptr()
        load().lay_out_mxfp4_blocks(*addresses, packed.inputs, outputs, torch.get_num_threads())
        return packed

    @staticmethod
    def empty(outputs: int, inputs: int, form: PackedFormat) -> "PackedWeights":
        """Memory for weights, not filled."""
        tiles = -(-outputs // TILE)
        memory = empty_in_large_pages((tiles, form.bytes(outputs, inputs) // tiles), torch.uint8)
        return PackedWeights(memory, form, outputs, inputs)

    @property
    def bytes(self) -> int:
        """What the weights take."""
        return self.tiles.nbytes

    def rows(self, first: int, count: int) -> "PackedWeights":
        """Some weight rows, as views: from a multiple of ``TILE`` on, a multiple of it or as many as are left."""
        assert first % TILE == 0
        tiles = slice(first // TILE, -(-(first + count) // TILE))
        return PackedWeights(self.tiles[tiles], self.form, min(count, self.outputs - first), self.inputs, self.order)

    def unpack(self, rows: torch.Tensor | None = None) -> torch.Tensor:
        """The values of some weight rows (long ``[n]``; all if not given), float32 ``[n, inputs]``."""
        chosen = torch.arange(self.outputs, device=self.tiles.device) if rows is None else rows
        return look_up([self], chosen, torch.float32)


def describe(parts: Sequence[PackedWeights], bias: torch.Tensor | None = None, *, short_rows: bool = False) -> Linear:
    """Weights whose outputs follow each other in the form that the kernels take; the tensors have to outlive it.

    All but the last have a multiple of ``TILE`` outputs; all have the same order of inputs. ``short_rows``: rows are
    rounded to 8 bits.
    """
    assert all(part.outputs % TILE == 0 for part in parts[:-1])
    order = parts[0].order
    stored = (Stored * len(parts))(*(Stored(part.tiles.data_ptr(), part.outputs, part.form.number) for part in parts))
    own_bias, own_order = (None if each is None else each.data_ptr() for each in (bias, order))
    return Linear(None, own_bias, stored, len(parts), short_rows, own_order)


class LowBitLinear(nn.Module):
    """A linear layer whose weights have few bits.

    Rows are multiplied as in ``packed.h``; a sum is rounded once. The tiles are a parameter, so that they count as
    weights of the model. ``dtype`` is that of inputs and outputs, and follows ``module.to(dtype)``.

    Attributes:
        order: see ``PackedWeights.order``.
        short_rows: rows are rounded to 8 bits before they are multiplied, on the CPU.
    """

    _like: torch.Tensor
    order: torch.Tensor | None
    _described: tuple[object, Linear] | None = None
    """Where the tensors are, and the weights for the kernels."""

    def __init__(
        self, packed: PackedWeights, bias: torch.Tensor | None, dtype: torch.dtype, *, short_rows: bool = False
    ) -> None:
        super().__init__()
        self.tiles = nn.Parameter(packed.tiles, requires_grad=False)
        self.bias = None if bias is None else nn.Parameter(bias.detach(), requires_grad=False)
        self.register_buffer("_like", torch.empty(0, dtype=dtype), persistent=False)
        self.register_buffer("order", packed.order, persistent=False)
        self.form, self.in_features, self.out_features = packed.form, packed.inputs, packed.outputs
        self.short_rows = short_rows

    @property
    def packed(self) -> PackedWeights:
        """The weights, as they are now."""
        return PackedWeights(self.tiles.data, self.form, self.out_features, self.in_features, self.order)

    @property
    def dtype(self) -> torch.dtype:
        """Of inputs and outputs."""
        return self._like.dtype

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """``[..., inputs]`` to ``[..., outputs]``."""
        rows = hidden_states.reshape(-1, self.in_features).contiguous()
        if rows.is_cpu:
            out = multiply(rows, self._describe(), self.out_features)
        else:
            out = load_kernels().multiply_parts(rows, [self.packed], self.bias)
        return out.view(*hidden_states.shape[:-1], self.out_features)

    def _describe(self) -> Linear:
        """The weights for the kernels. To describe them takes longer than to multiply with small ones."""
        tensors = *self._parameters.values(), self._buffers["order"]  # attributes of a module take long, too
        key = *(None if each is None else each.data_ptr() for each in tensors), self.short_rows
        if self._described is None or self._described[0] != key:
            self._described = key, describe([self.packed], self.bias, short_rows=self.short_rows)
        return self._described[1]

    def __getstate__(self) -> dict[str, Any]:
        """A copy has tensors of its own."""
        return {name: value for name, value in vars(self).items() if name != "_described"}

    def outputs(self, first: int, count: int) -> "LowBitLinear":
        """Some outputs as a layer of its own, whose weights are views; see ``PackedWeights.rows``."""
        bias = None if self.bias is None else self.bias.data[first : first + count]
        return LowBitLinear(self.packed.rows(first, count), bias, self.dtype, short_rows=self.short_rows)

    def extra_repr(self) -> str:
        """What ``print(model)`` shows."""
        return f"{self.in_features}, {self.out_features}, {self.form}, group={self.form.group}"


class LowBitEmbedding(nn.Module):
    """An embedding whose table has few bits; rows that are looked up are rounded to the dtype.

    It has the table of a linear layer, the LM head or one made for it. ``dtype`` follows ``module.to(dtype)``. With a
    scale, what is looked up is multiplied by it, rounded to the dtype, as Gemma's embeddings are.
    """

    _like: torch.Tensor

    def __init__(self, linear: LowBitLinear, dtype: torch.dtype, *, scale: float | None = None) -> None:
        super().__init__()
        if scale is not None:
            self.embed_scale = scale
        self.tiles = linear.tiles
        self.register_buffer("_like", torch.empty(0, dtype=dtype), persistent=False)
        self.form, self.embedding_dim, self.num_embeddings = linear.form, linear.in_features, linear.out_features

    @property
    def packed(self) -> PackedWeights:
        """The table, as it is now."""
        return PackedWeights(self.tiles.data, self.form, self.num_embeddings, self.embedding_dim)

    def forward(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Long ``[...]`` to ``[..., hidden]``."""
        rows = look_up([self.packed], token_ids.reshape(-1), self._like.dtype)
        if (scale := getattr(self, "embed_scale", None)) is not None:
            rows *= torch.tensor(scale, dtype=rows.dtype)
        return rows.view(*token_ids.shape, self.embedding_dim)


class LowBitExperts(nn.Module):
    """The experts of a mixture whose weights have few bits.

    Gate and up of all experts are one layer, and so are their down projections: ``outputs`` of one follow those of
    the one before. The rest is that of transformers' ``experts``.
    """

    def __init__(self, experts: Any, gate_up: LowBitLinear, down: LowBitLinear) -> None:
        super().__init__()
        self.gate_up_proj, self.down_proj = gate_up, down
        self.act_fn, self.num_experts = activation_of(experts), int(experts.num_experts)

    def forward(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        """``[rows, hidden]`` in and out, of the experts (long ``[rows, k]``) and their weights of each row."""
        found = hidden_states.new_zeros(*top_k_index.shape, hidden_states.shape[-1])
        gates, downs = (each.out_features // self.num_experts for each in (self.gate_up_proj, self.down_proj))
        for expert in sorted(set(top_k_index.flatten().tolist())):
            rows, places = torch.where(top_k_index == expert)
            entered = self.gate_up_proj.outputs(expert * gates, gates)(hidden_states[rows])
            activated = activate_gated(self.act_fn, entered)
            found[rows, places] = self.down_proj.outputs(expert * downs, downs)(activated)
        return (found * top_k_weights[..., None]).sum(1, dtype=torch.float32).to(hidden_states.dtype)


ACTIVATIONS = ("auto", "exact", "int8")
"""How rows are multiplied with weights of few bits: with all bits that their dtype has, or rounded to 8 bits."""


def set_activations(model: nn.Module, activations: str) -> None:
    """Makes linear layers of few bits round rows to 8 bits (``int8``), in blocks of 32 that share a scale.

    ``auto`` makes those with a file's own integers do it in bfloat16, on the CPU.
    """
    layers = [module for module in model.modules() if isinstance(module, LowBitLinear)]
    if activations == "int8" and any(not layer.tiles.is_cpu for layer in layers):
        raise UnsupportedModelError("activations int8 have kernels on the CPU only; choose device cpu, or exact")
    if activations == "int8" and not layers:
        raise UnsupportedModelError(
            "activations int8 need weights of few bits, which this model does not have; load a quantised checkpoint or "
            "GGUF file, or choose weights int8 or int4"
        )
    for layer in layers:
        is_file = (
            bool(layer.form.name) and layer.form.bits <= 8 and layer.dtype == torch.bfloat16 and layer.tiles.is_cpu
        )
        layer.short_rows = activations == "int8" or (activations == "auto" and is_file)


def parameter_count(model: nn.Module) -> int:
    """Number of parameters; each low-bit weight counts as one, and a shared one once."""
    counts = {id(parameter): parameter.numel() for parameter in model.parameters()}
    for module in model.modules():
        if isinstance(module, (LowBitLinear, LowBitEmbedding)):
            counts[id(module.tiles)] = module.packed.inputs * module.packed.outputs
    return sum(counts.values())


def look_up(parts: Sequence[PackedWeights], rows: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The values of weight rows (long ``[n]``) of weights whose outputs follow each other, rounded to a dtype.

    On an accelerator there is one part.
    """
    if not parts[0].tiles.is_cpu:
        (table,) = parts
        values: torch.Tensor = load_kernels().look_up(table, rows, dtype)
        return values
    inputs, outputs = parts[0].inputs, sum(part.outputs for part in parts)
    out = torch.empty(len(rows), inputs, dtype=dtype)
    if len(rows) == 0:
        return out
    lowest, highest = torch.aminmax(rows)
    if lowest < 0 or highest >= outputs:
        raise IndexError(f"rows {int(lowest)} to {int(highest)} of a table with {outputs} rows")
    call, linear, contiguous = getattr(load(), f"unpack_{DTYPES[dtype]}"), describe(parts), rows.contiguous()
    sizes = len(rows), inputs, torch.get_num_threads() if len(rows) > TILE else 1
    call(ctypes.byref(linear), contiguous.data_ptr(), out.data_ptr(), *sizes)
    return out


def multiply(rows: torch.Tensor, linear: Linear, outputs: int) -> torch.Tensor:
    """The product of contiguous rows ``[rows, inputs]`` and weights that are described, ``[rows, outputs]``."""
    assert rows.is_contiguous()
    out = rows.new_empty(len(rows), outputs)
    call, sizes = getattr(load(), f"product_{DTYPES[rows.dtype]}"), (len(rows), rows.shape[1], outputs)
    call(ctypes.byref(linear), rows.data_ptr(), out.data_ptr(), *sizes, torch.get_num_threads())
    return out
