"""Whether an engine is installed, and of the version that its bridge was tested with."""

import warnings
from importlib.metadata import PackageNotFoundError, version

from selfspec.errors import EngineVersionWarning, MissingPackageError

_warned: set[str] = set()


def check_engine(package: str, tested: str, install: str) -> None:
    """Checks an engine's package, and warns once in a process if its version is another one than was tested.

    Args:
        package: its distribution.
        tested: the version that the bridge was tested with; a local part, as in ``0.32.0+cpu``, may differ.
        install: arguments of ``pip install``.

    Raises:
        MissingPackageError: it is not installed.
    """
    try:
        found = version(package)
    except PackageNotFoundError:
        raise MissingPackageError(f"this bridge needs {package}; run: pip install {install}") from None
    if found.partition("+")[0] != tested and package not in _warned:
        _warned.add(package)
        warnings.warn(
            f"{package} is {found}, and the bridge was tested with {tested}: check that texts are the same without it",
            EngineVersionWarning,
            stacklevel=3,
        )
