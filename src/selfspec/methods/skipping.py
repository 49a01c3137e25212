"""Which sublayers drafts skip: the default share by a model's size, an even spread, and the check of a saved set.

The papers skip 40 to 60 % of models with 7 to 70 billion parameters. Small models have less to spare, so models of up
to 0.2 billion parameters skip 0.2 of their sublayers, those from 7 billion on 0.45, and between them the share grows
with the logarithm of the number of parameters (``docs/faithfulness.md`` has the measurements).
"""

import math

from selfspec.errors import InvalidSettingError, StateError
from selfspec.runtimes.target import Target

RATIO_HELP = "none goes by the model's size: 0.2 up to 0.2 billion parameters, 0.45 from 7 billion"
"""Help of settings that default to ``default_skip_ratio``."""

ENDS_HELP = "the first and the last layer are never skipped (authors' code); false may skip them too (the paper)"
"""Help of the setting ``fixed_ends``."""

_SMALL, _LARGE = 0.2e9, 7e9
_SMALL_RATIO, _LARGE_RATIO = 0.2, 0.45


def skip_ratio_of_size(parameters: int) -> float:
    """The share to skip of a model of this many parameters, 0.2 to 0.45."""
    place = math.log(max(parameters, 1) / _SMALL) / math.log(_LARGE / _SMALL)
    return _SMALL_RATIO + min(1.0, max(0.0, place)) * (_LARGE_RATIO - _SMALL_RATIO)


def most_skipped(target: Target) -> float:
    """The largest share that a search for the best share tries: half as much again as the default, at most a half."""
    return min(0.5, 1.5 * default_skip_ratio(target, target.sublayer_count))


def default_skip_ratio(target: Target, candidates: int) -> float:
    """The share of candidates to skip in a model, by its size, but at least one of them."""
    ratio = skip_ratio_of_size(target.parameter_count)
    return max(ratio, min(1.0, 1 / candidates)) if candidates > 0 else ratio


def free_sublayers(layer_count: int, fixed_ends: bool = True) -> range:
    """The sublayers that may be skipped: those of all layers but the first and the last, or of all layers."""
    return range(2, 2 * layer_count - 2) if fixed_ends else range(2 * layer_count)


def evenly_skipped(layer_count: int, skip_ratio: float, fixed_ends: bool = True) -> tuple[int, ...]:
    """Sublayers to skip, spread evenly over the layers that may be skipped.

    As in SWIFT, ``int(2 (L - 2) r)`` sublayers are skipped; half of them attention, half MLP, each kind evenly spread.
    Without ``fixed_ends`` they are ``int(2 L r)``.
    """
    free = free_sublayers(layer_count, fixed_ends)
    skipped = int(len(free) * skip_ratio)
    attention, mlp = (_spread(count, len(free) // 2, free.start // 2) for count in ((skipped + 1) // 2, skipped // 2))
    return tuple(sorted([2 * layer for layer in attention] + [2 * layer + 1 for layer in mlp]))


def alternately_skipped(layer_count: int) -> tuple[int, ...]:
    """Both sublayers of every second layer but the first and the last: layers 1, 3, 5, … (SWIFT's code)."""
    return tuple(2 * layer + part for layer in range(1, layer_count - 1, 2) for part in (0, 1))


def _spread(count: int, layers: int, first: int) -> list[int]:
    """``count`` layers out of ``layers`` from the first on, evenly."""
    return [first + int((index + 0.5) * layers / count) for index in range(count)]


def sublayer_ratio(target: Target, skip_ratio: float | None, fixed_ends: bool = True) -> float:
    """A setting ``skip_ratio`` of the free sublayers; the default of this model for ``None``."""
    if skip_ratio is not None:
        return skip_ratio
    return default_skip_ratio(target, len(free_sublayers(target.layer_count, fixed_ends)))


def starting_set(layer_count: int, skip_ratio: float, fixed_ends: bool = True) -> tuple[int, ...]:
    """The evenly skipped sublayers; refuses a ratio that skips none."""
    skipped, free = evenly_skipped(layer_count, skip_ratio, fixed_ends), free_sublayers(layer_count, fixed_ends)
    if not skipped:
        where = "between the first and the last layer" if fixed_ends else "of the model"
        raise InvalidSettingError(
            f"skip_ratio {skip_ratio} skips none of the {len(free)} sublayers {where}; "
            + ("raise it" if free else "this model has too few layers for it, choose layerskip")
        )
    return skipped


def check_skipped(skipped: object, free: range, least: int, most: int) -> tuple[int, ...]:
    """What a state skips: ``least`` to ``most`` of the free indices, ascending; raises a ``StateError`` for others."""
    indices = skipped if isinstance(skipped, list) else [None]
    whole = all(type(index) is int and index in free for index in indices)
    if not whole or not least <= len(indices) <= most or indices != sorted(set(indices)):
        count = most if least == most else f"{least} to {most}"
        raise StateError(f"the state skips {skipped}, not {count} of the {len(free)} that it may; learn it again")
    return tuple(indices)
