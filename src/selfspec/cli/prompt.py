"""Reads the prompt from the command line, a file, or standard input."""

import sys
from pathlib import Path

from selfspec.errors import InvalidPromptError


def read_prompt(prompt: str | None, prompt_file: Path | None) -> str:
    """Reads the prompt unchanged; a final newline is part of it.

    Args:
        prompt: the prompt from the command line.
        prompt_file: a file with the prompt.

    Returns:
        The prompt; read from standard input if neither argument is given.

    Raises:
        InvalidPromptError: there are two sources or none, or the source cannot be read or is not UTF-8.
    """
    if prompt is not None and prompt_file is not None:
        raise InvalidPromptError("give the prompt as PROMPT or with --prompt-file, not both")
    if prompt is not None:
        return prompt
    if prompt_file is not None:
        return decode(_read_file(prompt_file), f"prompt file '{prompt_file}'")
    if sys.stdin.isatty():
        raise InvalidPromptError("there is no prompt; give PROMPT, --prompt-file, or text on standard input")
    return decode(sys.stdin.buffer.read(), "the prompt on standard input")


def _read_file(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise InvalidPromptError(f"cannot read prompt file '{path}': {error.strerror}") from error


def decode(content: bytes, source: str) -> str:
    """Decodes UTF-8.

    Args:
        content: the bytes.
        source: where they come from, for the message.

    Returns:
        The text.

    Raises:
        InvalidPromptError: the bytes are not UTF-8.
    """
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise InvalidPromptError(
            f"{source} is not UTF-8: byte 0x{content[error.start]:02x} at offset {error.start}; save it as UTF-8"
        ) from error
