"""Commands that other packages add to ``selfspec``, by the entry-point group ``selfspec.commands``.

The name of an entry point is the name of the command after the groups that it belongs to: ``bench``, ``models widen``.
It refers to a function for typer, or to a typer application. It is loaded when help lists it or when it runs.
"""

from importlib.metadata import EntryPoint, entry_points
from typing import Any, ClassVar

import typer
from typer.core import TyperGroup
from typer.main import get_command

from selfspec.cli import collection
from selfspec.errors import IN_THE_LAB, MissingPackageError, PluginError, first_line

ENTRY_POINTS = "selfspec.commands"

LAB_COMMANDS = (
    "bench",
    "conformance",
    "demo",
    "experiments",
    "export-draft",
    "families",
    "inspect",
    "models widen",
    "profile",
    "train",
    "tune",
)
"""Commands of selfspec-lab. Without that package, an error says what to install."""

_ANY_ARGUMENTS = {"allow_extra_args": True, "ignore_unknown_options": True}


class PluginGroup(TyperGroup):
    """A group of commands that other packages can extend."""

    path: ClassVar[str] = ""
    """Start of the names of this group's entry points: ``""`` or ``"models "``."""

    def list_commands(self, ctx: Any) -> list[str]:
        """Names of the group's own commands, then of those that other packages add."""
        own = super().list_commands(ctx)
        return [*own, *(name for name in self._added() if name not in own)]

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """Finds a command by its name; the group's own commands come first.

        Raises:
            MissingPackageError: the command belongs to a package that is not installed.
        """
        own = super().get_command(ctx, cmd_name)
        if own is not None:
            return own
        added = self._added().get(cmd_name)
        if added is not None:
            return _load(cmd_name, added)
        if self.path + cmd_name in LAB_COMMANDS:
            raise MissingPackageError(f"the command '{self.path}{cmd_name}' {IN_THE_LAB}")
        return None

    def _added(self) -> dict[str, EntryPoint]:
        found = sorted(entry_points(group=ENTRY_POINTS), key=lambda entry: entry.name)
        names = {entry.name.removeprefix(self.path): entry for entry in found if entry.name.startswith(self.path)}
        return {name: entry for name, entry in names.items() if " " not in name}


def _load(name: str, entry: EntryPoint) -> Any:
    """The command of an entry point; where loading fails, a command that raises the error."""
    try:
        collection.resume()  # what such a command loads, and how long it runs, is not known here
        command = _as_command(name, entry.load())
    except Exception as error:  # a broken package must not break the other commands
        command = _as_command(name, _failing(name, entry, error), context_settings=_ANY_ARGUMENTS)
    command.name = name
    return command


def _as_command(name: str, added: Any, **options: Any) -> Any:
    if not isinstance(added, typer.Typer):
        function, added = added, typer.Typer(add_completion=False)
        added.command(name, **options)(function)
    return get_command(added)


def _failing(name: str, entry: EntryPoint, error: Exception) -> Any:
    package = "another package" if entry.dist is None else entry.dist.name
    reason = f"{type(error).__name__}: {first_line(error)}"

    def fail() -> None:
        raise PluginError(
            f"the command '{name}' of {package} cannot be loaded ({reason}); update or uninstall {package}"
        ) from error

    fail.__doc__ = f"Cannot be loaded: {reason}"
    return fail
