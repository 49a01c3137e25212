"""Commands that other packages add to ``selfspec``, by the entry-point group ``selfspec.commands``.

An entry point's name is the command's, with its groups before it: ``bench``, ``models widen``. It names a function for
typer, or a typer application. It is loaded when its help is listed or it is run.
"""

from importlib.metadata import EntryPoint, entry_points
from typing import Any, ClassVar

import typer
from typer.core import TyperGroup
from typer.main import get_command

ENTRY_POINTS = "selfspec.commands"

LAB_COMMANDS = ("bench", "experiments", "demo", "models widen")
"""Commands of selfspec-lab, named in the error where that is not installed."""


class PluginGroup(TyperGroup):
    """A group of commands to which other packages add theirs."""

    path: ClassVar[str] = ""
    """What comes before a command's name in its entry point: ``""`` or ``"models "``."""

    def list_commands(self, ctx: Any) -> list[str]:
        """Own commands, then those of other packages."""
        own = super().list_commands(ctx)
        return [*own, *(name for name in self._added() if name not in own)]

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """An own command, or one of another package."""
        own = super().get_command(ctx, cmd_name)
        if own is not None:
            return own
        added = self._added().get(cmd_name)
        if added is not None:
            return _load(cmd_name, added)
        if self.path + cmd_name in LAB_COMMANDS:
            ctx.fail(f"'{self.path}{cmd_name}' comes with selfspec-lab; run `pip install selfspec-lab`")
        return None

    def _added(self) -> dict[str, EntryPoint]:
        found = sorted(entry_points(group=ENTRY_POINTS))
        names = {entry.name.removeprefix(self.path): entry for entry in found if entry.name.startswith(self.path)}
        return {name: entry for name, entry in names.items() if " " not in name}


def _load(name: str, entry: EntryPoint) -> Any:
    added = entry.load()
    if not isinstance(added, typer.Typer):
        command, added = added, typer.Typer(add_completion=False)
        added.command(name)(command)
    loaded = get_command(added)
    loaded.name = name
    return loaded
