"""At which precision a copy of a model's weights is held: bits, groups, and which parts."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

from selfspec.errors import InvalidSettingError
from selfspec.runtimes.formats import GROUPS, LOW_BITS, PackedFormat

FULL_BITS = 16
"""Stands for the target's own weights, whatever their dtype."""


@dataclass(frozen=True)
class MixedPrecision:
    """Bits of the weights of each of the ``2L`` sublayers, and of the LM head; see ``Precision``."""

    sublayers: tuple[int, ...]
    head: int = FULL_BITS
    group: int = 32

    def __post_init__(self) -> None:
        """Checks the settings."""
        _check(
            [*((f"of sublayer {index}", bits) for index, bits in enumerate(self.sublayers)), ("of the head", self.head)]
        )
        _check_group(self.group)

    def by_sublayer(self, count: int) -> "MixedPrecision":
        """Itself, which has ``count`` sublayers; see ``Precision.by_sublayer``."""
        assert len(self.sublayers) == count, f"a precision of {len(self.sublayers)} sublayers for {count}"
        return self

    @property
    def is_full(self) -> bool:
        """All weights are the target's own."""
        return {*self.sublayers, self.head} == {FULL_BITS}

    def of_sublayer(self, index: int) -> PackedFormat | None:
        """The format of the weights of a sublayer; ``None`` for the target's own."""
        return self._format(self.sublayers[index])

    def of_head(self) -> PackedFormat | None:
        """The format of the weights of the LM head; ``None`` for the target's own."""
        return self._format(self.head)

    def _format(self, bits: int) -> PackedFormat | None:
        return None if bits == FULL_BITS else PackedFormat(bits, self.group)


@dataclass(frozen=True)
class Precision:
    """Precision of a copy of a model's weights.

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
        _check([("of attention", self.attention), ("of MLPs", self.mlp), ("of the head", self.head)])
        _check_group(self.group)

    @staticmethod
    def of(bits: int, group: int = 32) -> "Precision":
        """The same bits for attention, MLPs and the head."""
        return Precision(bits, bits, bits, group)

    @property
    def is_full(self) -> bool:
        """All weights are the target's own."""
        return {self.attention, self.mlp, self.head} == {FULL_BITS}

    def by_sublayer(self, count: int) -> MixedPrecision:
        """The same, written out for each of ``count`` sublayers (``2L``)."""
        return MixedPrecision((self.attention, self.mlp) * (count // 2), self.head, self.group)


AnyPrecision: TypeAlias = Precision | MixedPrecision
"""The same bits for all branches of a kind, or bits for each sublayer."""


def _check(named: Sequence[tuple[str, object]]) -> None:
    for name, bits in named:
        if isinstance(bits, bool) or bits not in (*LOW_BITS, FULL_BITS):
            raise InvalidSettingError(
                f"the weights {name} cannot have {bits!r} bits; choose {', '.join(map(str, LOW_BITS))}, or {FULL_BITS} "
                "for the model's own weights"
            )


def _check_group(group: object) -> None:
    if isinstance(group, bool) or group not in GROUPS:
        raise InvalidSettingError(f"there are no groups of {group!r} inputs; choose {', '.join(map(str, GROUPS))}")
