"""Low-bit weights that Triton multiplies, in the integers and scales of the kernels of the CPU."""

from selfspec.gpu.packing import pack
from selfspec.gpu.runtime import TritonProduct
from selfspec.runtimes.formats import PackedFormat
from selfspec.runtimes.low_bit import LowBitWeights
from selfspec.runtimes.products import LowBitProduct, Product


class TritonLowBitWeights(LowBitWeights):
    """Low-bit weights for the runtime ``triton``; see ``LowBitWeights``.

    They are made on the device, where the weights are.
    """

    def _convert(self, product: Product, form: PackedFormat) -> Product:
        return TritonProduct(LowBitProduct([pack(product.values(), form)], product.dtype, product.bias))

    def _check_products(self) -> None:
        """Refuses a model that has a part without a fused block."""
        self._check_fused(head=isinstance(self.runner.head, TritonProduct))
