"""Methods by name: those of this package, those of other packages (entry points, ``module:Class``), and classes."""

import contextlib
import importlib
import inspect
import re
import sys
import threading
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, TypeVar

from selfspec.errors import IN_THE_LAB, MethodLoadError, UnknownMethodError, UnsupportedModelError, first_line
from selfspec.methods.base import Method
from selfspec.methods.settings import MethodSettings, suggest
from selfspec.runtimes.target import Target

_DESCRIPTION = ("name", "summary", "source")


def import_method(reference: str) -> type[Method]:
    """Imports a method by ``module:Class``, also from a module in the current folder."""
    module_name, _, class_name = reference.partition(":")
    if not module_name or not class_name or module_name.startswith("."):
        raise MethodLoadError(f"'{reference}' does not name a method; write module:Class, as in my_package:MyMethod")
    try:
        with _current_folder_on_path():
            module = importlib.import_module(module_name)
    except Exception as error:  # a module may raise anything
        # The module itself was not found, or a package that it should be in, and not one that it imports.
        if isinstance(error, ModuleNotFoundError) and error.name and f"{module_name}.".startswith(f"{error.name}."):
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
    """Returns the value if it is a method class that can be used, and refuses any other."""
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


class _Named:
    """Classes by name: those of this package, and those of an entry-point group (name → ``module:Class``)."""

    def __init__(self, group: str, own: dict[str, type[Any]]) -> None:
        self._group, self.own = group, own

    def outside(self) -> dict[str, list[str]]:
        """The entry points of all installed packages, by name. A name should have one; nothing is imported."""
        found: dict[str, list[str]] = {}
        for entry in sorted(entry_points(group=self._group), key=lambda entry: (entry.name, entry.value)):
            values = found.setdefault(entry.name, [])
            values += [entry.value] if entry.value not in values else []  # a package may be found twice on the path
        return found

    def names(self) -> dict[str, None]:
        """All names, those of this package first."""
        return dict.fromkeys([*self.own, *self.outside()])

    def load(self, name: str) -> type[Any]:
        """The class of a name, this package's if it has one; refuses several entry points of one name."""
        if name in self.own:
            return self.own[name]
        values = self.outside()[name]
        if len(values) > 1:
            raise MethodLoadError(
                f"{' and '.join(values)} are both called '{name}'; choose one of them as module:Class"
            )
        found = import_method(values[0])
        if found.name != name:
            raise MethodLoadError(
                f"the entry point '{name}' is {values[0]}, whose name is '{found.name}'; give both one name"
            )
        return found

    def all(self) -> tuple[dict[str, type[Any]], list[MethodLoadError]]:
        """All classes, and what is wrong with the entry points that have none."""
        found, errors = dict(self.own), []
        for name, values in self.outside().items():
            try:
                if name in self.own:
                    given = " and ".join(values)
                    raise MethodLoadError(f"'{name}' is a method of selfspec, not {given}; give that another name")
                found[name] = self.load(name)
            except MethodLoadError as error:
                errors.append(error)
        return found, errors


METHODS: dict[str, type[Method]] = {}
"""The methods of this package, by name."""

COMPOSITIONS: dict[str, type[Any]] = {}
"""What makes methods of names in parentheses, by name: ``paper(del)``. Entry points add others."""

_METHODS, _COMPOSITIONS = _Named("selfspec.methods", METHODS), _Named("selfspec.compositions", COMPOSITIONS)

LAB_METHODS = ("adaptive-cosine", "cascade", "jacobi", "lookahead", "mixed")
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
    """Class decorator that adds a class to ``COMPOSITIONS``: its ``named(names)`` makes a method of names."""
    COMPOSITIONS[method_class.name] = method_class
    return method_class


