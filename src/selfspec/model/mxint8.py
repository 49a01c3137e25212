"""Keys and values in 8 bits: MXINT8, a microscaling format of the Open Compute Project.

The numbers of a head are cut into blocks of 32. A block has one exponent ``e``, that of its largest number, and of each
number ``x`` the code ``round(64 x / 2^e)``, to even where it is halfway, and from -127 to 127. So a number is off by at
most a 127th of the largest of its block, and every number that a code stands for is one of float32 and bfloat16.

A row of ``n`` numbers is ``n + n / 32`` bytes: the codes, and the exponents plus 127. 0 is a block of zeros, as is one
below ``2^-120``; 255 is one of which some number is infinite or none.
"""

import torch

SHARED = 32
"""Numbers of a block."""

_LEAST, _NO_NUMBER = 7, 255
_MANTISSA = 23
_LARGEST = 127


def packed_size(numbers: int) -> int:
    """Bytes of a row of as many numbers, a multiple of ``SHARED``."""
    return numbers + numbers // SHARED


def unpacked_size(size: int) -> int:
    """Numbers of a row of as many bytes."""
    return size // (SHARED + 1) * SHARED


def pack(rows: torch.Tensor) -> torch.Tensor:
    """Rows ``[..., n]`` in 8 bits: uint8 ``[..., n + n / 32]``."""
    blocks = rows.float().reshape(*rows.shape[:-1], -1, SHARED)
    exponents = (blocks.view(torch.int32) & 0x7FFFFFFF).amax(-1) >> _MANTISSA
    exponents = exponents.where(exponents >= _LEAST, 0)
    known = ((exponents > 0) & (exponents < _NO_NUMBER))[..., None]
    codes = (blocks / _units(exponents)[..., None]).round().clamp(-_LARGEST, _LARGEST).where(known, 0.0)
    return torch.cat([codes.flatten(-2).to(torch.int8).view(torch.uint8), exponents.to(torch.uint8)], dim=-1)


def unpack(packed: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Rows ``[..., n]`` of a dtype, from what ``pack`` gave."""
    codes, exponents = packed.tensor_split([unpacked_size(packed.shape[-1])], dim=-1)
    blocks = codes.view(torch.int8).reshape(*exponents.shape, SHARED)
    return (blocks * _units(exponents.int())[..., None]).flatten(-2).to(dtype)


def are_numbers(packed: torch.Tensor) -> bool:
    """Whether all that ``pack`` was given are finite numbers."""
    return not bool((packed[..., unpacked_size(packed.shape[-1]) :] == _NO_NUMBER).any())


def _units(exponents: torch.Tensor) -> torch.Tensor:
    """What a code of 1 stands for, by the exponents plus 127, int32."""
    units = ((exponents - 6) << _MANTISSA).view(torch.float32)
    return units.where(exponents > 0, 0.0).where(exponents < _NO_NUMBER, torch.nan)
