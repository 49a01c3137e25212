"""The commands by name, and what every one of them does with an error."""

import os
import sys
from typing import Annotated, Any

import typer

from selfspec import __version__
from selfspec.cli.chat import EXAMPLE, chat
from selfspec.cli.generate import generate
from selfspec.cli.info import info
from selfspec.cli.inspect import inspect
from selfspec.cli.methods import methods
from selfspec.cli.models import models
from selfspec.cli.plugins import PluginGroup
from selfspec.cli.profile import profile
from selfspec.cli.terminal import tolerate_encoding
from selfspec.cli.tune import tune
from selfspec.errors import SelfSpecError

USER_ERROR = 2
INTERRUPTED = 130
BROKEN_PIPE = 141
"""Exit codes; the last two are 128 + the number of the signal that a shell would report."""


class CommandGroup(PluginGroup):
    """Turns what a user can cause into one line and an exit code: never a traceback."""

    def invoke(self, ctx: Any) -> Any:
        """Runs the command that was asked for."""
        try:
            return super().invoke(ctx)
        except SelfSpecError as error:
            typer.echo(f"error: {' '.join(str(error).split())}", err=True)
            raise typer.Exit(USER_ERROR) from error
        except KeyboardInterrupt as interrupt:
            typer.echo("interrupted", err=True)
            raise typer.Exit(INTERRUPTED) from interrupt
        except BrokenPipeError as error:
            _forget_stdout()
            raise typer.Exit(BROKEN_PIPE) from error


def _forget_stdout() -> None:
    """Lets the interpreter flush at exit without a complaint about the reader that has gone."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"selfspec {__version__}")
        raise typer.Exit


app = typer.Typer(
    cls=CommandGroup,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Lossless self-speculative decoding: a model drafts with its own layers and writes exactly its own text.",
)
app.command()(generate)
app.command(epilog=EXAMPLE)(chat)
app.command()(inspect)
app.command()(methods)
app.command()(info)
app.command()(tune)
app.command()(profile)
app.add_typer(models, name="models")


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Options of ``selfspec`` itself."""


def main() -> None:
    """Runs the command line with the arguments of this process."""
    tolerate_encoding()
    app()
