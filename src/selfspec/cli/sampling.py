"""The sampling parameters of the commands that generate."""

from collections.abc import Mapping
from dataclasses import fields
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from selfspec.types import SamplingParams


def sampling_params(options: Mapping[str, Any]) -> "SamplingParams":
    """Builds sampling parameters from the options of a command that have the same names.

    Args:
        options: the command's options by name, as in ``typer.Context.params``; others than sampling parameters are
            ignored.

    Returns:
        The parameters; those without an option keep their defaults.

    Raises:
        InvalidParameterError: a value is out of range.
    """
    from selfspec.types import SamplingParams

    values = {field.name: options[field.name] for field in fields(SamplingParams) if field.name in options}
    if "stop" in values:
        values["stop"] = tuple(values["stop"] or ())
    return SamplingParams(**values)
