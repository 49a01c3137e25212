"""Integers of few bits as the checkpoints of other packages pack them, in words or bytes."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True, eq=False)
class PackedCodes:
    """Integers of weights as a checkpoint packs them.

    Attributes:
        data: their bytes, contiguous.
        bits: of a code, at most 8.
        outputs: int64 ``[outputs]``, in bits.
        inputs: int64 ``[inputs]``, in bits. The place of a code in the data is the sum for its output and its input.
        flipped: the bits of a code that are flipped: the highest where integers have a sign.
    """

    data: torch.Tensor
    bits: int
    outputs: torch.Tensor
    inputs: torch.Tensor
    flipped: int = 0

    def read(self, first: int = 0, last: int | None = None) -> torch.Tensor:
        """The codes of some outputs, int16 ``[some outputs, inputs]``."""
        places = self.outputs[first:last, None] + self.inputs
        data, byte, shift = self.data.view(torch.uint8).view(-1), places >> 3, (places & 7).to(torch.int16)
        codes = data[byte].to(torch.int16) >> shift
        if 8 % self.bits:  # some are in two bytes
            codes |= data[(byte + 1).clamp(max=len(data) - 1)].to(torch.int16) << (8 - shift)
        return (codes & ((1 << self.bits) - 1)) ^ self.flipped
