"""Settings of a method: frozen dataclasses whose fields have a range, checked at construction."""

import dataclasses
import difflib
import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, get_type_hints

from selfspec.errors import InvalidSettingError
from selfspec.runtimes.precision import Precision

if TYPE_CHECKING:
    from typing_extensions import Self


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


def fraction(default: float | None, help: str) -> Any:
    """Makes a field for a number from 0 to 1."""
    return setting(default, help, minimum=0.0, maximum=1.0)


@dataclasses.dataclass(frozen=True)
class MethodSettings:
    """Base of all settings: checks the type and range of every field at construction.

    Subclasses are decorated with ``@dataclass(frozen=True)``; their fields are made by ``setting``.

    Raises:
        InvalidSettingError: a value is of the wrong type or out of range.
    """

    def __post_init__(self) -> None:
        hints = get_type_hints(type(self))
        for field in _fields(type(self)):
            value = _check(field, hints[field.name], getattr(self, field.name))
            object.__setattr__(self, field.name, value)

    @classmethod
    def parse(cls, method: str, values: Mapping[str, Any]) -> "Self":
        """Makes settings from names and values.

        Args:
            method: the method's name, for messages.
            values: by name the values; a string, as from the command line, is converted to the field's type.

        Raises:
            InvalidSettingError: a name is unknown, or a value is of the wrong type or out of range.
        """
        hints, known = get_type_hints(cls), {field.name: field for field in _fields(cls)}
        if unknown := [name for name in values if name not in known]:
            hint = suggest(unknown[0], known)
            raise InvalidSettingError(f"{method} has no setting '{unknown[0]}'{hint}{_known(known)}")
        return cls(
            **{name: _read(name, hints[name], each) if isinstance(each, str) else each for name, each in values.items()}
        )

    def to_values(self) -> dict[str, Any]:
        """The values by name, as ``parse`` takes them."""
        return {field.name: getattr(self, field.name) for field in _fields(type(self))}

    @classmethod
    def describe(cls) -> list[dict[str, Any]]:
        """Name, type, default, range and help of every setting, for listings."""
        hints, defaults = get_type_hints(cls), cls().to_values()
        return [
            {
                "name": field.name,
                "type": _type_name(hints[field.name]),
                "default": defaults[field.name],
                **{key: field.metadata[key] for key in ("minimum", "maximum")},
                "choices": list(field.metadata["choices"]),
                "help": field.metadata["help"],
            }
            for field in _fields(cls)
        ]


def _fields(settings_class: type) -> "list[dataclasses.Field[Any]]":
    """The fields that ``setting`` made."""
    return [field for field in dataclasses.fields(settings_class) if "help" in field.metadata]


def suggest(name: str, known: Mapping[str, Any]) -> str:
    """The text `; did you mean 'x'?` for the nearest known name; empty if there is none."""
    nearest = difflib.get_close_matches(name, list(known), n=1, cutoff=0.55)
    return f"; did you mean '{nearest[0]}'?" if nearest else ""


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
    try:
        return {"true": True, "false": False}[text.lower()] if base is bool else base(text)
    except (KeyError, ValueError):
        raise InvalidSettingError(f"{name} must be {_type_name(hint)}, not '{text}'") from None


def _check(field: "dataclasses.Field[Any]", hint: Any, value: Any) -> Any:
    base, optional = _base_type(hint)
    if value is None and optional:
        return None
    if base is float and isinstance(value, int) and not isinstance(value, bool):
        try:
            value = float(value)
        except OverflowError:
            value = math.inf
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


@dataclasses.dataclass(frozen=True)
class PrecisionSettings(MethodSettings):
    """At which precision a method drafts, of every method that drafts with layers; ``Method`` puts it into effect.

    Raises:
        InvalidSettingError: there are no low-bit weights of this many bits or of such groups.
    """

    draft_bits: int = setting(16, "bits of the weights that draft: 8, 6 or 4; 16 for the model's own", minimum=4)
    attention_bits: int | None = setting(None, "draft_bits of attention alone", minimum=4)
    mlp_bits: int | None = setting(None, "draft_bits of the MLPs alone", minimum=4)
    head_bits: int | None = setting(None, "draft_bits of the LM head alone", minimum=4)
    group: int = setting(32, "inputs of a low-bit weight row that share a scale: 32, 64 or 128", minimum=32)

    def __post_init__(self) -> None:
        super().__post_init__()
        _ = self.precision  # refuses bits and groups that do not exist

    @property
    def precision(self) -> Precision | None:
        """Of the weights that draft; ``None`` for the model's own."""
        parts = (self.attention_bits, self.mlp_bits, self.head_bits)
        attention, mlp, head = (self.draft_bits if bits is None else bits for bits in parts)
        precision = Precision(attention, mlp, head, self.group)
        return None if precision.is_full else precision
