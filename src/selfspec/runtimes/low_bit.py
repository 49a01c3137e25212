"""Low-bit copies of a model's own weights, which drafts run from.

A copy is symmetric integers of 8, 6 or 4 bits with one scale for a group of inputs. Norms, rope, attention, activations
and the cache are the target's. Nothing is trained and no data is used.
"""

import threading
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any

import torch

from selfspec.errors import OutOfMemoryError, UnsupportedModelError
from selfspec.memory import available_bytes
from selfspec.model.decoder import Decoder
from selfspec.model.forward import Forward
from selfspec.runtimes.compiled import CompiledAttention, CompiledMLP, CompiledProduct
from selfspec.runtimes.copy_store import CopyStore
from selfspec.runtimes.logits import Logits
from selfspec.runtimes.native import NativeForward
from selfspec.runtimes.native_weights import NativeBranch
from selfspec.runtimes.packed import PackedWeights, packed_bytes
from selfspec.runtimes.precision import LOW_BITS, AnyPrecision, MixedPrecision, PackedFormat, Precision
from selfspec.runtimes.prepared import Prepared, head_weights
from selfspec.runtimes.products import Product
from selfspec.runtimes.stack import Kept, StackOutput, run_natively
from selfspec.runtimes.structures import Linear

__all__ = ["LOW_BITS", "LowBitCopies", "LowBitModel", "MixedPrecision", "Precision"]

HEAD = -1
"""The index of the LM head among the parts of a model; the others are those of its sublayers."""


class LowBitModel:
    """A model whose products read low-bit copies of their weights. Made by ``Target.at``.

    Args:
        copies: the copies, which have been made; the model holds those that it reads.
        precision: of this model.
    """

    def __init__(self, copies: "LowBitCopies", precision: MixedPrecision) -> None:
        self._held = copies.prepared, copies.made(precision)  # the native structures have addresses only
        branches = [copies.branch(index, precision.of_sublayer(index)) for index in range(len(precision.sublayers))]
        self._norm, self._decoder = copies.prepared.norm, copies.decoder
        self._head = copies.head(precision.of_head())
        self._native = NativeForward(
            branches, head_weights(self._norm, self._head), copies.prepared.embedding, any_rows=True
        )

    @property
    def native(self) -> NativeForward | None:
        """The native forward, which runs chains."""
        return self._native

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
        """Runs sublayers over the rows of a forward; see ``Target.run``.

        Args:
            hidden_states: ``[rows, hidden]``, the residual stream before the first of them.
            sublayers: ascending indices.
            forward: the rows.
            capture: sublayers before which to keep the residual stream.
            copies: by sublayer a tensor that receives the last rows of the stream before it.
            logits: whether final norm and LM head follow.
            confidence: compute the rows' confidences with the logits.

        Raises:
            UnsupportedModelError: the rotations of the model have another dtype than the kernels take.
        """
        indices = tuple(sublayers)
        if not self._native.takes(hidden_states, indices, forward):
            raise UnsupportedModelError(
                "low-bit weights need hidden states in the model's dtype, and rotations in it or in float32; "
                "use 16 bits"
            )
        kept, together = (
            Kept(capture, copies or {}),
            logits and self._native.has_head and not self._decoder.scales_logits,
        )
        output = run_natively(
            self._native, hidden_states, indices, forward, kept, logits=together, confidence=confidence
        )
        if logits and not together:
            output.logits = Logits(self.logits(output.hidden_states, forward.widest))
        return output

    def logits(self, hidden_states: torch.Tensor, widest: int | None = None) -> torch.Tensor:
        """Final norm and LM head; see ``Target.logits``.

        Args:
            hidden_states: ``[rows, hidden]``, the residual stream after the last sublayer.
            widest: the largest number of rows that one sequence has among them.

        Returns:
            ``[rows, vocab]``, in the model's dtype.
        """
        native = self._native
        values = (
            native.score(hidden_states).values if native.has_head else self._head(self._norm(hidden_states), widest)
        )
        return self._decoder.scale_logits(values)


