"""Settings of a method: frozen dataclasses whose fields have a range, checked at construction."""

import dataclasses
import difflib
import math
from collections.abc import Mapping
from typing import Any, get_type_hints

from selfspec.errors import InvalidSettingError


def setting(
    default: Any,
    help: str,
    *,
    minimum: float | None = None,
    maximum: float | None = None,
    choices: tuple[str, ...] = (),
) -> Any:
    """Makes a field of a settings dataclass.

    The field's annotation is ``bool``, ``int``, ``float`` or ``str``, or one of these ``| None``.

    Args:
        default: the default value.
        help: one line for ``selfspec methods``.
        minimum: smallest value allowed.
        maximum: largest value allowed.
        choices: the values allowed, for strings.
    """
    metadata = {"help": help, "minimum": minimum, "maximum": maximum, "choices": choices}
    return dataclasses.field(default=default, metadata=metadata)


@dataclasses.dataclass(frozen=True)
class MethodSettings:
    """Base of all settings: checks the type and range of every field at construction.

    Subclasses are decorated with ``@dataclass(frozen=True)``; their fields are made by ``setting``.

    Raises:
        InvalidSettingError: a value is of the wrong type or out of range.
    """

    def __post_init__(self) -> None:
        hints = get_type_hints(type(self))
        for field in dataclasses.fields(self):
            value = _check(field, hints[field.name], getattr(self, field.name))
            object.__setattr__(self, field.name, value)


def parse_settings(settings_class: type, method: str, values: Mapping[str, Any]) -> Any:
    """Makes settings from names and values.

    Args:
        settings_class: a subclass of ``MethodSettings``.
        method: the method's name, for messages.
        values: by name the values; a string, as from the command line, is converted to the field's type.

    Raises:
        InvalidSettingError: a name is unknown, or a value is of the wrong type or out of range.
    """
    fields = {field.name: field for field in dataclasses.fields(settings_class)}
    hints = get_type_hints(settings_class)
    parsed = {}
    for name, value in values.items():
        if name not in fields:
            raise InvalidSettingError(f"{method} has no setting '{name}'{suggest(name, fields)}{_known(fields)}")
        parsed[name] = _read(name, hints[name], value) if isinstance(value, str) else value
    return settings_class(**parsed)


def suggest(name: str, known: Mapping[str, Any]) -> str:
    """The text `; did you mean 'x'?` for the nearest known name; empty if there is none."""
    nearest = difflib.get_close_matches(name, list(known), n=1, cutoff=0.5)
    return f"; did you mean '{nearest[0]}'?" if nearest else ""


def describe_settings(settings_class: type) -> list[dict[str, Any]]:
    """Name, type, default, range and help of every setting, for listings."""
    hints = get_type_hints(settings_class)
    return [
        {
            "name": field.name,
            "type": _type_name(hints[field.name]),
            "default": field.default,
            **{key: field.metadata[key] for key in ("minimum", "maximum")},
            "choices": list(field.metadata["choices"]),
            "help": field.metadata["help"],
        }
        for field in dataclasses.fields(settings_class)
    ]


def _known(fields: Mapping[str, Any]) -> str:
    return f" (its settings: {', '.join(fields)})" if fields else " (it has none)"


def _base_type(hint: Any) -> tuple[type, bool]:
    """The plain type of an annotation, and whether ``None`` is allowed."""
    arguments = [argument for argument in getattr(hint, "__args__", (hint,)) if argument is not type(None)]
    return arguments[0], len(arguments) < len(getattr(hint, "__args__", (hint,)))


def _type_name(hint: Any) -> str:
    base, optional = _base_type(hint)
    return f"{base.__name__} or none" if optional else base.__name__


def _read(name: str, hint: Any, text: str) -> Any:
    base, optional = _base_type(hint)
    if optional and text.lower() == "none":
        return None
    if base is bool and text.lower() in ("true", "false"):
        return text.lower() == "true"
    try:
        return text if base is str else _number(base, text)
    except ValueError:
        raise InvalidSettingError(f"{name} must be {_type_name(hint)}, not '{text}'") from None


def _number(base: type, text: str) -> Any:
    if base is bool:
        raise ValueError(text)
    return base(text)


def _check(field: "dataclasses.Field[Any]", hint: Any, value: Any) -> Any:
    base, optional = _base_type(hint)
    if value is None and optional:
        return None
    if base is float and isinstance(value, int) and not isinstance(value, bool):
        value = float(value)
    wrong_type = not isinstance(value, base) or (isinstance(value, bool) and base is not bool)
    if wrong_type or (isinstance(value, float) and not math.isfinite(value)):
        raise InvalidSettingError(f"{field.name} must be {_type_name(hint)}, not {value!r}")
    minimum, maximum, choices = (field.metadata[key] for key in ("minimum", "maximum", "choices"))
    if (minimum is not None and value < minimum) or (maximum is not None and value > maximum):
        low = "" if minimum is None else f"at least {minimum:g}"
        high = "" if maximum is None else f"at most {maximum:g}"
        raise InvalidSettingError(f"{field.name} must be {' and '.join(filter(None, (low, high)))}, not {value}")
    if choices and value not in choices:
        nearest = suggest(value, dict.fromkeys(choices))
        raise InvalidSettingError(f"{field.name} is one of {', '.join(choices)}, not '{value}'{nearest}")
    return value
