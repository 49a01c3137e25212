"""A model's own weights at few bits, which drafts run from.

They are symmetric integers of 8, 6 or 4 bits with one scale for a group of inputs. Norms, rope, attention, activations
and the cache are the target's. Nothing is trained and no data is used.

The kernels of the CPU multiply them, or torch's own weight-only products: on CUDA, and on the CPU in the fused runtime.
At 4 bits torch has the integers and scales that the kernels would have, up to equally good scales; its product
of 8 bits has one scale for a whole weight row, so groups do not count there. In torch's products the last bits of a row
depend on the other rows, which does not matter to a draft. The tests run the CPU's forms of the same products.
"""

import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field

import torch
from torch.nn import functional

from selfspec.errors import OutOfMemoryError, UnsupportedModelError
from selfspec.limits import is_out_of_memory
from selfspec.memory import check_memory
from selfspec.model.decoder import Decoder
from selfspec.model.observed import ObservedDecoder
from selfspec.model.sublayers import Sublayer
from selfspec.runtimes.branches import describe_weights
from selfspec.runtimes.formats import TILE, PackedFormat
from selfspec.runtimes.fused import FusedBlock
from selfspec.runtimes.kernels import find
from selfspec.runtimes.mixtures import CompiledMixture
from selfspec.runtimes.packed import PackedWeights
from selfspec.runtimes.precision import Precision
from selfspec.runtimes.products import CompiledProduct, Function, LowBitProduct, Product, can_join, join
from selfspec.runtimes.runner import Runner
from selfspec.runtimes.scales import choose_scales, to_integers
from selfspec.runtimes.structures import Linear

HEAD = -1
"""The index of the LM head among the parts of a model; the others are those of its sublayers."""

_ROWS = 16
"""Weight rows are filled up to a multiple of this with zeros."""

_BITS = (8, 4)
"""What torch has products of."""

_AT_ONCE = 1 << 24
"""Weights that are rounded together: a few times as many floats are in memory meanwhile."""

_CPU_TILES, _CUDA_TILES = 2, 8
"""Tiles of 16 inputs that torch's layout of 4 bits puts together."""

_CUDA_INPUTS = 16 * _CUDA_TILES
"""Inputs of a product of 4 bits on CUDA are a multiple of this."""


@dataclass
class LowBitLimit:
    """Most bytes of low-bit weights that ``low_bit_within`` allows, and those that were made, each with its bytes."""

    most: int
    made: dict[object, int] = field(default_factory=dict)

    @property
    def bytes(self) -> int:
        """Bytes of what was made."""
        return sum(self.made.values())


_limit: ContextVar[LowBitLimit | None] = ContextVar("low_bit_within", default=None)


@contextmanager
def low_bit_within(most: int) -> Iterator[LowBitLimit]:
    """Refuses what this thread makes, for any model, beyond some bytes; ``release`` drops nothing else meanwhile."""
    token = _limit.set(limit := LowBitLimit(most))
    try:
        yield limit
    finally:
        _limit.reset(token)


