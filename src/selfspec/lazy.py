"""Names of a package whose modules are imported when one of them is first used."""

from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from typing import Any


def lazily(package: str, names: Mapping[str, Sequence[str]]) -> Callable[[str], Any]:
    """A package's ``__getattr__``; ``names`` are those of each module that it takes some from."""
    homes = {name: module for module, own in names.items() for name in own}

    def find(name: str) -> Any:
        """A name of the package, from its module."""
        if name not in homes:
            raise AttributeError(f"module '{package}' has no attribute '{name}'")
        return getattr(import_module(homes[name]), name)

    return find
