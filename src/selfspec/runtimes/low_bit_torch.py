"""Low-bit copies that torch's own weight-only products multiply: on CUDA, and on the CPU in the fused runtime.

At 4 bits a copy has the integers and scales that the kernels of the CPU would have, up to equally good scales. torch's
product of 8 bits has one scale for a whole weight row, so groups do not count there. Only drafts run from these copies:
in torch's products the last bits of a row depend on the other rows, which does not matter to a draft. The CUDA forms
have not been run or measured on a device; the tests run the CPU's forms of the same products.
"""

from collections.abc import Sequence

import torch
from torch.nn import functional

from selfspec.errors import UnsupportedModelError
from selfspec.runtimes.fused import FusedAttention, FusedMLP
from selfspec.runtimes.low_bit import HEAD, LowBitCopies
from selfspec.runtimes.precision import PackedFormat
from selfspec.runtimes.products import Product, can_join, join
from selfspec.runtimes.structures import Linear

_ROWS = 16
"""Weight rows are filled up to a multiple of this with zeros."""

_BITS = (8, 4)
"""What torch has products of."""

_CPU_TILES, _CUDA_TILES = 2, 8
"""Tiles of 16 inputs that torch's layout of 4 bits puts together."""

_CUDA_INPUTS = 16 * _CUDA_TILES
"""Inputs of a product of 4 bits on CUDA are a multiple of this."""

_STEPS = (0, -3, -2, -1, 1, 2, 3)
"""Which scales are tried, in steps of 0.3 of an integer; see ``packed.h``."""