class LowBitWeights:
    """The low-bit weights of one prepared model. Each is made at first use and kept; several precisions share them.

    The runner is at full precision.
    """

    def __init__(self, decoder: Decoder, runner: Runner) -> None:
        self.decoder, self.runner = decoder, runner
        self._lock = threading.Lock()
        self._made: dict[tuple[int, PackedFormat], tuple[Product, ...]] = {}
        self._runners: dict[Precision, Runner] = {}
        self._refused: dict[int, str] = {}

    def refuse(self, reasons: Mapping[int, str]) -> None:
        """Refuses precisions with these bits from now on, for these reasons."""
        self._refused.update(reasons)

    def rounded(self, index: int, form: PackedFormat) -> list[torch.Tensor]:
        """What the weights of a part are rounded to, ``[outputs, inputs]`` of each of its products."""
        made = self._made.get((index, form)) or [self._convert(each, form) for each in self._products(index)]
        return [each.values() for each in made]

    def own(self, index: int) -> list[torch.Tensor]:
        """The weights of a part that are rounded, ``[outputs, inputs]`` of each of its products."""
        return [each.values() for each in self._products(index)]

    def check(self, precision: Precision) -> None:
        """Refuses a precision for which there are no kernels, or whose groups do not divide. Nothing is made."""
        if not precision.is_full:
            self._check_products()
            self._check_lowers(precision)
        for index, form in self._parts(precision):
            if form.bits in self._refused:
                raise UnsupportedModelError(f"weights of {form.bits} bits are left out: {self._refused[form.bits]}")
            self._check_sizes(index, form)

    def parts(self, precision: Precision) -> list[tuple[int, PackedFormat]]:
        """The parts of a precision that have low-bit weights, each with its format; see ``check``."""
        self.check(precision)
        return self._parts(precision)

    def bytes(self, precision: Precision) -> int:
        """What all weights of a precision take, in bytes, whether they have been made or not; see ``check``."""
        return sum(self._bytes(*part) for part in self.parts(precision))

    def at(self, precision: Precision) -> Runner:
        """The model at a precision; see ``Target.at``. The weights that it lacks are made."""
        if (made := self._runners.get(precision)) is not None:  # asked for by every draft step
            return made
        with self._lock:
            if precision not in self._runners:
                missing = [part for part in self.parts(precision) if part not in self._made]
                self._check_memory(missing)
                self._make(missing)
                self._runners[precision] = self._runner(precision)
            return self._runners[precision]

    def release(self, precision: Precision | None) -> None:
        """Drops all weights but those of one precision, if any. Runners that are in use keep theirs."""
        with self._lock:
            kept = [] if precision is None else self._parts(precision)
            limit = _limit.get()
            gone = {part for part in self._made if part not in kept and (limit is None or (self, part) in limit.made)}
            for part in gone:
                del self._made[part]
                if limit is not None:
                    del limit.made[self, part]
            self._runners = {of: runner for of, runner in self._runners.items() if gone.isdisjoint(self._parts(of))}

    def _make(self, parts: Sequence[tuple[int, PackedFormat]]) -> None:
        """Makes the weights of some parts, or none of them where memory runs out."""
        made: dict[tuple[int, PackedFormat], tuple[Product, ...]] = {}
        try:
            for index, form in parts:
                made[index, form] = tuple(self._convert(each, form) for each in self._products(index))
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            made.clear()
            raise OutOfMemoryError(
                f"low-bit weights do not fit into the memory of '{self.decoder.like.device}'; choose "
                "fewer bits, or 16 for the model's own weights"
            ) from None
        self._made |= made
        if (limit := _limit.get()) is not None:
            limit.made |= {(self, part): self._bytes(*part) for part in made}

    def _runner(self, precision: Precision) -> Runner:
        """The model, whose low-bit weights have been made."""
        blocks = [self._block(index, precision.of_sublayer(index)) for index in range(len(self.runner.sublayers))]
        form = precision.of_head()
        head: Function = self.runner.head
        if form is not None and self._lowers(HEAD, form):
            (head,) = self._made[HEAD, form]
        return self.runner.with_products(blocks, head)

    def _block(self, index: int, form: PackedFormat | None) -> Sublayer:
        block = self.runner.sublayers[index]
        if form is None or not self._lowers(index, form):
            return block
        assert isinstance(block, FusedBlock)
        return block.replaced(products=self._made[index, form])

    def _convert(self, product: Product, form: PackedFormat) -> Product:
        """A product of the weights of another at few bits."""
        packed = PackedWeights.empty(*product.shape, form)
        first = 0
        for values in product.pieces():
            PackedWeights.of(values, form, into=packed.rows(first, len(values)))
            first += len(values)
        return CompiledProduct(LowBitProduct([packed], product.dtype, product.bias))

    def _check_lowers(self, precision: Precision) -> None:
        if not self._parts(precision):
            parts = range(HEAD, len(self.runner.sublayers))
            own = sorted({product.bits for index in parts for product in self._products(index)})
            raise UnsupportedModelError(
                f"the weights of this model have {' or '.join(map(str, own))} bits themselves, and no draft would have "
                "fewer; choose fewer bits, or load the model with more (a GGUF file with unpack)"
            )

    def _check_products(self) -> None:
        """Refuses a model that does not run natively from its embedding to its logits."""
        name, device = self.decoder.family.name, self.decoder.like.device.type
        if isinstance(self.decoder, ObservedDecoder):
            raise UnsupportedModelError(
                f"this '{name}' model runs by transformers' own modules, which have no low-bit weights; use 16 bits"
            )
        if device not in ("cpu", "meta"):  # on ``meta`` only shapes are checked
            raise UnsupportedModelError(
                f"low-bit weights of this runtime run on the CPU, not on '{device}'; use another one, or 16 bits"
            )
        if self.runner.native is None:
            raise UnsupportedModelError(
                "low-bit weights need the kernels of the CPU, which this runtime does not use or this machine cannot "
                "build; use runtime 'auto' with a C++ compiler, or 16 bits"
            )
        weights = [describe_weights(block) for block in self.runner.sublayers]
        if None in weights:
            index, dtype = weights.index(None), str(self.decoder.like.dtype).removeprefix("torch.")
            size, step = getattr(self.runner.sublayers[index], "head_dim", 0), find().constants["DIM_STEP"]
            reason = "the kernels lack something of it"
            if dtype not in ("float32", "bfloat16"):
                reason = f"its dtype is {dtype}; float32 and bfloat16 have kernels"
            elif size % step:
                reason = f"its heads have {size} numbers, which is no multiple of {step}"
            raise UnsupportedModelError(
                f"sublayer {index} of this {name} model has no native form, which low-bit weights need ({reason}); use "
                "16 bits"
            )
        if not isinstance(self.runner.head, CompiledProduct):
            raise UnsupportedModelError(
                f"the LM head of this {name} model is no ordinary linear layer, which low-bit weights need; use 16 bits"
            )

    def _check_fused(self, *, head: bool) -> None:
        """Refuses a model that has a sublayer without a fused block, or whose LM head has no fused form, either."""
        fused = [isinstance(block, FusedBlock) for block in self.runner.sublayers]
        if not all(fused) or not head:
            part, name = "the LM head" if all(fused) else f"sublayer {fused.index(False)}", self.decoder.family.name
            raise UnsupportedModelError(f"{part} of this {name} model has no fused form, which low-bit weights need")

    def _check_sizes(self, index: int, form: PackedFormat) -> None:
        for product in self._products(index):
            inputs = product.shape[1]
            if inputs % form.group:
                part = "the LM head" if index == HEAD else f"sublayer {index}"
                raise UnsupportedModelError(
                    f"the {inputs} inputs of a product of {part} do not divide into groups of {form.group}; "
                    "choose smaller groups or 16 bits"
                )
        block = None if index == HEAD else self.runner.sublayers[index]
        if isinstance(block, CompiledMixture) and any(
            product.shape[0] // block.count % TILE for product in block.products[:2]
        ):
            raise UnsupportedModelError(
                f"the outputs of an expert of sublayer {index} are no multiple of {TILE}, which low-bit weights need; "
                "use 16 bits"
            )

    def _check_memory(self, missing: Iterable[tuple[int, PackedFormat]]) -> None:
        needed, limit = sum(self._bytes(*part) for part in missing), _limit.get()
        what = f"low-bit weights take {needed:,} bytes"
        remedy = "choose fewer bits, or 16 for the model's own weights"
        if limit is not None and limit.bytes + needed > limit.most:
            left = limit.most - limit.bytes
            raise OutOfMemoryError(f"{what}, and {left:,} are left of the memory limit; raise it, or {remedy}")
        check_memory(needed, what, remedy, self.decoder.like.device)

    def _parts(self, precision: Precision) -> list[tuple[int, PackedFormat]]:
        """The parts that have low-bit weights, each with its format."""
        forms = [(index, precision.of_sublayer(index)) for index in range(len(self.runner.sublayers))]
        forms.append((HEAD, precision.of_head()))
        return [(index, form) for index, form in forms if form is not None and self._lowers(index, form)]

    def _lowers(self, index: int, form: PackedFormat) -> bool:
        """Whether a format has fewer bits than the weights of the model itself, which may be low-bit ones."""
        return all(product.bits == 0 or form.bits < product.bits for product in self._products(index))

    def _products(self, index: int) -> Sequence[Product]:
        part = self.runner.head if index == HEAD else self.runner.sublayers[index]
        if isinstance(part, Product):
            return (part,)
        assert isinstance(part, FusedBlock)
        return part.products

    def _bytes(self, index: int, form: PackedFormat) -> int:
        return sum(form.bytes(*product.shape) for product in self._products(index))


