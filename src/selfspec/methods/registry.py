"""Methods by name."""

from collections.abc import Mapping
from typing import Any, TypeVar

from selfspec.errors import UnknownMethodError
from selfspec.methods.base import Method
from selfspec.methods.settings import parse_settings, suggest
from selfspec.runtimes.target import Target

METHODS: dict[str, type[Method]] = {}
"""Every known method, by its name."""

DEFAULT_METHOD = "suffix"
"""The method where none is named. It works on any supported model and needs no settings."""

MethodClass = TypeVar("MethodClass", bound=type[Method])


def register(method_class: MethodClass) -> MethodClass:
    """Class decorator: makes a method known under its name."""
    assert method_class.name not in METHODS, f"two methods are called {method_class.name}"
    METHODS[method_class.name] = method_class
    return method_class


def find_method(name: str) -> type[Method]:
    """The class of a method.

    Raises:
        UnknownMethodError: there is none of this name; the message names the nearest.
    """
    if name not in METHODS:
        raise UnknownMethodError(
            f"there is no method '{name}'{suggest(str(name), METHODS)} (methods: {', '.join(METHODS)})"
        )
    return METHODS[name]


def make_method(name: str, target: Target, settings: Mapping[str, Any] | None = None) -> Method:
    """A method at work for a target.

    Args:
        name: the method's name.
        target: the model.
        settings: values of its settings by name; the others keep their defaults.

    Raises:
        UnknownMethodError: there is no such method.
        InvalidSettingError: a setting is unknown, of the wrong type, out of range, or does not fit this model.
    """
    method_class = find_method(name)
    return method_class(target, parse_settings(method_class.Settings, name, settings or {}))
