"""The formats of weights of few bits: our own symmetric ones, those of GGUF files, and grids of other checkpoints.

Floats of a GGUF file that are not of the model's dtype have formats, too. Weights are read in blocks of inputs, and
weight rows stand side by side in tiles; ``formats.h`` and ``codes.h`` describe both.
"""

from dataclasses import dataclass

SEEN = 64
"""Slots of a block of a text that a draft sees, or not."""

BLOCK = 32
"""Inputs of a weight row that the kernels read together; every group is a number of whole blocks."""

TILE = 16
"""Weight rows that stand side by side in memory; the last ones are filled up with zeros."""

LOW_BITS = (8, 6, 4)
"""The numbers of bits that a low-bit weight may have."""

GROUPS = (32, 64, 128)
"""How many inputs of a weight row may share a scale."""

_GGUF = {
    "Q4_0": (10, 4, 32, 18),
    "Q4_1": (11, 4, 32, 20),
    "Q5_0": (12, 5, 32, 22),
    "Q5_1": (13, 5, 32, 24),
    "Q8_0": (14, 8, 32, 34),
    "Q2_K": (15, 2, 256, 84),
    "Q3_K": (16, 3, 256, 114),
    "Q4_K": (17, 4, 256, 144),
    "Q5_K": (18, 5, 256, 176),
    "Q6_K": (19, 6, 256, 210),
    "IQ4_NL": (20, 4, 32, 18),
    "IQ4_XS": (21, 4, 256, 138),
    "F16": (34, 16, 32, 64),
    "BF16": (35, 16, 32, 64),
    "F32": (36, 32, 32, 128),
    "MXFP4": (37, 4, 32, 17),
}
"""Number, bits of a weight, inputs of a unit, and bytes of a unit of one weight row, by GGUF's name."""

GRID_BITS = (2, 3, 4, 8)
"""The numbers of bits of weights that are a scale times the distance of an integer from a zero point."""

_FIRST_GRID, _GRID_HEAD = 22, 5


@dataclass(frozen=True)
class PackedFormat:
    """How weights of few bits are held.

    Symmetric integers of ``bits`` with one bfloat16 scale a ``group`` of inputs, which those that draft have; or, with
    a name, the numbers of GGUF's format of this name, whose group is the inputs that are stored together. With another
    name, which is that of a method of quantising, a scale of 32 bits and a zero point a group.
    """

    bits: int
    group: int = 32
    name: str = ""

    @property
    def number(self) -> int:
        """The number by which the kernels know it."""
        if self.name in _GGUF:
            return _GGUF[self.name][0]
        if self.name:
            return _FIRST_GRID + 3 * GRID_BITS.index(self.bits) + GROUPS.index(self.group)
        return 1 + 3 * ((8 - self.bits) // 2) + GROUPS.index(self.group)

    @property
    def unit(self) -> int:
        """Inputs of a unit; the inputs of a product are a multiple of it."""
        return self.group

    @property
    def unit_bytes(self) -> int:
        """Bytes of a unit of ``TILE`` weight rows."""
        if self.name in _GGUF:
            return TILE * _GGUF[self.name][3]
        return TILE * (self.group * self.bits // 8 + (_GRID_HEAD if self.name else 2))

    def bytes(self, outputs: int, inputs: int) -> int:
        """Bytes of weights ``[outputs, inputs]``."""
        return -(-outputs // TILE) * (inputs // self.unit) * self.unit_bytes

    def __str__(self) -> str:
        """``Q4_K``, ``GPTQ 4 bits``, or ``4 bits``."""
        return self.name if self.name in _GGUF else f"{self.name} {self.bits} bits".lstrip()


GGUF_FORMATS = {name: PackedFormat(bits, unit, name) for name, (_, bits, unit, _) in _GGUF.items()}
"""The formats of GGUF files that run in their own numbers, by name."""

FORMATS = {
    **{f"SYMMETRIC{bits}": PackedFormat(bits, 32) for bits in LOW_BITS},
    **GGUF_FORMATS,
    **{f"GRID{bits}": PackedFormat(bits, 32, "GRID") for bits in GRID_BITS},
}
"""What the headers know too, by its name there; symmetric formats and grids of other groups follow in number."""
