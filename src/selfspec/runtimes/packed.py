"""A low-bit copy of the weights of one product."""

import ctypes

import torch

from selfspec.runtimes.kernels import DTYPES, load
from selfspec.runtimes.precision import PackedFormat
from selfspec.runtimes.products import Product
from selfspec.runtimes.structures import Linear


class PackedWeights:
    """A low-bit copy of the weights of one product: symmetric integers and bfloat16 scales.

    Of seven scales near the one that maps the value of largest magnitude to the lowest integer, a group gets that of
    least squared error. Values are rounded to the nearest integer.

    Args:
        product: the product; its weights are on the CPU, in a dtype that has kernels.
        form: the format; the product's inputs are a multiple of its groups.

    Attributes:
        linear: the form that the kernels take. The copy and the product have to outlive it.
    """

    def __init__(self, product: Product, form: PackedFormat) -> None:
        outputs, inputs = product.weight.shape
        self._held = torch.empty(packed_bytes(product, form), dtype=torch.uint8)
        weights, bias = self._held.data_ptr(), product.bias
        scales = weights + form.weight_bytes(outputs, inputs)
        bias_address = None if bias is None else bias.data_ptr()
        self.linear = Linear(weights, bias_address, scales, form.bits, form.group, form.offset)
        pack = getattr(load(), f"pack_{DTYPES[product.weight.dtype]}")
        pack(product.weight.data_ptr(), ctypes.byref(self.linear), inputs, outputs, torch.get_num_threads())

    @property
    def bytes(self) -> int:
        """What the copy takes."""
        return self._held.nbytes


def packed_bytes(product: Product, form: PackedFormat) -> int:
    """What a copy of the weights of a product takes, in bytes.

    Args:
        product: the product.
        form: the format.
    """
    outputs, inputs = product.weight.shape
    return form.weight_bytes(outputs, inputs) + form.scale_bytes(outputs, inputs)
