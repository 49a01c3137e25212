"""The runtime ``triton``: fused blocks whose products are Triton's. The rest of a block is unchanged."""

from collections.abc import Sequence

import torch
from torch import nn
from torch.nn import functional

from selfspec.errors import UnsupportedModelError
from selfspec.gpu import DEVICES, load_kernels
from selfspec.model.sublayers import Sublayer
from selfspec.runtimes.fused import FusedBlock
from selfspec.runtimes.products import Function, LowBitProduct, Product, can_join, join

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class TritonProduct(Product):
    """Another product, multiplied by Triton's kernels up to ``launch.MOST_ROWS`` rows of a sequence.

    A row then is the same, bit for bit, whichever rows run with it.

    Raises:
        MissingPackageError: Triton is not installed.
    """

    def __init__(self, product: Product) -> None:
        super().__init__(product.shape, product.dtype, product.bias, product.linear)
        self.product, self._kernels = product, load_kernels()

    @property
    def bits(self) -> int:
        """Of a low-bit weight; see ``Product.bits``."""
        return self.product.bits

    def values(self) -> torch.Tensor:
        """The weights ``[outputs, inputs]``."""
        return self.product.values()

    def __call__(self, hidden_states: torch.Tensor, widest: int | None = None) -> torch.Tensor:
        """``[rows, inputs]`` to ``[rows, outputs]``."""
        rows = hidden_states.contiguous()
        made: torch.Tensor
        if isinstance(self.product, LowBitProduct):
            made = self._kernels.multiply_parts(rows, self.product.parts, self.bias, widest)
        elif (len(rows) if widest is None else widest) > self._kernels.MOST_ROWS:
            made = functional.linear(rows, self.product.values(), self.bias)
        else:
            made = self._kernels.multiply_dense(rows, self.product.values(), self.bias)
        return made


def with_triton(sublayers: Sequence[Sublayer], head: nn.Module) -> tuple[list[Sublayer], Function]:
    """Sublayers and LM head of a model, with Triton's products where they are fused blocks or a linear layer.

    Raises:
        MissingPackageError: Triton is not installed.
        UnsupportedModelError: Triton does not compile for the device of the weights.
    """
    check_device(next(head.parameters()).device)
    blocks: list[Sublayer] = []
    for each in sublayers:
        if isinstance(each, FusedBlock) and all(product.dtype in _DTYPES for product in each.products):
            blocks.append(each.with_products(*map(TritonProduct, each.products)))
        else:
            blocks.append(each)
    return blocks, TritonProduct(join([head])) if can_join([head]) else head


def check_device(device: torch.device) -> None:
    """Refuses a device that Triton does not compile for; the CPU is one but for the interpreter."""
    kernels = load_kernels()
    if device.type == "cpu" and not kernels.IS_INTERPRETED:
        raise UnsupportedModelError(
            "runtime 'triton' runs on an accelerator, but the model is on the CPU; move it there, use another runtime, "
            "or set TRITON_INTERPRET=1 to run it slowly in Triton's interpreter"
        )
    if device.type not in ("cpu", *DEVICES):
        raise UnsupportedModelError(f"Triton has no kernels for device '{device.type}'; use another runtime")
