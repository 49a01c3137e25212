"""``--state FILE``: what a method has learned, kept from one command to the next."""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from selfspec.errors import StateError

if TYPE_CHECKING:
    from selfspec.engine import Engine


def check_state(method: str, path: Path, *, writes: bool = True) -> None:
    """Refuses, before the model is loaded, a ``--state`` that cannot work.

    Args:
        method: the method's name.
        path: the file.
        writes: whether it is to be written; otherwise it has to be there.

    Raises:
        UnknownMethodError: there is no such method.
        StateError: the method learns nothing from one request to the next, or there can be no such file.
    """
    from selfspec.methods import METHODS, find_method
    from selfspec.methods.state import check_destination, check_source

    if not find_method(method).learns:
        learning = ", ".join(name for name, other in METHODS.items() if other.learns)
        raise StateError(
            f"{method} learns nothing from one request to the next, so it has no state to load or save; "
            f"leave --state out{f', or choose a method that learns: {learning}' if learning else ''}"
        )
    if writes:
        check_destination(path)
    else:
        check_source(path)


@contextlib.contextmanager
def kept_state(engine: "Engine", path: Path | None) -> Iterator[None]:
    """Begins with what a file says, if there is one, and ends with saving what there is then, interrupted or not.

    Args:
        engine: learns in between.
        path: the file; ``None`` does nothing.

    Raises:
        StateError: the file does not fit, or cannot be read or written.
    """
    if path is None:
        yield
        return
    engine.method.state()  # the method's settings may leave it nothing to save, which is better said now than after
    if path.exists():
        engine.load_state(path)
    try:
        yield
    finally:
        engine.save_state(path)
