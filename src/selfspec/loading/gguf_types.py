"""The number types of GGUF tensors: ggml's names, and how many bytes a block of numbers takes."""

from typing import NamedTuple

from selfspec.runtimes.formats import GGUF_FORMATS, TILE

_NAMES = (
    "F32 F16 Q4_0 Q4_1 Q4_2 Q4_3 Q5_0 Q5_1 Q8_0 Q8_1 Q2_K Q3_K Q4_K Q5_K Q6_K Q8_K IQ2_XXS IQ2_XS IQ3_XXS IQ1_S IQ4_NL "
    "IQ3_S IQ2_S IQ4_XS I8 I16 I32 I64 F64 IQ1_M BF16 Q4_0_4_4 Q4_0_4_8 Q4_0_8_8 TQ1_0 TQ2_0 IQ4_NL_4_4 IQ4_NL_4_8 "
    "IQ4_NL_8_8 MXFP4 NVFP4 Q1_0"
)
NAMES = _NAMES.split()
"""By the number that a file has for the type; some of them ggml itself has given up."""


class BlockSize(NamedTuple):
    """Numbers that are stored together, whole ones of which make up the rows of a tensor, and the bytes they take."""

    size: int
    bytes: int


BLOCKS = {
    **{name: BlockSize(form.unit, form.unit_bytes // TILE) for name, form in GGUF_FORMATS.items()},
    "F32": BlockSize(1, 4),
    **dict.fromkeys(("F16", "BF16"), BlockSize(1, 2)),
    "Q3_K": BlockSize(256, 110),  # for the kernels these two have larger numbers in front
    "IQ4_XS": BlockSize(256, 136),
}
"""Of the types that run, by name."""
