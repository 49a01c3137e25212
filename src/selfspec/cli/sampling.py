"""The sampling parameters of the commands that generate."""

from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from selfspec.errors import InvalidParameterError

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
        InvalidParameterError: a value is out of range, or the file of a schema cannot be read.
    """
    from selfspec.types import SamplingParams

    values = {field.name: options[field.name] for field in fields(SamplingParams) if field.name in options}
    if "stop" in values:
        values["stop"] = tuple(values["stop"] or ())
    if values.get("json_schema") is not None:
        values["json_schema"] = _read_schema(values["json_schema"])
    return SamplingParams(**values)


def _read_schema(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise InvalidParameterError(f"--json-schema: cannot read '{path}': {reason}") from error
