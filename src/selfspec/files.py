"""Writes files atomically: a reader sees the older file or the new one, never a part of it."""

import contextlib
import os
import shutil
import uuid
from pathlib import Path


def replace_file(path: Path, content: str | bytes) -> None:
    """Writes a temporary file in the same folder, then renames it to ``path``.

    If writing fails, an older file stays as it was and the temporary file is removed. Several processes may write the
    same path at once; the last rename counts.

    Args:
        path: the file, made or replaced. Its permissions are kept if it exists.
        content: text, written as UTF-8, or bytes.

    Raises:
        OSError: the file cannot be written.
    """
    partial = path.with_name(f".{path.name[:64]}.{uuid.uuid4().hex}.part")
    try:
        with partial.open("xb") as file:
            file.write(content.encode("utf-8") if isinstance(content, str) else content)
            file.flush()
            os.fsync(file.fileno())
        if path.exists():
            shutil.copymode(path, partial)
        partial.replace(path)
    finally:
        with contextlib.suppress(OSError):
            partial.unlink(missing_ok=True)
