"""Terminal output: streamed text, colours, warnings."""

import contextlib
import io
import logging
import os
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from selfspec.errors import SelfSpecWarning

if TYPE_CHECKING:
    from rich.console import Console

    from selfspec.engine import Engine
    from selfspec.types import TextPiece

WIDTH = 100
"""Columns of a table where the output is not a terminal."""

_GREEN, _PLAIN = "\x1b[32m", "\x1b[0m"


class TextWriter:
    """Writes the pieces of an output, and flushes each; colours accepted draft tokens if asked to and possible."""

    def __init__(self, stream: TextIO, *, show_drafts: bool = False) -> None:
        self._stream = stream
        self._colour = show_drafts and takes_colour(stream)
        self._at_line_start = True

    def write(self, piece: "TextPiece") -> None:
        """Writes one piece."""
        if not piece.text:
            return
        coloured = self._colour and piece.origin == "draft"
        self._stream.write(f"{_GREEN}{piece.text}{_PLAIN}" if coloured else piece.text)
        self._stream.flush()
        self._at_line_start = piece.text.endswith("\n")

    def end(self) -> None:
        """Ends the last line on a terminal. In a file or a pipe, nothing is added to the text."""
        if self._stream.isatty() and not self._at_line_start:
            self._stream.write("\n")
            self._stream.flush()
            self._at_line_start = True

    def end_line_on(self, other: TextIO) -> None:
        """Starts a new line on another stream, if its next text would follow this one's on the same line.

        They share lines if ``other`` is a terminal, or the same pipe or file.
        """
        if not self._at_line_start and (other.isatty() or _are_same(self._stream, other)):
            other.write("\n")
            other.flush()


def _are_same(one: TextIO, other: TextIO) -> bool:
    try:
        return os.path.sameopenfile(one.fileno(), other.fileno())
    except (OSError, ValueError):  # a stream without a file
        return False


def tolerate_encoding() -> None:
    """Replaces characters that the terminal's encoding lacks with question marks, instead of raising an error."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")


def replace_closed_streams() -> None:
    """Puts the null device in the place of standard streams that were closed, as by ``>&-``, which Python has not."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, Path(os.devnull).open(mode, encoding="utf-8"))  # noqa: SIM115


def takes_colour(stream: TextIO) -> bool:
    """Whether to use colours: not with ``NO_COLOR``, always with ``FORCE_COLOR``, otherwise if it is a terminal."""
    if os.environ.get("NO_COLOR"):
        return False
    if os.environ.get("FORCE_COLOR"):
        return True
    return stream.isatty() and os.environ.get("TERM") != "dumb"


def make_console() -> "Console":
    """A console for standard output, with colours if ``takes_colour``."""
    from rich.console import Console

    console = Console(highlight=False, color_system="auto" if takes_colour(sys.stdout) else None)
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console.width = WIDTH
    return console


def silence_libraries() -> None:
    """Turns off warnings and progress bars of transformers and the hub client; downloads show theirs on a terminal.

    The log of selfspec itself goes to standard error.
    """
    from huggingface_hub.utils.logging import disable_propagation
    from huggingface_hub.utils.tqdm import disable_progress_bars
    from transformers.utils.logging import disable_progress_bar, set_verbosity

    warnings.simplefilter("ignore")
    if not sys.stderr.isatty():
        disable_progress_bars()
    disable_progress_bar()  # type: ignore[no-untyped-call]
    set_verbosity(logging.CRITICAL)
    disable_propagation()  # the hub client's logger has a handler of its own, so that its lines would come twice
    logging.getLogger("selfspec").setLevel(logging.INFO)
    logging.basicConfig(format="%(message)s")


def prepare_method(engine: "Engine") -> None:
    """Prepares the engine's method and shows progress on the terminal, since it may take seconds."""
    from rich.console import Console

    with own_warnings(), Console(stderr=True).status("") as status:
        engine.method.prepare(lambda text: status.update(f"preparing {engine.method.name}: {text}"))


@contextlib.contextmanager
def own_warnings() -> Iterator[None]:
    """Collects the warnings of selfspec and prints them to standard error at the end, one per line."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", SelfSpecWarning)
        try:
            yield
        finally:
            for warning in caught:
                print(f"warning: {warning.message}", file=sys.stderr)  # noqa: T201
