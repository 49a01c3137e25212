"""Bits for each sublayer."""

from dataclasses import dataclass

from selfspec.errors import UnsupportedModelError
from selfspec.runtimes.precision import FULL_BITS, Precision, check_bits


@dataclass(frozen=True)
class MixedPrecision(Precision):
    """Bits of the weights of each of the ``2L`` sublayers, in place of those of attention and of MLPs."""

    sublayers: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        """Checks the settings."""
        super().__post_init__()
        check_bits([(f"of sublayer {index}", bits) for index, bits in enumerate(self.sublayers)])

    @property
    def is_full(self) -> bool:
        """All weights are the target's own."""
        return {*self.sublayers, self.head} == {FULL_BITS}

    def bits_of(self, sublayer: int) -> int:
        """See ``Precision``."""
        if sublayer >= len(self.sublayers):
            raise UnsupportedModelError(
                f"{len(self.sublayers)} sublayers have bits, but this model has more; give one number for each"
            )
        return self.sublayers[sublayer]
