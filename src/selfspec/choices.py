"""Options of the command line as fields of dataclasses. Imports nothing that is slow."""

from dataclasses import dataclass, field, fields
from typing import Any, ClassVar

from selfspec.ranges import check_number


def option(default: Any, help: str, *names: str, **others: Any) -> Any:
    """A field of a choice: an option with its default, its help, and what else ``typer.Option`` takes."""
    return field(default=default, metadata={"names": names, "others": {"help": help, **others}})


@dataclass(frozen=True)
class Choice:
    """Options that belong together. A parameter of a command that it annotates becomes one option for each field.

    A field is annotated with its option, or made by ``option``. ``panel`` is their heading in the help.

    Raises:
        InvalidParameterError: a number is below the least one of its option.
    """

    panel: ClassVar[str | None] = None

    def __post_init__(self) -> None:
        for each in fields(self):
            least, value = each.metadata.get("others", {}).get("min"), getattr(self, each.name)
            if least is not None and value is not None:
                check_number(each.name, value, least)
