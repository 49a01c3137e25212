"""The command line. Torch and transformers are imported by the commands that need them, not here."""

from selfspec.cli.app import main

__all__ = ["main"]
