"""At which precision low-bit weights are held: bits, groups, and which parts."""

from collections.abc import Sequence
from dataclasses import dataclass

from selfspec.errors import InvalidSettingError
from selfspec.runtimes.formats import GROUPS, LOW_BITS, PackedFormat

FULL_BITS = 16
"""Stands for the target's own weights, whatever their dtype."""


@dataclass(frozen=True)
class Precision:
    """Precision of low-bit weights.

    Attributes:
        attention: bits of the weights of all attention branches: one of ``LOW_BITS``, or 16 for the target's own
            weights.
        mlp: bits of those of all MLPs.
        head: bits of the LM head.
        group: inputs that share a scale; one of ``GROUPS``.

    Raises:
        InvalidSettingError: one of them is out of range.
    """

    attention: int = FULL_BITS
    mlp: int = FULL_BITS
    head: int = FULL_BITS
    group: int = 32

    def __post_init__(self) -> None:
        """Checks the settings."""
        check_bits([("of attention", self.attention), ("of MLPs", self.mlp), ("of the head", self.head)])
        if isinstance(self.group, bool) or self.group not in GROUPS:
            raise InvalidSettingError(
                f"there are no groups of {self.group!r} inputs; choose {', '.join(map(str, GROUPS))}"
            )

    @staticmethod
    def of(bits: int, group: int = 32) -> "Precision":
        """The same bits for attention, MLPs and the head."""
        return Precision(bits, bits, bits, group)

    @property
    def is_full(self) -> bool:
        """All weights are the target's own."""
        return {self.attention, self.mlp, self.head} == {FULL_BITS}

    def bits_of(self, sublayer: int) -> int:
        """The bits of the weights of a sublayer."""
        return (self.attention, self.mlp)[sublayer % 2]

    def of_sublayer(self, index: int) -> PackedFormat | None:
        """The format of the weights of a sublayer; ``None`` for the target's own."""
        return self._format(self.bits_of(index))

    def of_head(self) -> PackedFormat | None:
        """The format of the weights of the LM head; ``None`` for the target's own."""
        return self._format(self.head)

    def _format(self, bits: int) -> PackedFormat | None:
        return None if bits == FULL_BITS else PackedFormat(bits, self.group)


def check_bits(named: Sequence[tuple[str, object]]) -> None:
    """Refuses bits that no weights can have; each has a name. Raises ``InvalidSettingError``."""
    for name, bits in named:
        if isinstance(bits, bool) or bits not in (*LOW_BITS, FULL_BITS):
            raise InvalidSettingError(
                f"the weights {name} cannot have {bits!r} bits; choose {', '.join(map(str, LOW_BITS))}, or {FULL_BITS} "
                "for the model's own weights"
            )
