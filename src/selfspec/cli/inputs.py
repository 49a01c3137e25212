"""What the options of a command name: prompt, settings of the method, state file, sampling parameters."""

import contextlib
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from selfspec.errors import InvalidPromptError, InvalidSettingError, StateError

if TYPE_CHECKING:
    from selfspec.engine import Engine
    from selfspec.types import SamplingParams


def read_prompt(prompt: str | None, prompt_file: Path | None) -> str:
    """Reads the prompt unchanged, a final newline included; from standard input if neither argument is given."""
    if prompt is not None and prompt_file is not None:
        raise InvalidPromptError("give the prompt as PROMPT or with --prompt-file, not both")
    if prompt is not None:
        return prompt
    if prompt_file is not None:
        return decode_utf8(_read_file(prompt_file, "prompt file"), f"prompt file '{prompt_file}'")
    if sys.stdin.isatty():
        raise InvalidPromptError("there is no prompt; give PROMPT, --prompt-file, or text on standard input")
    return decode_utf8(sys.stdin.buffer.read(), "the prompt on standard input")


def decode_utf8(content: bytes, source: str) -> str:
    """Decodes UTF-8; ``source`` names the bytes in the error message."""
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise InvalidPromptError(
            f"{source} is not UTF-8: byte 0x{content[error.start]:02x} at offset {error.start}; save it as UTF-8"
        ) from error


def read_settings(
    method: str, assignments: Sequence[str] | None, state: Path | None = None, *, writes_state: bool = True
) -> dict[str, str]:
    """Reads ``--set`` and checks ``--state``, before the model is loaded.

    Without ``writes_state`` the state file has to exist.
    """
    settings = parse_assignments(assignments or ())
    if state is not None:
        _check_state(method, state, writes=writes_state)
    return settings


def parse_assignments(assignments: Sequence[str], source: str = "--set") -> dict[str, str]:
    """Parses ``KEY=VALUE`` strings; ``source`` names the option or command in the error message."""
    settings: dict[str, str] = {}
    for assignment in assignments:
        key, equals, value = (text.strip() for text in assignment.partition("="))
        if not key or not equals:
            raise InvalidSettingError(f"{source} takes KEY=VALUE, not '{assignment}'")
        if key in settings:
            raise InvalidSettingError(f"{source} gives '{key}' twice")
        settings[key] = value
    return settings


def sampling_params(options: Mapping[str, Any]) -> "SamplingParams":
    """Makes sampling parameters of the options of the same names."""
    from selfspec.types import SamplingParams

    values = dict(options)
    if "stop" in values:
        values["stop"] = tuple(values["stop"] or ())
    if values.get("json_schema") is not None:
        path = values["json_schema"]
        values["json_schema"] = decode_utf8(_read_file(path, "--json-schema"), f"--json-schema '{path}'")
    return SamplingParams(**values)


@contextlib.contextmanager
def kept_state(engine: "Engine", path: Path | None) -> Iterator[None]:
    """Loads the state from a file, if it exists, and saves the state to it at the end, even after an interrupt.

    Waits at the end until the files of ``--cache-dir`` are written.
    """
    if path is not None:
        engine.method.state()  # raises if the method's settings leave nothing to save
        if path.exists():
            engine.load_state(path)
    try:
        yield
    finally:
        if path is not None:
            engine.save_state(path)
        engine.flush()


def _check_state(method: str, path: Path, *, writes: bool) -> None:
    from selfspec.methods import METHODS, find_method
    from selfspec.methods.state import check_destination, check_source

    if not find_method(method).learns:
        learning = ", ".join(name for name, other in METHODS.items() if other.learns)
        raise StateError(
            f"{method} learns nothing from request to request, so it has no state to load or save; "
            f"leave --state out{f', or choose a method that learns: {learning}' if learning else ''}"
        )
    if writes:
        check_destination(path)
    else:
        check_source(path)


def _read_file(path: Path, source: str) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise InvalidPromptError(f"cannot read {source} '{path}': {error.strerror}") from error
