"""The command line: all commands, and how errors end them."""

import errno
import os
import sys
from typing import Annotated, Any

import typer

from selfspec import __version__
from selfspec.cli import collection
from selfspec.cli.chat import chat
from selfspec.cli.generate import generate
from selfspec.cli.methods import methods
from selfspec.cli.models import info, models
from selfspec.cli.plugins import PluginGroup
from selfspec.cli.serve import serve
from selfspec.cli.terminal import replace_closed_streams, tolerate_encoding
from selfspec.errors import SelfSpecError

USER_ERROR = 2
INTERRUPTED = 130
BROKEN_PIPE = 141
"""Exit codes. The last two are 128 + the signal number, as a shell reports them."""


class CommandGroup(PluginGroup):
    """Prints an error that a user can cause as one line without a traceback, and sets the exit code."""

    def invoke(self, ctx: Any) -> Any:
        """Runs the command."""
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
        except OSError as error:
            if error.errno != errno.ENOSPC:
                raise
            _forget_stdout()
            typer.echo(f"error: the output cannot be written: {error.strerror}", err=True)
            raise typer.Exit(USER_ERROR) from error


def _forget_stdout() -> None:
    """Redirects standard output to the null device, so that the final flush does not fail."""
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
    help="Lossless self-speculative decoding: a model drafts with its own layers and generates exactly its own text.",
    epilog='Example: selfspec generate "Write a haiku." --model smollm2',
)
app.command(epilog='Example: selfspec generate "Write a haiku." --chat --model smollm2 --method suffix')(generate)
app.command(epilog='Example: selfspec chat --model smollm2 --system "You answer in one sentence."')(chat)
app.command(epilog="Example: selfspec serve --model smollm2 --port 8000")(serve)
app.command(epilog="Example: selfspec methods --json")(methods)
app.command(epilog="Example: selfspec info --model smollm2")(info)
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
    collection.pause()
    replace_closed_streams()
    tolerate_encoding()
    app()
