"""Folders that commands write checkpoints to: checked first, then written whole or not at all."""

import contextlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from selfspec.errors import ModelLoadError


def check_output_folder(folder: Path, *, replaced_with: str | None = None) -> None:
    """Checks that a checkpoint can be written to a folder.

    Args:
        folder: where to.
        replaced_with: name of a file; a folder that has it may be replaced.

    Raises:
        ModelLoadError: the path is a file, a folder that is not empty, or inside of a file.
    """
    if folder.is_dir():
        if any(folder.iterdir()) and not (replaced_with and (folder / replaced_with).is_file()):
            raise ModelLoadError(f"the folder '{folder}' is not empty; name a new or an empty one")
        return
    existing = next(parent for parent in (folder, *folder.absolute().parents) if parent.exists())
    if not existing.is_dir():
        raise ModelLoadError(f"'{existing}' is a file; name a new or an empty folder")
    if not os.access(existing, os.W_OK):
        raise ModelLoadError(f"no permission to write in '{existing}'; name another folder")


def check_disk(needed: int, folder: Path, remedy: str) -> None:
    """Checks that as many bytes are free on the disk of a folder.

    Raises:
        ModelLoadError: they are not; the message ends with ``remedy``.
    """
    free = shutil.disk_usage(folder).free
    if needed > free:
        raise ModelLoadError(f"the checkpoint takes {needed:,} bytes, but {free:,} are free on the disk; {remedy}")


@contextlib.contextmanager
def written_whole(folder: Path) -> Iterator[Path]:
    """A folder to write into, whose files replace those of ``folder`` at the end. A failure leaves none of them.

    Raises:
        ModelLoadError: a file cannot be written.
    """
    partial = folder.absolute().with_name(f".{folder.absolute().name}.partial-{os.getpid()}")
    try:
        partial.mkdir(parents=True)
        yield partial
        folder.mkdir(exist_ok=True)
        for old in folder.iterdir():
            shutil.rmtree(old) if old.is_dir() else old.unlink()
        for file in partial.iterdir():
            file.rename(folder / file.name)
    except OSError as error:
        raise ModelLoadError(f"cannot write '{folder}': {error.strerror or error}") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
