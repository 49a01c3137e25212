"""Errors about what a file or a checkpoint holds, with its name."""

import contextlib
from collections.abc import Iterator
from pathlib import Path

from selfspec.errors import SelfSpecError


@contextlib.contextmanager
def naming(source: str | Path) -> Iterator[None]:
    """Names a file or a checkpoint in the errors that are raised within."""
    try:
        yield
    except SelfSpecError as error:
        raise type(error)(f"cannot load '{source}': {error}") from error
