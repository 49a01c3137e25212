"""Gated short convolutions (LFM2, LFM3), over the rows of a forward together."""

import torch

from selfspec.model.forward import Rows
from selfspec.model.splitting import LayerPart
from selfspec.runtimes.recurrent import Convolution, Form, RecurrentBranch


class ShortConvolution(RecurrentBranch):
    """A gated short convolution. The state after a row is what the next one's convolution reads beside itself.

    Args:
        part: the same by transformers' modules.
        norm: the name of the norm in the layer.
        module: the name of the module.
    """

    def __init__(self, part: LayerPart, norm: str, module: str) -> None:
        super().__init__(part, norm, module)
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


FORMS: dict[str, Form] = dict.fromkeys(
    ("Lfm2ShortConv", "Lfm2MoeShortConv", "Lfm3ShortConv"), (("operator_norm", "conv"), ShortConvolution)
)
"""By the class of the module."""
