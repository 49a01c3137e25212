"""Kept sets: which sublayers of the target a draft runs."""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

from selfspec.errors import InvalidSettingError


@dataclass(frozen=True)
class KeptSet:
    """The sublayers a draft runs, of the target's ``2L``.

    Attention of layer ``i`` is sublayer ``2i``, its MLP is ``2i + 1``. The papers' "skipped layer set" is the
    complement.

    Attributes:
        sublayers: indices of the kept sublayers, ascending.
        total: number of sublayers of the target, ``2L``.
    """

    sublayers: tuple[int, ...]
    total: int

    def __post_init__(self) -> None:
        if self.total < 2 or self.total % 2:
            raise InvalidSettingError(f"a model has an even number of sublayers (two a layer), not {self.total}")
        if list(self.sublayers) != sorted(set(self.sublayers)):
            raise InvalidSettingError("kept sublayers must be ascending and without repeats")
        _check_exist(self.sublayers, self.total)

    @classmethod
    def full(cls, total: int) -> "KeptSet":
        """Every sublayer: the target itself."""
        return cls(tuple(range(total)), total)

    @classmethod
    def early_exit(cls, exit_layer: int, total: int) -> "KeptSet":
        """The first ``exit_layer`` layers, 1 to L - 1 (LayerSkip, DEL)."""
        layers = total // 2
        if not 1 <= exit_layer < layers:
            raise InvalidSettingError(
                f"exit layer {exit_layer} is out of range: this model has {layers} layers, choose 1 to {layers - 1}"
            )
        return cls(tuple(range(2 * exit_layer)), total)

    @classmethod
    def skipping(cls, skipped: Iterable[int], total: int) -> "KeptSet":
        """Every sublayer but the skipped ones."""
        left_out = set(skipped)
        _check_exist(left_out, total)
        return cls(tuple(index for index in range(total) if index not in left_out), total)

    @cached_property
    def skipped(self) -> tuple[int, ...]:
        """The complement: the sublayers the draft leaves out, ascending."""
        kept = set(self.sublayers)
        return tuple(index for index in range(self.total) if index not in kept)

    @property
    def attention_share(self) -> float:
        """Kept attention sublayers as a share of all attention sublayers, 0 to 1."""
        return sum(index % 2 == 0 for index in self.sublayers) / (self.total // 2)

    @property
    def mlp_share(self) -> float:
        """Kept MLP sublayers as a share of all MLP sublayers, 0 to 1."""
        return sum(index % 2 == 1 for index in self.sublayers) / (self.total // 2)


def _check_exist(sublayers: Iterable[int], total: int) -> None:
    outside = sorted(index for index in sublayers if not 0 <= index < total)
    if outside:
        raise InvalidSettingError(f"sublayer {outside[0]} does not exist: this model has sublayers 0 to {total - 1}")
