"""Settings of a method, as ``--set`` gives them."""

from collections.abc import Sequence
from pathlib import Path

from selfspec.cli.state import check_state
from selfspec.errors import InvalidSettingError


def read_settings(
    method: str, assignments: Sequence[str] | None, state: Path | None = None, *, writes_state: bool = True
) -> dict[str, str]:
    """The settings of a command's method, and the check of its state file; all that needs no model.

    Args:
        method: its name.
        assignments: from ``--set``.
        state: from ``--state``.
        writes_state: whether the file will be written; otherwise it has to exist.

    Returns:
        Values by key, as text.

    Raises:
        InvalidSettingError: an assignment has no ``=``, or a key is given twice.
        UnknownMethodError: there is a state, and no method has this name.
        StateError: the method has no state, or the file cannot be read or written.
    """
    settings = parse_assignments(assignments or ())
    if state is not None:
        check_state(method, state, writes=writes_state)
    return settings


def parse_assignments(assignments: Sequence[str], source: str = "--set") -> dict[str, str]:
    """Parses settings given by ``--set``.

    Args:
        assignments: strings of the form ``key=value``.
        source: the option or command that they come from, for messages.

    Returns:
        Values by key, as text.

    Raises:
        InvalidSettingError: an assignment has no ``=``, or a key is given twice.
    """
    settings: dict[str, str] = {}
    for assignment in assignments:
        key, equals, value = (part.strip() for part in assignment.partition("="))
        if not key or not equals:
            raise InvalidSettingError(f"{source} takes KEY=VALUE, not '{assignment}'")
        if key in settings:
            raise InvalidSettingError(f"{source} gives '{key}' twice")
        settings[key] = value
    return settings
