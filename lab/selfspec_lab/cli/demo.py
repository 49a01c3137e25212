"""``selfspec demo``: a real model and the bundled checkpoints, by several methods."""

from typing import Annotated

import typer

from selfspec.cli.terminal import silence_libraries

WIDTH = 100
"""Columns where there is no terminal that has a width."""


def demo(
    max_new_tokens: Annotated[int, typer.Option(help="Longest output of a prompt.", min=2)] = 48,
    device: Annotated[str, typer.Option(help="As torch names it, or auto: an accelerator if there is one.")] = "cpu",
) -> None:
    """Answers with a real model by several methods, and compares their speed and text with plain decoding."""
    from rich.console import Console

    from selfspec_lab.demo import run_demo

    silence_libraries()
    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = WIDTH
    if not run_demo(console, max_new_tokens=max_new_tokens, device=device):
        raise typer.Exit(1)
