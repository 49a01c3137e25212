"""Low-bit copies that torch's own weight-only products multiply: on CUDA, and on the CPU in the fused runtime.

At 4 bits a copy has the integers and scales that the kernels of the CPU would have, up to equally good scales. torch's
product of 8 bits has one scale for a whole weight row, so groups do not count there. Only drafts run from these copies:
in torch's products the last bits of a row depend on the other rows, which does not matter to a draft. The CUDA forms
have not been run or measured on a device; the tests run the CPU's forms of the same products.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping

import torch
from torch.nn import functional

from selfspec.errors import UnsupportedModelError
from selfspec.model.forward import Forward
from selfspec.model.sublayers import Sublayer
from selfspec.runtimes.fused import Function, FusedAttention, FusedMLP
from selfspec.runtimes.logits import Logits
from selfspec.runtimes.low_bit import HEAD, LowBitCopies, LowBitModel
from selfspec.runtimes.native import NativeForward
from selfspec.runtimes.precision import MixedPrecision, PackedFormat
from selfspec.runtimes.products import Product, can_join, join
from selfspec.runtimes.stack import Kept, StackOutput, run_one_by_one
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
    """A product of a low-bit copy of weights, by torch's own operators.

    Args:
        product: the product whose weights are copied.
        form: 4 bits in groups, or 8.
    """

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

    def __call__(self, hidden_states: torch.Tensor) -> torch.Tensor:
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
    """Symmetric integers and scales of weights, of several scales those of least squared error; see ``packed.h``.

    Args:
        weight: ``[outputs, inputs]``.
        bits: of an integer.
        group: inputs that share a scale.

    Returns:
        Integers, int32 ``[outputs, inputs]``, and scales, bfloat16 ``[outputs, groups]``.
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


class TorchLowBitModel(LowBitModel):
    """A model whose fused blocks multiply low-bit copies of their weights. Made by ``Target.at``.

    Args:
        copies: the copies, which have been made.
        precision: of this model.
    """

    def __init__(self, copies: "TorchLowBitCopies", precision: MixedPrecision) -> None:
        forms = (precision.of_sublayer(index) for index in range(len(precision.sublayers)))
        self._blocks = [copies.block(index, form) for index, form in enumerate(forms)]
        self._norm, self._decoder = copies.prepared.norm, copies.decoder
        self._low_bit_head = copies.head_product(precision.of_head())

    @property
    def native(self) -> NativeForward | None:
        """None: torch runs forwards block by block."""
        return None

    def run(
        self,
        hidden_states: torch.Tensor,
        sublayers: Iterable[int],
        forward: Forward,
        capture: Collection[int] = (),
        copies: Mapping[int, torch.Tensor] | None = None,
        *,
        logits: bool = False,
        confidence: bool = False,
    ) -> StackOutput:
        """Runs sublayers over the rows of a forward; see ``Target.run``."""
        kept = Kept(capture, copies or {})
        output = run_one_by_one(self._blocks, None, hidden_states, tuple(sublayers), forward, kept)
        if logits:
            output.logits = Logits(self.logits(output.hidden_states))
        return output

    def logits(self, hidden_states: torch.Tensor, widest: int | None = None) -> torch.Tensor:
        """Final norm and LM head, ``[rows, vocab]``; see ``Target.logits``."""
        return self._decoder.scale_logits(self._low_bit_head(self._norm(hidden_states)))


class TorchLowBitCopies(LowBitCopies):
    """Low-bit copies that torch multiplies, of a model whose sublayers are fused blocks; see ``LowBitCopies``."""

    def block(self, index: int, form: PackedFormat | None) -> Sublayer:
        """A sublayer with its copies, which have been made; as it is without a format.

        Args:
            index: of the sublayer.
            form: of its weights; ``None`` for the target's own.
        """
        block = self.prepared.sublayers[index]
        assert isinstance(block, (FusedAttention, FusedMLP))
        return (
            block if form is None or not self._lowers(index, form) else block.with_products(*self._packed[index, form])
        )

    def head_product(self, form: PackedFormat | None) -> Function:
        """The LM head with its copy, which has been made; as it is without a format.

        Args:
            form: of its weights; ``None`` for the target's own.
        """
        head: Function = self.prepared.head
        return head if form is None or not self._lowers(HEAD, form) else self._packed[HEAD, form][0]

    def _model(self, precision: MixedPrecision) -> TorchLowBitModel:
        return TorchLowBitModel(self, precision)

    def _pack(self, index: int, form: PackedFormat) -> Iterator[TorchLowBitProduct]:
        for product in self._products(index):
            yield TorchLowBitProduct(product, form)

    def _products(self, index: int) -> tuple[Product, ...]:
        if index == HEAD:
            return (join([self.decoder.head]),)
        block = self.prepared.sublayers[index]
        assert isinstance(block, (FusedAttention, FusedMLP))
        return block.products

    def _bytes(self, index: int, form: PackedFormat) -> int:
        return sum(torch_bytes(product, form) for product in self._products(index))

    def _available_bytes(self) -> int | None:
        like = self.decoder.like
        return int(torch.cuda.mem_get_info(like.device)[0]) if like.is_cuda else super()._available_bytes()

    def _check_kernels(self) -> None:
        """Refuses a model that has a part without a fused block, or a dtype that the products do not take."""
        name, like = self.decoder.family.name, self.decoder.like
        fused = [isinstance(block, (FusedAttention, FusedMLP)) for block in self.prepared.sublayers]
        if not all(fused) or not can_join([self.decoder.head]):
            part = "the LM head" if all(fused) else f"sublayer {fused.index(False)}"
            raise UnsupportedModelError(f"{part} of this {name} model has no fused form, which low-bit weights need")
        if like.is_cuda and like.dtype != torch.bfloat16:
            raise UnsupportedModelError("low-bit weights on CUDA need a model in bfloat16; load it with dtype bfloat16")

    def _check_sizes(self, index: int, form: PackedFormat) -> None:
        if form.bits not in _BITS or form.offset:
            kind = f"{form.bits} bits" if form.bits not in _BITS else "groups with an offset"
            raise UnsupportedModelError(
                f"torch has no product of {kind}; choose 8 or 4 bits without an offset, or the kernels of the CPU"
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
