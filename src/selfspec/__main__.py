"""``python -m selfspec`` is the command ``selfspec``."""

from selfspec.cli import main

main()
