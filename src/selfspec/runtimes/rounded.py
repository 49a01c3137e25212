"""A model whose weights are rounded to few bits and multiplied in its own dtype: the reference of low-bit weights.

The rounded weights of a part are made when it runs and dropped afterwards, so that no second model is held. This is
slow, and only a trial runs it.
"""

from collections.abc import Callable, Mapping

import torch

from selfspec.errors import UnsupportedModelError
from selfspec.model.forward import Forward
from selfspec.model.sublayers import Sublayer
from selfspec.runtimes.formats import PackedFormat
from selfspec.runtimes.fused import FusedBlock
from selfspec.runtimes.low_bit import HEAD, LowBitWeights
from selfspec.runtimes.precision import Precision
from selfspec.runtimes.products import DenseProduct, Product
from selfspec.runtimes.runner import Runner

MOST_ERROR = 0.3
"""How far rounded weights may be from the own ones, by root mean squares. An outlier in a group of 4 bits gives 0.2."""


def round_weights(low_bit: LowBitWeights, precision: Precision) -> Runner:
    """The model at a precision as fused blocks of torch's operations, with rounded weights in place of low-bit ones.

    Raises:
        UnsupportedModelError: the model cannot have it, or the rounded weights are others than the own ones.
    """
    runner, forms = low_bit.runner, dict(low_bit.parts(precision))
    _check_rounding(low_bit, forms)
    blocks = [
        _RoundedBlock(low_bit, index, forms[index]) if index in forms else block
        for index, block in enumerate(runner.sublayers)
    ]
    return runner.with_products(blocks, _rounded_head(low_bit, forms[HEAD]) if HEAD in forms else runner.head)


def _check_rounding(low_bit: LowBitWeights, forms: Mapping[int, PackedFormat]) -> None:
    """Refuses rounded weights that are not near the own ones: then they were stored or read wrongly."""
    for index, form in sorted(forms.items(), key=lambda part: part[0]):  # the head first
        for rounded, own in zip(low_bit.rounded(index, form), low_bit.own(index), strict=True):
            error = float((rounded.float() - own.float()).norm() / own.float().norm().clamp(min=1e-30))
            if not error <= MOST_ERROR:
                part = "the LM head" if index == HEAD else f"sublayer {index}"
                raise UnsupportedModelError(f"the rounded weights of {part} differ by {error:.2f} from its own")


class _RoundedBlock(Sublayer):
    """A fused block with rounded weights."""

    def __init__(self, low_bit: LowBitWeights, index: int, form: PackedFormat) -> None:
        block = low_bit.runner.sublayers[index]
        assert isinstance(block, FusedBlock)
        super().__init__(block.layer)
        self._weights, self._index, self._form, self._block = low_bit, index, form, block

    @property
    def modules(self) -> list[torch.nn.Module]:
        """Those of the block."""
        return self._block.modules

    def __call__(self, hidden_states: torch.Tensor, forward: Forward) -> torch.Tensor:
        """See ``Sublayer``."""
        weights = self._weights.rounded(self._index, self._form)
        products = tuple(map(_dense, weights, self._block.products))
        return self._block.replaced(products=products)(hidden_states, forward)


def _rounded_head(low_bit: LowBitWeights, form: PackedFormat) -> Callable[[torch.Tensor], torch.Tensor]:
    def head(hidden_states: torch.Tensor) -> torch.Tensor:
        (weight,) = low_bit.rounded(HEAD, form)
        weight = weight.to(hidden_states.dtype)
        return torch.nn.functional.linear(hidden_states, weight, getattr(low_bit.decoder.head, "bias", None))

    return head


def _dense(weight: torch.Tensor, product: Product) -> DenseProduct:
    return DenseProduct(weight.to(product.dtype), product.bias)
