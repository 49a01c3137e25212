"""Methods by name: those of this package, those of other packages, and classes that are given directly."""

import re
from collections.abc import Mapping
from typing import Any, TypeVar

from selfspec.errors import MethodLoadError, UnknownMethodError
from selfspec.methods.base import Method
from selfspec.methods.outside import check_method_class, import_method, load_entry_point, outside_methods
from selfspec.methods.settings import parse_settings, suggest
from selfspec.runtimes.target import Target

METHODS: dict[str, type[Method]] = {}
"""The methods of this package, by name."""

COMPOSITIONS: dict[str, type[Any]] = {}
"""What makes methods of methods, by name: ``cascade(suffix, low-bit)``."""

LAB_METHODS = ("adaptive-cosine", "jacobi", "lookahead", "mixed")
"""Methods of selfspec-lab. Without that package, an error says what to install."""

DEFAULT_METHOD = "auto"
"""The method where none is named."""

MethodClass = TypeVar("MethodClass", bound=type[Method])


def register(method_class: MethodClass) -> MethodClass:
    """Class decorator that adds a method to ``METHODS``. Methods of other packages do not need it."""
    assert method_class.name not in METHODS, f"two methods are called {method_class.name}"
    METHODS[method_class.name] = method_class
    return method_class


def composition(method_class: MethodClass) -> MethodClass:
    """Class decorator that adds a class to ``COMPOSITIONS``: its ``of(parts)`` makes a method of methods."""
    COMPOSITIONS[method_class.name] = method_class
    return method_class


def find_method(method: str | type[Method]) -> type[Method]:
    """The class of a method.

    Args:
        method: a name of this package; a name of the entry-point group ``selfspec.methods``; ``module:Class``; a
            composition of these, ``cascade(suffix, low-bit)``; or the class itself. A name of this package always means
            this package's method.

    Raises:
        UnknownMethodError: there is no method of this name; the message names the nearest.
        MethodLoadError: the method is not in this package and cannot be imported, is no ``Method`` subclass, or
            several installed packages give this name to a method.
    """
    if not isinstance(method, str):
        return check_method_class(method, repr(method))
    if method in METHODS:
        return METHODS[method]
    if "(" in method or ")" in method or method in COMPOSITIONS:
        return _compose(method)
    if ":" in method:
        return import_method(method)
    outside = outside_methods()
    if method in outside:
        return load_entry_point(method, outside[method])
    if method in LAB_METHODS:
        raise UnknownMethodError(f"the method '{method}' is part of selfspec-lab; run `pip install selfspec-lab`")
    known = [*METHODS, *outside]
    raise UnknownMethodError(
        f"there is no method '{method}'{suggest(str(method), dict.fromkeys(known))} (methods: {', '.join(known)}; or "
        "module:Class for one that is not installed as a plugin)"
    )


def _compose(text: str) -> type[Method]:
    """The method that a composition names."""
    found = re.fullmatch(r"\s*([^\s(),]+)\s*\((.*)\)\s*", text, re.DOTALL)
    example = "cascade(suffix, low-bit)"
    if found is None:
        raise UnknownMethodError(f"'{text}' names no method; write its parts in parentheses, as in {example}")
    name, parts = found[1], [part.strip() for part in found[2].split(",")]
    if name not in COMPOSITIONS:
        raise UnknownMethodError(f"'{name}' takes no parts{suggest(name, COMPOSITIONS)}; write for example {example}")
    if "(" in found[2] or ")" in found[2]:
        raise UnknownMethodError(f"a part in '{text}' has parts of its own; write all side by side, as in {example}")
    if "" in parts:
        raise UnknownMethodError(f"'{text}' has an empty part; write for example {example}")
    composed: type[Method] = COMPOSITIONS[name].of([find_method(part) for part in parts])
    return composed


def all_methods() -> tuple[dict[str, type[Method]], list[MethodLoadError]]:
    """The methods of this package and those of entry points."""
    methods, errors = dict(METHODS), []
    for name, entries in outside_methods().items():
        try:
            if name in METHODS:
                values = " and ".join(entry.value for entry in entries)
                raise MethodLoadError(f"'{name}' is a method of selfspec, not {values}; give that another name")
            methods[name] = load_entry_point(name, entries)
        except MethodLoadError as error:
            errors.append(error)
    return methods, errors


def make_method(method: str | type[Method], target: Target, settings: Mapping[str, Any] | None = None) -> Method:
    """Makes a method for a target.

    Args:
        method: as for ``find_method``.
        target: the model.
        settings: values of its settings by name; the others keep their defaults.

    Raises:
        UnknownMethodError: there is no such method.
        MethodLoadError: it cannot be loaded.
        InvalidSettingError: a setting is unknown, of the wrong type, out of range, or does not fit this model.
    """
    method_class = find_method(method)
    return method_class(target, parse_settings(method_class.Settings, method_class.name, settings or {}))
