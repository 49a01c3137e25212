"""The command line inside the process of the tests."""

from typing import Any

from typer.testing import CliRunner, Result

from selfspec.cli.command_line import app


def run(*arguments: str, **options: Any) -> Result:
    """Runs ``selfspec`` with arguments.

    Args:
        *arguments: what follows ``selfspec``.
        **options: of ``CliRunner.invoke``, such as ``input``.

    Returns:
        Exit code, standard output and standard error.
    """
    result: Any = CliRunner().invoke(app, list(arguments), **options)
    return result
