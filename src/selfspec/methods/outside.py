"""Methods from outside this package: entry points of the group ``selfspec.methods``, and ``module:Class``."""

import contextlib
import importlib
import inspect
import sys
from collections.abc import Iterator
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path

from selfspec.errors import MethodLoadError, first_line
from selfspec.methods.base import Method
from selfspec.methods.settings import MethodSettings

ENTRY_POINTS = "selfspec.methods"
"""The entry-point group: name of the method → ``module:Class``."""

_DESCRIPTION = ("name", "summary", "source")


def outside_methods() -> dict[str, list[EntryPoint]]:
    """The entry points of all installed packages, by name. A name should have one; nothing is imported."""
    found: dict[str, list[EntryPoint]] = {}
    for entry in sorted(entry_points(group=ENTRY_POINTS), key=lambda entry: (entry.name, entry.value)):
        entries = found.setdefault(entry.name, [])
        if entry.value not in [other.value for other in entries]:  # a package may be found twice on the path
            entries.append(entry)
    return found


def load_entry_point(name: str, entries: list[EntryPoint]) -> type[Method]:
    """The method of an entry point.

    Raises:
        MethodLoadError: there are several, it cannot be imported, or it is no method of this name.
    """
    if len(entries) > 1:
        given = " and ".join(entry.value for entry in entries)
        raise MethodLoadError(f"{given} are both called '{name}'; choose one of them as module:Class")
    method_class = import_method(entries[0].value)
    if method_class.name != name:
        raise MethodLoadError(
            f"the entry point '{name}' is {entries[0].value}, whose name is '{method_class.name}'; give both one name"
        )
    return method_class


def import_method(reference: str) -> type[Method]:
    """Imports a method, also from a module in the current folder.

    Raises:
        MethodLoadError: there is no such module, importing it fails, or the class is no method.
    """
    module_name, _, class_name = reference.partition(":")
    if not module_name or not class_name or module_name.startswith("."):
        raise MethodLoadError(f"'{reference}' does not name a method; write module:Class, as in my_package:MyMethod")
    try:
        with _current_folder_on_path():
            module = importlib.import_module(module_name)
    except Exception as error:  # a module may raise anything
        if isinstance(error, ModuleNotFoundError) and error.name and _is_part(error.name, module_name):
            raise MethodLoadError(
                f"there is no module '{error.name}' for the method '{reference}'; install its package, or run from "
                "the folder that it is in"
            ) from error
        raise MethodLoadError(
            f"importing the method '{reference}' failed: {type(error).__name__}: {first_line(error)}"
        ) from error
    if not hasattr(module, class_name):
        raise MethodLoadError(f"the module '{module_name}' has no '{class_name}'; check the spelling of '{reference}'")
    return check_method_class(getattr(module, class_name), f"'{reference}'")


def check_method_class(value: object, described: str) -> type[Method]:
    """Returns the value if it is a method class that can be used.

    Raises:
        MethodLoadError: it is no subclass of ``Method``, is abstract, or does not describe itself.
    """
    if not isinstance(value, type) or not issubclass(value, Method):
        raise MethodLoadError(f"{described} is not a method; give a subclass of selfspec.methods.api.Method")
    if inspect.isabstract(value):
        missing = ", ".join(sorted(value.__abstractmethods__))
        raise MethodLoadError(f"the method {described} is not complete; it does not define {missing}")
    missing = ", ".join(name for name in _DESCRIPTION if not isinstance(getattr(value, name, None), str))
    if missing:
        raise MethodLoadError(f"the method {described} does not describe itself; give the class the strings {missing}")
    if not isinstance(value.Settings, type) or not issubclass(value.Settings, MethodSettings):
        raise MethodLoadError(f"Settings of the method {described} must be a subclass of MethodSettings")
    return value


def _is_part(missing: str, module_name: str) -> bool:
    """Whether a module that was not found is the one asked for, or a package that it should be in."""
    return module_name == missing or module_name.startswith(f"{missing}.")


@contextlib.contextmanager
def _current_folder_on_path() -> Iterator[None]:
    """Looks for modules in the current folder too, after everything else, as ``python -m`` does."""
    folder = str(Path.cwd())
    if folder in sys.path:
        yield
        return
    sys.path.append(folder)
    try:
        yield
    finally:
        sys.path.remove(folder)
