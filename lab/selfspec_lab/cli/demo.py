"""``selfspec demo``: several methods on a real model and on the bundled checkpoints."""

from typing import Annotated

import typer

from selfspec.cli.api import make_console, options, silence_libraries


def demo(
    max_new_tokens: Annotated[int, typer.Option(help="Longest output.", min=2)] = 48,
    device: options.Device = "cpu",
) -> None:
    """Generates with several methods, and compares their speed and text with plain decoding.

    Example: selfspec demo --max-new-tokens 32
    """
    from selfspec_lab.demo import run_demo

    silence_libraries()
    if not run_demo(make_console(), max_new_tokens=max_new_tokens, device=device):
        raise typer.Exit(1)