class TorchLowBitWeights(LowBitWeights):
    """Low-bit weights that torch multiplies, of a model whose sublayers are fused blocks; see ``LowBitWeights``."""

    def rounded(self, index: int, form: PackedFormat) -> list[torch.Tensor]:
        """See ``LowBitWeights``; computed without the product that multiplies them."""
        return [_rounded(each.values().to(each.dtype), form) for each in self._products(index)]

    def _convert(self, product: Product, form: PackedFormat) -> Product:
        return TorchLowBitProduct(product, form)

    def _products(self, index: int) -> Sequence[Product]:
        return (join([self.decoder.head]),) if index == HEAD else super()._products(index)

    def _bytes(self, index: int, form: PackedFormat) -> int:
        return sum(torch_bytes(product, form) for product in self._products(index))

    def _check_products(self) -> None:
        """Refuses a model that has a part without a fused block, or a dtype that the products do not take."""
        self._check_fused(head=can_join([self.decoder.head]))
        like = self.decoder.like
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


class TorchLowBitProduct(Product):
    """A product of another's weights at few bits (4 bits in groups, or 8), by torch's own operators."""

    def __init__(self, product: Product, form: PackedFormat) -> None:
        super().__init__(product.shape, product.dtype, product.bias, Linear(), form.bits)
        weight = product.values().to(self.dtype)
        self._form, self._is_cuda = form, weight.is_cuda
        integers, scales = round_to_integers(weight, form.bits, _group(form, self.shape))
        if form.bits == 8:
            self._integers, self._scales = integers.to(torch.int8), scales[:, 0].to(self.dtype)
        else:
            self._integers, self._scales = self._pack(integers, scales.to(self.dtype))

    def pieces(self) -> Iterator[torch.Tensor]:
        """The weights: what single ones among zeros give."""
        ones = torch.eye(self.shape[1], dtype=self.dtype, device=self._scales.device)
        yield self._multiply(ones).T.contiguous()

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
    """Symmetric integers, int32 ``[outputs, inputs]``, and scales, bfloat16 ``[outputs, groups]``, of weights."""
    offset, integers, scales = 1 << (bits - 1), [], []
    for some in torch.split(weight, max(1, _AT_ONCE // weight.shape[1])):
        groups = some.float().view(len(some), -1, group)
        scales.append(choose_scales(groups, offset))
        integers.append(to_integers(groups, scales[-1], offset).flatten(1).to(torch.int8))
    return torch.cat(integers).int(), torch.cat(scales).bfloat16()


def _rounded(weight: torch.Tensor, form: PackedFormat) -> torch.Tensor:
    """What low-bit weights ``[outputs, inputs]`` stand for, in their dtype."""
    group = _group(form, (len(weight), weight.shape[1]))
    integers, scales = round_to_integers(weight, form.bits, group)
    values = integers.view(len(weight), -1, group) * scales.float()[..., None]
    return values.flatten(1).to(weight.dtype)


def torch_bytes(product: Product, form: PackedFormat) -> int:
    """What the low-bit weights of a product take, in bytes."""
    outputs, inputs = product.shape
    if form.bits == 8:
        return outputs * (inputs + product.dtype.itemsize)
    rows = -(-outputs // _ROWS) * _ROWS
    return rows * (inputs // 2 + 2 * (inputs // form.group) * product.dtype.itemsize)


def _group(form: PackedFormat, shape: tuple[int, int]) -> int:
    """Inputs that share a scale: with 8 bits all of a weight row."""
    return form.group if form.bits == 4 else shape[1]
