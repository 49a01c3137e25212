"""What reaches the terminal: streamed text, colours, and nothing from the libraries below."""

import contextlib
import io
import logging
import os
import sys
import warnings
from collections.abc import Iterator
from typing import TYPE_CHECKING, TextIO

from selfspec.errors import NoGainWarning

if TYPE_CHECKING:
    from selfspec.types import TextPiece

_GREEN, _PLAIN = "\x1b[32m", "\x1b[0m"


class TextWriter:
    """Writes the pieces of an output as they come, each flushed.

    Args:
        stream: where to.
        show_drafts: colour the text of accepted draft tokens, if the stream takes colours.
    """

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
        """Ends the line on a terminal, so that what comes next has its own. A file or a pipe gets the text alone."""
        if self._stream.isatty() and not self._at_line_start:
            self._stream.write("\n")
            self._stream.flush()


def tolerate_encoding() -> None:
    """Lets characters that the terminal's encoding lacks become question marks, rather than errors."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")


def takes_colour(stream: TextIO) -> bool:
    """Whether to colour what goes there: ``NO_COLOR`` forbids, ``FORCE_COLOR`` forces, a terminal decides otherwise."""
    if os.environ.get("NO_COLOR"):
        return False
    if os.environ.get("FORCE_COLOR"):
        return True
    return stream.isatty() and os.environ.get("TERM") != "dumb"


def silence_libraries() -> None:
    """Keeps the warnings and progress bars of transformers and the hub client off the terminal.

    What selfspec itself logs goes to standard error.
    """
    from huggingface_hub.utils.tqdm import disable_progress_bars
    from transformers.utils.logging import disable_progress_bar, set_verbosity

    warnings.simplefilter("ignore")
    disable_progress_bars()
    disable_progress_bar()  # type: ignore[no-untyped-call]
    set_verbosity(logging.CRITICAL)
    logging.getLogger("selfspec").setLevel(logging.INFO)
    logging.basicConfig(format="%(message)s")


@contextlib.contextmanager
def own_warnings() -> Iterator[None]:
    """Shows the warnings of selfspec itself, one line each on standard error, once the output is complete."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", NoGainWarning)
        try:
            yield
        finally:
            for warning in caught:
                print(f"warning: {warning.message}", file=sys.stderr)  # noqa: T201
