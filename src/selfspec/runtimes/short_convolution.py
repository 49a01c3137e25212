"""Gated short convolutions (LFM2, LFM3), over the rows of a forward together."""

import torch

from selfspec.model.forward import Rows
from selfspec.model.splitting import LayerPart
from selfspec.model.sublayers import Sublayer
from selfspec.runtimes.recurrent import RecurrentBranch, holds_only

_CLASSES = ("Lfm2ShortConv", "Lfm2MoeShortConv", "Lfm3ShortConv")
_NAMES = "operator_norm", "conv"


class ShortConvolution(RecurrentBranch):
    """A gated short convolution. The state after a row is what the next one's convolution reads beside itself.

    Args:
        part: the same by transformers' modules.
    """

    def __init__(self, part: LayerPart) -> None:
        super().__init__(part, *_NAMES)
        self._weight = self.module.conv.weight.detach()[:, 0].float().T.contiguous()
        self._bias = None if self.module.conv.bias is None else self.module.conv.bias.detach().float()

    def enter(self, normed: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """What is convolved, and its gate."""
        before, after, values = self.module.in_proj(normed).chunk(3, -1)
        return before * values, after

    def follow(self, rows: Rows, *entered: torch.Tensor) -> torch.Tensor:
        """See ``RecurrentBranch``; entries are added one by one, so that a row does not depend on the others."""
        values, gate = entered
        taps, states = len(self._weight), rows.sequence.cache.states
        before = states.get(self.index, rows.start - 1)
        window = torch.cat([values.new_zeros(taps - 1, values.shape[1]) if before is None else before, values])
        found = window[: rows.count].float() * self._weight[0]
        for tap in range(1, taps):
            found += window[tap : tap + rows.count].float() * self._weight[tap]
        if self._bias is not None:
            found += self._bias
        for row in range(rows.count - 1 if rows.settled else 0, rows.count):
            seen = window[row + 1 : row + taps].clone()  # a view would hold the window of a whole prompt
            states.put(self.index, rows.start + row, seen)
        gated: torch.Tensor = gate * found.to(gate.dtype)
        return gated


def compile_short_convolution(sublayer: Sublayer) -> Sublayer:
    """The form of a gated short convolution that runs rows together; any other sublayer as it is."""
    module = getattr(sublayer.layer, _NAMES[1], None)
    if type(module).__name__ not in _CLASSES or not holds_only(sublayer, *_NAMES):
        return sublayer
    assert isinstance(sublayer, LayerPart)
    return ShortConvolution(sublayer)
