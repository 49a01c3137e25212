"""Low-bit copies of a model's own weights, which drafts run from.

A copy is symmetric integers of 8, 6 or 4 bits with one scale for a group of inputs. Norms, rope, attention, activations
and the cache are the target's. Nothing is trained and no data is used.
"""

import threading
from collections.abc import Iterable, Sequence

from selfspec.errors import OutOfMemoryError, UnsupportedModelError
from selfspec.memory import available_bytes
from selfspec.model.decoder import Decoder
from selfspec.model.sublayers import Sublayer
from selfspec.runtimes.branches import describe
from selfspec.runtimes.copy_store import CopyStore
from selfspec.runtimes.fused import FusedAttention, FusedMLP
from selfspec.runtimes.packed import PackedWeights, packed_bytes
from selfspec.runtimes.precision import AnyPrecision, MixedPrecision, PackedFormat, Precision
from selfspec.runtimes.products import CompiledProduct, Function, LowBitProduct, Product
from selfspec.runtimes.runner import Runner

HEAD = -1
"""The index of the LM head among the parts of a model; the others are those of its sublayers."""


class LowBitCopies:
    """The low-bit copies of one prepared model. Each is made at first use and kept; several precisions share them.

    Args:
        decoder: the model.
        runner: at full precision.
        store: where copies are kept for later processes, if they are.
    """

    def __init__(self, decoder: Decoder, runner: Runner, store: CopyStore | None = None) -> None:
        self.decoder, self.runner = decoder, runner
        self._make = PackedWeights.of if store is None else store.get
        self._lock = threading.Lock()
        self._copies: dict[tuple[int, PackedFormat], tuple[Product, ...]] = {}
        self._runners: dict[AnyPrecision, Runner] = {}

    def check(self, precision: AnyPrecision) -> None:
        """Refuses a precision that this model cannot have. Nothing is made.

        Raises:
            UnsupportedModelError: there are no low-bit kernels for this model, or its sizes do not divide.
        """
        self._checked(precision)

    def bytes(self, precision: AnyPrecision) -> int:
        """What all copies of a precision take, in bytes, whether they have been made or not; see ``check``."""
        return sum(self._bytes(*part) for part in self._parts(self._checked(precision)))

    def at(self, precision: AnyPrecision) -> Runner:
        """The model at a precision. The copies that it lacks are made.

        Raises:
            UnsupportedModelError: the model cannot have it.
            OutOfMemoryError: the copies do not fit into the memory that is available; nothing has been allocated.
        """
        if (made := self._runners.get(precision)) is not None:  # asked for by every draft step
            return made
        with self._lock:
            written = self._written_out(precision)
            if written not in self._runners:
                parts = self._parts(self._checked(precision))
                missing = [part for part in parts if part not in self._copies]
                self._check_memory(missing)
                for index, form in missing:
                    self._copies[index, form] = tuple(self._copy(each, form) for each in self._products(index))
                self._runners[written] = self._runner(written)
            self._runners[precision] = self._runners[written]
            return self._runners[precision]

    def release(self, precision: AnyPrecision | None) -> None:
        """Drops all copies but those of one precision, if any. Runners that are in use keep theirs."""
        with self._lock:
            written = None if precision is None else self._written_out(precision)
            parts = [] if written is None else self._parts(written)
            self._copies = {part: copies for part, copies in self._copies.items() if part in parts}
            self._runners = {of: runner for of, runner in self._runners.items() if self._written_out(of) == written}

    def _runner(self, precision: MixedPrecision) -> Runner:
        """The model, whose copies have been made."""
        forms = [precision.of_sublayer(index) for index in range(len(precision.sublayers))]
        blocks = [self._block(index, form) for index, form in enumerate(forms)]
        form = precision.of_head()
        head: Function = self.runner.head
        if form is not None and self._lowers(HEAD, form):
            (head,) = self._copies[HEAD, form]
        return self.runner.with_products(blocks, head)

    def _block(self, index: int, form: PackedFormat | None) -> Sublayer:
        block = self.runner.sublayers[index]
        if form is None or not self._lowers(index, form):
            return block
        assert isinstance(block, (FusedAttention, FusedMLP))
        first, last = self._copies[index, form]
        return block.with_products(first, last)

    def _copy(self, product: Product, form: PackedFormat) -> Product:
        """A product of a copy of the weights of another."""
        packed = self._make(product.values(), form)
        return CompiledProduct(LowBitProduct(packed, product.dtype, product.bias))

    def _written_out(self, precision: AnyPrecision) -> MixedPrecision:
        count = len(self.runner.sublayers)
        return precision.by_sublayer(count) if isinstance(precision, Precision) else precision

    def _checked(self, precision: AnyPrecision) -> MixedPrecision:
        written, count = self._written_out(precision), len(self.runner.sublayers)
        if len(written.sublayers) != count:
            raise UnsupportedModelError(
                f"this model has {count} sublayers, but {len(written.sublayers)} have bits; give one number for each"
            )
        if not written.is_full:
            self._check_products()
            self._check_lowers(written)
        for index, form in self._parts(written):
            self._check_sizes(index, form)
        return written

    def _check_lowers(self, precision: MixedPrecision) -> None:
        if not self._parts(precision):
            parts = range(HEAD, len(self.runner.sublayers))
            own = sorted({product.bits for index in parts for product in self._products(index)})
            raise UnsupportedModelError(
                f"the weights of this model have {' or '.join(map(str, own))} bits themselves, and no copy would have "
                "fewer; choose fewer bits, or load the model with more"
            )

    def _check_products(self) -> None:
        """Refuses a model that does not run natively from its embedding to its logits."""
        name, device = self.decoder.family.name, self.decoder.like.device.type
        if device not in ("cpu", "meta"):  # on ``meta`` only shapes are checked
            raise UnsupportedModelError(f"low-bit copies run on the CPU and on CUDA, not on '{device}'; use 16 bits")
        if self.runner.native is None:
            raise UnsupportedModelError(
                "low-bit weights need the kernels of the CPU, which this runtime does not use or this machine cannot "
                "build; use runtime 'auto' with a C++ compiler, or 16 bits"
            )
        branches = [describe(block) for block in self.runner.sublayers]
        if None in branches:
            raise UnsupportedModelError(
                f"sublayer {branches.index(None)} of this {name} model has no native form, which low-bit weights need "
                f"(its dtype is {str(self.decoder.like.dtype).removeprefix('torch.')}; float32 and bfloat16 have "
                "kernels); use 16 bits"
            )
        if not isinstance(self.runner.head, CompiledProduct):
            raise UnsupportedModelError(
                f"the LM head of this {name} model is no ordinary linear layer, which low-bit weights need; use 16 bits"
            )

    def _check_sizes(self, index: int, form: PackedFormat) -> None:
        for product in self._products(index):
            inputs = product.shape[1]
            if inputs % form.group:
                part = "the LM head" if index == HEAD else f"sublayer {index}"
                raise UnsupportedModelError(
                    f"the {inputs} inputs of a product of {part} do not divide into groups of {form.group}; "
                    "choose smaller groups or 16 bits"
                )

    def _check_memory(self, missing: Iterable[tuple[int, PackedFormat]]) -> None:
        needed, available = sum(self._bytes(*part) for part in missing), self._available_bytes()
        if available is not None and needed > available:
            raise OutOfMemoryError(
                f"low-bit copies of the weights take {needed:,} bytes, but {available:,} are available; "
                "choose fewer bits, or 16 for the model's own weights"
            )

    def _available_bytes(self) -> int | None:
        return available_bytes()

    def _parts(self, precision: MixedPrecision) -> list[tuple[int, PackedFormat]]:
        """The parts that are copied, each with its format."""
        forms = [(index, precision.of_sublayer(index)) for index in range(len(precision.sublayers))]
        forms.append((HEAD, precision.of_head()))
        return [(index, form) for index, form in forms if form is not None and self._lowers(index, form)]

    def _lowers(self, index: int, form: PackedFormat) -> bool:
        """Whether a format has fewer bits than the weights of the model itself, which may be low-bit ones."""
        return all(product.bits == 0 or form.bits < product.bits for product in self._products(index))

    def _products(self, index: int) -> Sequence[Product]:
        part = self.runner.head if index == HEAD else self.runner.sublayers[index]
        if isinstance(part, Product):
            return (part,)
        assert isinstance(part, (FusedAttention, FusedMLP))
        return part.products

    def _bytes(self, index: int, form: PackedFormat) -> int:
        return sum(packed_bytes(product.shape, form) for product in self._products(index))
