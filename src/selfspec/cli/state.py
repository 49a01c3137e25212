"""``--state FILE``: loads and saves what a method has learned."""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from selfspec.errors import StateError

if TYPE_CHECKING:
    from selfspec.engine import Engine


def check_state(method: str, path: Path, *, writes: bool = True) -> None:
    """Checks ``--state`` before the model is loaded.

    Args:
        method: name of the method.
        path: the file.
        writes: whether the file will be written; otherwise it has to exist.

    Raises:
        UnknownMethodError: no method has this name.
        StateError: the method has no state, or the file cannot be read or written.
    """
    from selfspec.methods import METHODS, find_method
    from selfspec.methods.state import check_destination, check_source

    if not find_method(method).learns:
        learning = ", ".join(name for name, other in METHODS.items() if other.learns)
        raise StateError(
            f"{method} learns nothing from request to request, so it has no state to load or save; "
            f"leave --state out{f', or choose a method that learns: {learning}' if learning else ''}"
        )
    if writes:
        check_destination(path)
    else:
        check_source(path)


@contextlib.contextmanager
def kept_state(engine: "Engine", path: Path | None) -> Iterator[None]:
    """Loads the state from a file, if it exists, and saves the state to it at the end, even after an interrupt.

    Args:
        engine: the engine whose method learns.
        path: the file; with ``None`` nothing is loaded or saved.

    Raises:
        StateError: the file does not fit the engine, or cannot be read or written.
    """
    if path is None:
        yield
        return
    engine.method.state()  # raises if the method's settings leave nothing to save
    if path.exists():
        engine.load_state(path)
    try:
        yield
    finally:
        engine.save_state(path)
