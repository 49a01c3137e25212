"""The least seconds of a forward on a device: a prediction from bytes and operations, not a measurement.

A kernel takes at least as long as its bytes take from memory, and as its operations take at the device's peak. The
seconds of a forward are the sum of the larger of the two over its products and attentions. Launches, norms, rope and
the activations themselves are left out; so is the time between kernels. A model divided over several devices by layers
takes as long as on one of them, since they wait for each other.
"""

from collections.abc import Iterator
from typing import NamedTuple

from selfspec.errors import InvalidParameterError
from selfspec_lab.roofline.devices import Device
from selfspec_lab.roofline.shapes import ModelShape

STORED_BITS = {16: 16.0, 8: 8.5, 4: 4.5}
"""Bits of memory of a weight by its bits: those of fewer bits share a scale of 16 bits among 32."""


class Work(NamedTuple):
    """What a kernel reads and computes.

    Attributes:
        name: of the kernel.
        bytes: read from memory.
        operations: multiplications and additions.
    """

    name: str
    bytes: float
    operations: float

    def seconds(self, device: Device) -> float:
        """The least time that it takes."""
        return max(self.bytes / device.bytes_per_second, self.operations / device.operations_per_second)


def step_seconds(
    shape: ModelShape,
    device: Device,
    rows: int = 1,
    bits: int = 16,
    context: int = 0,
    *,
    attentions: float = 1.0,
    mlps: float = 1.0,
) -> float:
    """The least seconds of one forward of a model, its LM head included.

    Args:
        shape: the sizes of the model.
        device: where it runs.
        rows: rows of the forward: 1 for a step, more for a verification.
        bits: of a weight: 16, 8 or 4.
        context: slots of the cache that every row sees; keys and values have 16 bits.
        attentions: the share of the attention sublayers that run, of those of a draft that skips some.
        mlps: the same share of the MLP sublayers.

    Raises:
        InvalidParameterError: for other bits, fewer than one row, a negative context, or shares outside of 0 to 1.
    """
    return sum(
        work.seconds(device) for work in forward_work(shape, rows, bits, context, attentions=attentions, mlps=mlps)
    )


def forward_work(
    shape: ModelShape, rows: int = 1, bits: int = 16, context: int = 0, *, attentions: float = 1.0, mlps: float = 1.0
) -> Iterator[Work]:
    """The kernels of one forward, those of all layers together; arguments and errors as of ``step_seconds``."""
    if bits not in STORED_BITS or rows < 1 or context < 0 or not (0 <= attentions <= 1 and 0 <= mlps <= 1):
        raise InvalidParameterError(
            f"a forward needs bits of {', '.join(map(str, STORED_BITS))}, a row or more, a context and shares of 0 "
            f"to 1, not {bits} bits, {rows} rows, a context of {context}, {attentions} attentions and {mlps} MLPs"
        )
    names = ("qkv", "output", "gate_up", "down")
    layers = (attentions * shape.layers, attentions * shape.layers, mlps * shape.layers, mlps * shape.layers)
    for name, count, (outputs, inputs) in zip(names, layers, shape.products, strict=True):
        yield product_work(name, outputs, inputs, rows, bits, count)
    yield attention_work(shape, rows, context, attentions * shape.layers)
    yield product_work("head", shape.vocab, shape.hidden, rows, bits)


def product_work(name: str, outputs: int, inputs: int, rows: int, bits: int, count: float = 1) -> Work:
    """``count`` products of some rows by weights ``[outputs, inputs]``."""
    weights = count * outputs * inputs
    return Work(name, weights * STORED_BITS[bits] / 8, 2 * rows * weights)


def attention_work(shape: ModelShape, rows: int, context: int, count: float) -> Work:
    """The attention of ``count`` layers, whose rows see ``context`` slots each."""
    numbers = 2 * count * context * shape.key_heads * shape.head_dim
    return Work("attention", 2 * numbers, 2 * rows * numbers * (shape.heads / shape.key_heads))
