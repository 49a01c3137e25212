"""The command line. Commands import torch and transformers when they run, so that ``--help`` is fast."""

from selfspec.cli.command_line import main

__all__ = ["main"]