class LowBitCopies:
    """The low-bit copies of one prepared model. Each is made at first use and kept; several precisions share them.

    Args:
        decoder: the model.
        prepared: its form in a runtime.
        store: where copies are kept for later processes, if they are.
    """

    def __init__(self, decoder: Decoder, prepared: Prepared, store: CopyStore | None = None) -> None:
        self.decoder, self.prepared = decoder, prepared
        self._make = PackedWeights.of if store is None else store.get
        self._lock = threading.Lock()
        self._packed: dict[tuple[int, PackedFormat], tuple[Any, ...]] = {}
        self._models: dict[MixedPrecision, LowBitModel] = {}
        self._given: dict[AnyPrecision, LowBitModel] = {}

    def check(self, precision: AnyPrecision) -> None:
        """Refuses a precision that this model cannot have. Nothing is made.

        Args:
            precision: the precision.

        Raises:
            UnsupportedModelError: there are no low-bit kernels for this model, or its sizes do not divide.
        """
        self._checked(precision)

    def bytes(self, precision: AnyPrecision) -> int:
        """What all copies of a precision take, in bytes, whether they have been made or not.

        Args:
            precision: the precision.

        Raises:
            UnsupportedModelError: the model cannot have it.
        """
        return sum(self._bytes(*part) for part in self._parts(self._checked(precision)))

    def at(self, precision: AnyPrecision) -> LowBitModel:
        """The model at a precision. The copies that it lacks are made.

        Args:
            precision: the precision.

        Raises:
            UnsupportedModelError: the model cannot have it.
            OutOfMemoryError: the copies do not fit into the memory that is available; nothing has been allocated.
        """
        if (made := self._given.get(precision)) is not None:  # asked for by every draft step
            return made
        written = self._written_out(precision)
        with self._lock:
            if written not in self._models:
                parts = self._parts(self._checked(precision))
                missing = [part for part in parts if part not in self._packed]
                self._check_memory(missing)
                for part in missing:
                    self._packed[part] = tuple(self._pack(*part))
                self._models[written] = self._model(written)
            self._given[precision] = self._models[written]
            return self._models[written]

    def release(self, precision: AnyPrecision | None) -> None:
        """Drops all copies but those of one precision.

        Args:
            precision: what to keep; ``None`` drops all. Models that are in use keep theirs until they are dropped.
        """
        with self._lock:
            written = None if precision is None else self._written_out(precision)
            parts = [] if written is None else self._parts(written)
            self._packed = {part: packed for part, packed in self._packed.items() if part in parts}
            self._models = {made: model for made, model in self._models.items() if made == written}
            self._given = {given: model for given, model in self._given.items() if given == precision}

    def made(self, precision: MixedPrecision) -> list[tuple[Any, ...]]:
        """The copies of a precision, which have been made: a model holds them as long as it is in use."""
        return [self._packed[part] for part in self._parts(precision)]

    def branch(self, index: int, form: PackedFormat | None) -> NativeBranch:
        """A sublayer in the form that a native forward takes; its copies have been made.

        Args:
            index: of the sublayer.
            form: of its weights; ``None`` for the target's own.
        """
        block = self.prepared.sublayers[index]
        assert isinstance(block, (CompiledAttention, CompiledMLP))
        assert block.native is not None
        if form is None or not self._lowers(index, form):
            return block.native
        return block.native.with_linears(*self._linears(index, form))

    def head(self, form: PackedFormat | None) -> CompiledProduct:
        """The LM head; its copy has been made.

        Args:
            form: of its weights; ``None`` for the target's own.
        """
        head = self.prepared.head
        assert isinstance(head, CompiledProduct)
        if form is None or not self._lowers(HEAD, form):
            return head
        return head.with_linear(*self._linears(HEAD, form))

    def _written_out(self, precision: AnyPrecision) -> MixedPrecision:
        count = len(self.prepared.sublayers)
        return precision.by_sublayer(count) if isinstance(precision, Precision) else precision

    def _checked(self, precision: AnyPrecision) -> MixedPrecision:
        written, count = self._written_out(precision), len(self.prepared.sublayers)
        if len(written.sublayers) != count:
            raise UnsupportedModelError(
                f"this model has {count} sublayers, but {len(written.sublayers)} have bits; give one number for each"
            )
        if not written.is_full:
            self._check_kernels()
            self._check_lowers(written)
        for index, form in self._parts(written):
            self._check_sizes(index, form)
        return written

    def _check_lowers(self, precision: MixedPrecision) -> None:
        if not self._parts(precision):
            parts = range(HEAD, len(self.prepared.sublayers))
            own = sorted({product.bits for index in parts for product in self._products(index)})
            raise UnsupportedModelError(
                f"the weights of this model have {' or '.join(map(str, own))} bits themselves, and no copy would have "
                "fewer; choose fewer bits, or load the model with more"
            )

    def _check_kernels(self) -> None:
        """Refuses a model that does not run natively from its embedding to its logits."""
        name, device = self.decoder.family.name, self.decoder.like.device.type
        if device not in ("cpu", "meta"):  # on ``meta`` only shapes are checked
            raise UnsupportedModelError(f"low-bit copies run on the CPU and on CUDA, not on '{device}'; use 16 bits")
        if self.prepared.native is None:
            raise UnsupportedModelError(
                "low-bit weights need the kernels of the CPU, which this runtime does not use or this machine cannot "
                "build; use runtime 'auto' with a C++ compiler, or 16 bits"
            )
        blocks = [getattr(block, "native", None) for block in self.prepared.sublayers]
        if None in blocks:
            raise UnsupportedModelError(
                f"sublayer {blocks.index(None)} of this {name} model has no native form, which low-bit weights need "
                f"(its dtype is {str(self.decoder.like.dtype).removeprefix('torch.')}; float32 and bfloat16 have "
                "kernels); use 16 bits"
            )
        if not isinstance(self.prepared.head, CompiledProduct):
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

    def _model(self, precision: MixedPrecision) -> LowBitModel:
        """The model, whose copies have been made."""
        return LowBitModel(self, precision)

    def _pack(self, index: int, form: PackedFormat) -> Iterator[Any]:
        """Makes the copies of a part."""
        for product in self._products(index):
            yield self._make(product.values(), form)

    def _linears(self, index: int, form: PackedFormat) -> list[Linear]:
        pairs = zip(self._packed[index, form], self._products(index), strict=True)
        return [packed.describe(product.bias) for packed, product in pairs]

    def _parts(self, precision: MixedPrecision) -> list[tuple[int, PackedFormat]]:
        """The parts that are copied, each with its format."""
        forms = [(index, precision.of_sublayer(index)) for index in range(len(precision.sublayers))]
        forms.append((HEAD, precision.of_head()))
        return [(index, form) for index, form in forms if form is not None and self._lowers(index, form)]

    def _lowers(self, index: int, form: PackedFormat) -> bool:
        """Whether a format has fewer bits than the weights of the model itself, which may be low-bit ones."""
        return all(product.bits == 0 or form.bits < product.bits for product in self._products(index))

    def _products(self, index: int) -> tuple[Product, ...]:
        part = self.prepared.head if index == HEAD else self.prepared.sublayers[index]
        if isinstance(part, CompiledProduct):
            return (part,)
        assert isinstance(part, (CompiledAttention, CompiledMLP))
        return part.products

    def _bytes(self, index: int, form: PackedFormat) -> int:
        return sum(packed_bytes(product.shape, form) for product in self._products(index))