def find_method(method: str | type[Method]) -> type[Method]:
    """The class of a method.

    Args:
        method: a name of this package; a name of the entry-point group ``selfspec.methods``; ``module:Class``; a
            composition of these, ``paper(del)`` or, with selfspec-lab, ``cascade(suffix, low-bit)``; or the class
            itself. A name of this package always means this package's method.

    Raises:
        UnknownMethodError: there is no method of this name; the message names the nearest.
        MethodLoadError: the method is not in this package and cannot be imported, is no ``Method`` subclass, or
            several installed packages give this name to a method.
    """
    if not isinstance(method, str):
        return check_method_class(method, repr(method))
    if method in METHODS:
        return METHODS[method]
    if "(" in method or ")" in method or method in _COMPOSITIONS.names():
        return _compose(method)
    if ":" in method:
        return import_method(method)
    if method in (methods := _METHODS.names()):
        return _METHODS.load(method)
    if method in LAB_METHODS:
        raise UnknownMethodError(f"the method '{method}' {IN_THE_LAB}")
    known = [*methods, *_COMPOSITIONS.names()]
    raise UnknownMethodError(
        f"there is no method '{method}'{suggest(str(method), dict.fromkeys(known))} (methods: {', '.join(known)}; "
        "autoregressive is plain decoding; module:Class is one that is not installed as a plugin)"
    )


def _compose(text: str) -> type[Method]:
    """The method that a composition names."""
    found = re.fullmatch(r"\s*([^\s(),]+)\s*\((.*)\)\s*", text, re.DOTALL)
    example = "paper(swift)"
    if found is None:
        raise UnknownMethodError(f"'{text}' names no method; write its stages in parentheses, as in {example}")
    name, stages, known = found[1], [stage.strip() for stage in found[2].split(",")], _COMPOSITIONS.names()
    if name not in known:
        if name in LAB_METHODS:
            raise UnknownMethodError(f"the method '{name}' {IN_THE_LAB}")
        raise UnknownMethodError(f"'{name}' takes no stages{suggest(name, known)}; write for example {example}")
    if "(" in found[2] or ")" in found[2]:
        raise UnknownMethodError(f"a stage in '{text}' has stages of its own; write all side by side, as in {example}")
    if "" in stages:
        raise UnknownMethodError(f"'{text}' has an empty stage; write for example {example}")
    composed: type[Method] = _COMPOSITIONS.load(name).named(stages)
    return composed


def all_methods() -> tuple[dict[str, type[Method]], list[MethodLoadError]]:
    """The methods of this package and those of entry points."""
    return _METHODS.all()


def all_compositions() -> tuple[dict[str, type[Any]], list[MethodLoadError]]:
    """What makes methods of names, of this package and of entry points."""
    return _COMPOSITIONS.all()


def make_method(method: str | type[Method], target: Target, settings: Mapping[str, Any] | None = None) -> Method:
    """Makes a method, as ``find_method`` finds it, for a target; settings that are not given keep their defaults.

    Raises:
        UnknownMethodError: there is no such method.
        MethodLoadError: it cannot be loaded.
        InvalidSettingError: a setting is unknown, of the wrong type, out of range, or does not fit this model.
        UnsupportedModelError: the method needs what this model cannot run.
    """
    method_class = find_method(method)
    made = method_class(target, method_class.Settings.parse(method_class.name, settings or {}))
    refusal = target.tree_refusal
    if refusal is not None and made.needs.probe_rows:
        raise UnsupportedModelError(
            f"{made.name} tries layers on rows that do not follow each other, which this {target.family.name} model "
            f"cannot run: {refusal}; choose auto, prompt-lookup or layerskip"
        )
    return made


_MOST_METHODS = 32


class MethodPool:
    """The methods that requests of one model ask for. A method keeps what it has learned while it is in the pool.

    It may be used from several threads. Of more than 32 methods, the one that was asked for longest ago is dropped;
    requests that use it go on. The first method, of requests that ask for none, is never dropped.
    """

    def __init__(self, first: Method) -> None:
        self._first = first
        self._made: OrderedDict[tuple[type[Method], Any], Method] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, name: str | None = None, settings: Mapping[str, Any] | None = None) -> Method:
        """The method of a name with some settings, made at first use.

        Settings that are not given have the method's defaults, or, without a name, those of the pool's first method.
        """
        if name is None and not settings:
            return self._first
        chosen = type(self._first) if name is None else find_method(name)
        inherited = self._first.settings.to_values() if name is None else {}
        values = {**inherited, **(settings or {})}
        key = chosen, chosen.Settings.parse(chosen.name, values)
        if key == (type(self._first), self._first.settings):
            return self._first
        with self._lock:
            if key not in self._made:
                self._made[key] = make_method(chosen, self._first.target, values)
            self._made.move_to_end(key)
            if len(self._made) > _MOST_METHODS:
                self._made.popitem(last=False)
            return self._made[key]
