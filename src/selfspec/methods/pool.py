"""Methods by name and settings, each made once."""

import threading
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

from selfspec.methods.base import Method
from selfspec.methods.registry import find_method, make_method
from selfspec.methods.settings import parse_settings, setting_values

_MOST_METHODS = 32


class MethodPool:
    """The methods that requests of one model ask for. A method keeps what it has learned while it is in the pool.

    It may be used from several threads. Of more than 32 methods, the one that was asked for longest ago is dropped;
    requests that use it go on.

    Args:
        first: the method of requests that ask for none; it is never dropped.
    """

    def __init__(self, first: Method) -> None:
        self._first = first
        self._made: OrderedDict[tuple[str, Any], Method] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, name: str | None = None, settings: Mapping[str, Any] | None = None) -> Method:
        """The method of a name with some settings, made at first use.

        Args:
            name: of the method; ``None`` for the one of requests that ask for none.
            settings: values by name. Those that are not given have the method's defaults, or, without a name, the
                values of the pool's first method.

        Raises:
            UnknownMethodError: no method has this name.
            InvalidSettingError: a setting is unknown, of the wrong type, out of range, or does not fit this model.
        """
        if name is None and not settings:
            return self._first
        chosen = type(self._first) if name is None else find_method(name)
        inherited = setting_values(self._first.settings) if name is None else {}
        values = {**inherited, **(settings or {})}
        key = chosen.name, parse_settings(chosen.Settings, chosen.name, values)
        if key == (self._first.name, self._first.settings):
            return self._first
        with self._lock:
            if key not in self._made:
                self._made[key] = make_method(chosen, self._first.target, values)
            self._made.move_to_end(key)
            if len(self._made) > _MOST_METHODS:
                self._made.popitem(last=False)
            return self._made[key]
