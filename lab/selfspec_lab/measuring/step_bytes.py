"""The bytes that one forward reads."""

from collections.abc import Iterable
from typing import Any

from torch import nn

from selfspec.model.identity import stored_bytes
from selfspec.runtimes.precision import FULL_BITS, Precision
from selfspec.runtimes.target import Target
from selfspec_lab.methods.mixed.precision import MixedPrecision


class StepBytes:
    """The bytes that a forward over a few rows reads: weights once, keys and values of the context.

    The embedding does not count, since a forward reads single rows of it. Of a mixture of experts, the experts of one
    row count.

    Attributes:
        sublayers: bytes of each sublayer's weights, norms included.
        outside: bytes of final norm and LM head, which every draft step reads too.
        total: number of sublayers.
    """

    def __init__(self, target: Target) -> None:
        model: Any = target.model
        slot = target.new_sequence(1, 1, 1).cache
        self._per_slot = [keys.nbytes + values.nbytes for keys, values in zip(slot.keys, slot.values, strict=True)]
        self._windows = [getattr(sublayer, "window", None) for sublayer in target.sublayers[::2]]
        self.sublayers = tuple(
            _nbytes(sublayer.parameters()) - sum(_unread_experts(module, target.config) for module in sublayer.modules)
            for sublayer in target.sublayers
        )
        self.outside = _nbytes(target.decoder.final_norm.parameters()) + _nbytes(
            model.get_output_embeddings().parameters()
        )
        self.total = len(self.sublayers)
        self._target = target

    def step(self, sublayers: Iterable[int], context: int, precision: Precision | None = None) -> int:
        """Bytes of one forward whose rows see ``context`` cache slots, their own included.

        Norms of low-bit sublayers are left out.
        """
        run = tuple(sublayers)
        bits = [FULL_BITS if precision is None else precision.bits_of(index) for index in range(self.total)]
        head = FULL_BITS if precision is None else precision.head
        read = self.outside if head == FULL_BITS else 0
        read += sum(self.sublayers[index] for index in run if bits[index] == FULL_BITS)
        read += sum(self._per_slot[index // 2] * self._seen(index // 2, context) for index in run if index % 2 == 0)
        if precision is None:
            return read
        low = tuple(number if index in run else FULL_BITS for index, number in enumerate(bits))
        return read + self._target.low_bit_bytes(MixedPrecision(head=head, group=precision.group, sublayers=low))

    def target_step(self, context: int) -> int:
        """Bytes of one forward of the full model: a step of plain decoding, or a verification of any width."""
        return self.step(range(self.total), context)

    @property
    def slot(self) -> int:
        """Bytes of one token's keys and values, all layers together."""
        return sum(self._per_slot)

    def _seen(self, layer: int, context: int) -> int:
        window = self._windows[layer]
        return context if window is None else min(window, context)


def _nbytes(weights: Iterable[nn.Parameter]) -> int:
    return sum(map(stored_bytes, weights))


def _unread_experts(module: nn.Module, config: Any) -> int:
    experts = getattr(module, "experts", None)
    if not isinstance(experts, nn.Module):
        return 0
    count = int(getattr(config, "num_local_experts", None) or config.num_experts)
    return _nbytes(experts.parameters()) * (count - int(config.num_experts_per_tok)) // count
