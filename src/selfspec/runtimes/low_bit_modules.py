"""Modules with low-bit weights, in the places of a model's linear layers and of its embedding.

They compute by the kernels of the CPU, so that a row gets the same bits whichever rows run with it, and whether
transformers or a native forward runs them.
"""

import ctypes

import torch
from torch import nn

from selfspec.runtimes.kernels import DTYPES, load
from selfspec.runtimes.packed import PackedWeights


class LowBitLinear(nn.Module):
    """A linear layer whose weights are integers with a scale for each group of inputs.

    Rows are multiplied as in ``packed.h``; a sum is rounded once.

    Args:
        packed: the weights.
        bias: ``[outputs]``, if any.
        dtype: of inputs and outputs; it follows ``module.to(dtype)``.

    Attributes:
        codes: see ``PackedWeights``; a parameter, as are the scales, so that they count as weights of the model.
        scales: see there.
        bias: see above.
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
        form = self.form
        return f"{self.in_features}, {self.out_features}, bits={form.bits}, group={form.group}, offset={form.offset}"


class LowBitEmbedding(nn.Module):
    """An embedding whose table is integers with scales; rows that are looked up are rounded to the dtype.

    Args:
        linear: the LM head that shares the table, or one made for it.
        dtype: of what it returns; it follows ``module.to(dtype)``.
    """

    _like: torch.Tensor

    def __init__(self, linear: LowBitLinear, dtype: torch.dtype) -> None:
        super().__init__()
        self.codes, self.scales = linear.codes, linear.scales
        self.register_buffer("_like", torch.empty(0, dtype=dtype), persistent=False)
        self.form, self.embedding_dim, self.num_embeddings = linear.form, linear.in_features, linear.out_features

    def forward(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Long ``[...]`` to ``[..., hidden]``.

        Raises:
            IndexError: a token has no row.
        """
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
    """The values of weight rows, rounded to a dtype; ``PackedWeights.unpack`` in the kernels.

    Args:
        packed: the weights.
        rows: which, long ``[n]``.
        dtype: of the result; it has kernels.

    Returns:
        ``[n, inputs]``.

    Raises:
        IndexError: there is no such row.
    """
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
    """The product of rows and low-bit weights.

    Args:
        rows: ``[rows, inputs]``, contiguous, in a dtype that has kernels.
        packed: the weights.
        bias: ``[outputs]`` in the same dtype, if any.

    Returns:
        ``[rows, outputs]``.
    """
    assert rows.is_contiguous()
    out = rows.new_empty(len(rows), packed.outputs)
    call, linear = getattr(load(), f"product_{DTYPES[rows.dtype]}"), packed.describe(bias)
    sizes = len(rows), packed.inputs, packed.outputs
    call(ctypes.byref(linear), rows.data_ptr(), out.data_ptr(), *sizes, torch.get_num_threads())
    return out
