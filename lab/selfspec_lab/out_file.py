"""Files that commands write their results to."""

from pathlib import Path

from selfspec.errors import InvalidParameterError


def check_out(path: Path) -> None:
    """Checks that a report can be written to a path.

    Raises:
        InvalidParameterError: its folder is missing, or it is a folder.
    """
    if path.is_dir():
        raise InvalidParameterError(f"--out '{path}' is a folder; name a file")
    if not path.absolute().parent.is_dir():
        raise InvalidParameterError(f"the folder of --out '{path}' is missing; make it first")
