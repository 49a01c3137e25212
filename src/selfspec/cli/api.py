"""What the commands of other packages may import: options and helpers for the terminal. Imports no torch.

A package adds a command by an entry point of the group ``selfspec.commands``; see ``selfspec.cli.plugins``.
"""

from selfspec.cli import options
from selfspec.cli.generate import summary
from selfspec.cli.prompt import read_prompt
from selfspec.cli.settings import parse_assignments, read_settings
from selfspec.cli.terminal import make_console, own_warnings, silence_libraries, takes_colour

__all__ = [
    "make_console",
    "options",
    "own_warnings",
    "parse_assignments",
    "read_prompt",
    "read_settings",
    "silence_libraries",
    "summary",
    "takes_colour",
]
