"""Settings of a method: frozen dataclasses whose fields have a range, checked at construction."""

import dataclasses
import difflib
import functools
import math
from collections.abc import Mapping
from typing import Any, get_type_hints

from selfspec.errors import InvalidSettingError
from selfspec.runtimes.precision import Precision


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


def stage_settings(field: str, stage: str, settings_class: type, defaults: Mapping[str, Any]) -> tuple[str, type, Any]:
    """Makes a field that holds the settings of a stage of a method, which are set as ``stage.name``."""
    make = functools.partial(settings_class, **defaults)
    return field, settings_class, dataclasses.field(default_factory=make, metadata={"stage": stage})


@dataclasses.dataclass(frozen=True)
class MethodSettings:
    """Base of all settings: checks the type and range of every field at construction.

    Subclasses are decorated with ``@dataclass(frozen=True)``; their fields are made by ``setting``.

    Raises:
        InvalidSettingError: a value is of the wrong type or out of range.
    """

    def __post_init__(self) -> None:
        hints = get_type_hints(type(self))
        for field in _own_fields(type(self)):
            value = _check(field, hints[field.name], getattr(self, field.name))
            object.__setattr__(self, field.name, value)


def parse_settings(settings_class: type, method: str, values: Mapping[str, Any]) -> Any:
    """Makes settings from names and values.

    Args:
        settings_class: a subclass of ``MethodSettings``.
        method: the method's name, for messages.
        values: by name the values; a string, as from the command line, is converted to the field's type. Settings of a
            stage of the method are ``stage.name``, or a mapping at ``stage``.

    Raises:
        InvalidSettingError: a name is unknown, or a value is of the wrong type or out of range.
    """
    own, of_stages = _split(settings_class, method, values)
    hints = get_type_hints(settings_class)
    parsed = {name: _read(name, hints[name], value) if isinstance(value, str) else value for name, value in own.items()}
    for stage, field in _stages(settings_class).items():
        default = getattr(settings_class(), field.name)
        given = {**setting_values(default), **of_stages.get(stage, {})}
        parsed[field.name] = parse_settings(type(default), stage, given)
    return settings_class(**parsed)


def setting_values(settings: Any) -> dict[str, Any]:
    """The values of settings by name, those of stages as ``stage.name``; ``parse_settings`` takes them."""
    values = {field.name: getattr(settings, field.name) for field in _own_fields(type(settings))}
    for stage, field in _stages(type(settings)).items():
        of_stage = setting_values(getattr(settings, field.name))
        values |= {f"{stage}.{name}": value for name, value in of_stage.items()}
    return values


def _split(
    settings_class: type, method: str, values: Mapping[str, Any]
) -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
    """The values of a method's own settings, and by stage those of its stages."""
    stages, known = _stages(settings_class), {field.name: field for field in _own_fields(settings_class)}
    own: dict[str, Any] = {}
    of_stages: dict[str, dict[str, Any]] = {stage: {} for stage in stages}
    for name, value in values.items():
        stage, dot, key = name.partition(".")
        if stage in stages:
            if not dot and not isinstance(value, Mapping):
                raise InvalidSettingError(f"'{stage}' is a stage of {method}; set one of its settings, {stage}.NAME")
            for one, given in {key: value}.items() if dot else value.items():
                if one in of_stages[stage]:
                    raise InvalidSettingError(f"{stage}.{one} is given twice; leave one out")
                of_stages[stage][one] = given
        elif name in known:
            own[name] = value
        else:
            every = dict.fromkeys([*known, *(f"{stage}.NAME" for stage in stages)])
            raise InvalidSettingError(f"{method} has no setting '{name}'{suggest(name, known)}{_known(every)}")
    return own, of_stages


def _own_fields(settings_class: type) -> "list[dataclasses.Field[Any]]":
    return [field for field in dataclasses.fields(settings_class) if "stage" not in field.metadata]


def _stages(settings_class: type) -> "dict[str, dataclasses.Field[Any]]":
    """The fields with the settings of stages, by the stage's name."""
    return {field.metadata["stage"]: field for field in dataclasses.fields(settings_class) if "stage" in field.metadata}


def suggest(name: str, known: Mapping[str, Any]) -> str:
    """The text `; did you mean 'x'?` for the nearest known name; empty if there is none."""
    nearest = difflib.get_close_matches(name, list(known), n=1, cutoff=0.55)
    return f"; did you mean '{nearest[0]}'?" if nearest else ""


def describe_settings(settings_class: type) -> list[dict[str, Any]]:
    """Name, type, default, range and help of every setting, for listings."""
    hints = get_type_hints(settings_class)
    defaults = setting_values(settings_class())
    own = [
        {
            "name": field.name,
            "type": _type_name(hints[field.name]),
            "default": defaults[field.name],
            **{key: field.metadata[key] for key in ("minimum", "maximum")},
            "choices": list(field.metadata["choices"]),
            "help": field.metadata["help"],
        }
        for field in _own_fields(settings_class)
    ]
    of_stages = [
        {**entry, "name": f"{stage}.{entry['name']}", "default": defaults[f"{stage}.{entry['name']}"]}
        for stage, field in _stages(settings_class).items()
        for entry in describe_settings(hints[field.name])
    ]
    return own + of_stages


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