class TorchLowBitProduct(Product):
    """A product of a low-bit copy of another's weights (4 bits in groups, or 8), by torch's own operators."""

    def __init__(self, product: Product, form: PackedFormat) -> None:
        super().__init__(product.shape, product.dtype, product.bias, Linear())
        weight = product.values().to(self.dtype)
        self._form, self._is_cuda = form, weight.is_cuda
        integers, scales = round_to_integers(weight, form.bits, _group(form, self.shape))
        if form.bits == 8:
            self._integers, self._scales = integers.to(torch.int8), scales[:, 0].to(self.dtype)
        else:
            self._integers, self._scales = self._pack(integers, scales.to(self.dtype))

    @property
    def bits(self) -> int:
        """Of a weight."""
        return self._form.bits

    @property
    def bytes(self) -> int:
        """What the copy takes."""
        return self._integers.nbytes + self._scales.nbytes

    def values(self) -> torch.Tensor:
        """The weights ``[outputs, inputs]``: what single ones among zeros give, made anew."""
        ones = torch.eye(self.shape[1], dtype=self.dtype, device=self._scales.device)
        return self._multiply(ones).T.contiguous()

    def __call__(self, hidden_states: torch.Tensor, widest: int | None = None) -> torch.Tensor:
        """``[rows, inputs]`` to ``[rows, outputs]``."""
        products = self._multiply(hidden_states.contiguous())
        return products if self.bias is None else products + self.bias

    def _multiply(self, rows: torch.Tensor) -> torch.Tensor:
        ops = torch.ops.aten
        if self._form.bits == 8:
            products: torch.Tensor = ops._weight_int8pack_mm(rows, self._integers, self._scales)
            return products
        multiply = ops._weight_int4pack_mm if self._is_cuda else ops._weight_int4pack_mm_for_cpu
        products = multiply(rows, self._integers, self._form.group, self._scales)
        return products[:, : self.shape[0]]

    def _pack(self, integers: torch.Tensor, scales: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Integers from -8 to 7 in torch's layout; pairs of a scale and a zero point, ``[groups, outputs, 2]``."""
        missing = -len(integers) % _ROWS
        filled = functional.pad(integers + 8, (0, 0, 0, missing))
        pairs = torch.stack([scales, torch.zeros_like(scales)], dim=-1).transpose(0, 1)
        pairs = functional.pad(pairs, (0, 0, 0, missing)).contiguous()
        if not self._is_cuda:
            return torch.ops.aten._convert_weight_to_int4pack_for_cpu(filled.int(), _CPU_TILES), pairs
        joined = (filled[:, ::2] << 4 | filled[:, 1::2]).to(torch.uint8)
        return torch.ops.aten._convert_weight_to_int4pack(joined, _CUDA_TILES), pairs


def round_to_integers(weight: torch.Tensor, bits: int, group: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Symmetric integers, int32 ``[outputs, inputs]``, and scales, bfloat16 ``[outputs, groups]``, of weights.

    Of several scales a group has that of least squared error; see ``packed.h``.
    """
    values = weight.float().view(len(weight), -1, group)
    lowest = -(1 << (bits - 1))
    greatest, least = values.amax(2), values.amin(2)
    largest = torch.where(greatest > -least, greatest, least)
    best, best_error = torch.zeros_like(largest), torch.full_like(largest, torch.inf)
    for step in _STEPS:
        scale = (largest / (lowest + 0.3 * step)).bfloat16().float()
        error = (_integers(values, scale, lowest) * scale[..., None] - values).square().sum(2)
        best, best_error = torch.where(error < best_error, scale, best), torch.minimum(error, best_error)
    return _integers(values, best, lowest).flatten(1).int(), best.bfloat16()


def _integers(values: torch.Tensor, scales: torch.Tensor, lowest: int) -> torch.Tensor:
    inverse = torch.where(scales == 0, 0.0, 1 / scales)
    return (values * inverse[..., None]).round().clamp(lowest, -lowest - 1)


class TorchLowBitCopies(LowBitCopies):
    """Low-bit copies that torch multiplies, of a model whose sublayers are fused blocks; see ``LowBitCopies``."""

    def _copy(self, product: Product, form: PackedFormat) -> TorchLowBitProduct:
        return TorchLowBitProduct(product, form)

    def _products(self, index: int) -> Sequence[Product]:
        return (join([self.decoder.head]),) if index == HEAD else super()._products(index)

    def _bytes(self, index: int, form: PackedFormat) -> int:
        return sum(torch_bytes(product, form) for product in self._products(index))

    def _available_bytes(self) -> int | None:
        like = self.decoder.like
        return int(torch.cuda.mem_get_info(like.device)[0]) if like.is_cuda else super()._available_bytes()

    def _check_products(self) -> None:
        """Refuses a model that has a part without a fused block, or a dtype that the products do not take."""
        name, like = self.decoder.family.name, self.decoder.like
        fused = [isinstance(block, (FusedAttention, FusedMLP)) for block in self.runner.sublayers]
        if not all(fused) or not can_join([self.decoder.head]):
            part = "the LM head" if all(fused) else f"sublayer {fused.index(False)}"
            raise UnsupportedModelError(f"{part} of this {name} model has no fused form, which low-bit weights need")
        if like.is_cuda and like.dtype != torch.bfloat16:
            raise UnsupportedModelError("low-bit weights on CUDA need a model in bfloat16; load it with dtype bfloat16")

    def _check_sizes(self, index: int, form: PackedFormat) -> None:
        if form.bits not in _BITS:
            raise UnsupportedModelError(
                f"torch has no product of {form.bits} bits; choose 8 or 4 bits, or the kernels of the CPU"
            )
        super()._check_sizes(index, form)
        inputs = max(product.shape[1] % _CUDA_INPUTS for product in self._products(index))
        if inputs and form.bits == 4 and self.decoder.like.is_cuda:
            raise UnsupportedModelError(
                f"products of 4 bits on CUDA need a multiple of {_CUDA_INPUTS} inputs, which a product of "
                f"{'the LM head' if index == HEAD else f'sublayer {index}'} does not have; choose 8 bits"
            )


def torch_bytes(product: Product, form: PackedFormat) -> int:
    """What a copy of the weights of a product takes, in bytes."""
    outputs, inputs = product.shape
    if form.bits == 8:
        return outputs * (inputs + product.dtype.itemsize)
    rows = -(-outputs // _ROWS) * _ROWS
    return rows * (inputs // 2 + 2 * (inputs // form.group) * product.dtype.itemsize)


def _group(form: PackedFormat, shape: tuple[int, int]) -> int:
    """Inputs that share a scale: with 8 bits all of a weight row."""
    return form.group if form.bits == 4 else shape[1]
