"""Whether a number that a user gives is one, and in its range. Imports nothing that is slow."""

import math

from selfspec.errors import InvalidParameterError, SelfSpecError


def check_number(
    name: str,
    value: object,
    least: float = -math.inf,
    most: float = math.inf,
    *,
    whole: bool = False,
    above: bool = False,
    error: type[SelfSpecError] = InvalidParameterError,
) -> None:
    """Refuses what is no finite number, or no whole one where it has to be, or out of range.

    Args:
        name: what the error calls it.
        value: what was given.
        least: the smallest value allowed; with ``above``, the largest one that is not.
        most: the largest value allowed.
        whole: whether it has to be a whole number.
        above: see ``least``.
        error: the class of the error.
    """
    if isinstance(value, bool) or not isinstance(value, int if whole else (int, float)) or _is_beyond(value, whole):
        raise error(f"{name} must be a {'whole' if whole else 'finite'} number, not {repr(value)[:40]}")
    if value < least or value > most or (above and value == least):
        low = f"{'above' if above else 'at least'} {least:g}"
        raise error(f"{name} must be {low}{'' if math.isinf(most) else f' and at most {most:g}'}, not {value}")


def _is_beyond(value: float, whole: bool) -> bool:
    try:
        return not whole and not math.isfinite(value)
    except OverflowError:  # a whole number beyond all floats
        return True
