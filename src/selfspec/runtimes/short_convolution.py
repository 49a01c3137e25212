"""Gated short convolutions (LFM2, LFM3), over the rows of a forward together."""

import torch

from selfspec.model.forward import Rows
from selfspec.model.splitting import LayerPart
from selfspec.model.sublayers import Sublayer
from selfspec.runtimes.recurrent import Convolution, RecurrentBranch, find_names

_CLASSES = ("Lfm2ShortConv", "Lfm2MoeShortConv", "Lfm3ShortConv")
_NAMES = "operator_norm", "conv"


class ShortConvolution(RecurrentBranch):
    """A gated short convolution. The state after a row is what the next one's convolution reads beside itself.

    Args:
        part: the same by transformers' modules.
    """

    def __init__(self, part: LayerPart) -> None:
        super().__init__(part, *_NAMES)
        self._convolution = Convolution(self.module.conv)

    def enter(self, normed: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """What is convolved, and its gate."""
        before, after, values = self.module.in_proj(normed).chunk(3, -1)
        return before * values, after

    def follow(self, rows: Rows, *entered: torch.Tensor) -> torch.Tensor:
        """See ``RecurrentBranch``."""
        values, gate = entered
        states = rows.sequence.cache.states
        window = self._convolution.window(values, states.get(self.index, rows.start - 1))
        for row in range(rows.count - 1 if rows.settled else 0, rows.count):
            states.put(self.index, rows.start + row, self._convolution.seen(window, row))
        gated: torch.Tensor = gate * self._convolution.run(window).to(gate.dtype)
        return gated


def compile_short_convolution(sublayer: Sublayer) -> Sublayer:
    """The form of a gated short convolution that runs rows together; any other sublayer as it is."""
    if find_names(sublayer, dict.fromkeys(_CLASSES, _NAMES)) is None:
        return sublayer
    assert isinstance(sublayer, LayerPart)
    return ShortConvolution(sublayer)
