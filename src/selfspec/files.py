"""Atomic writes, and the user's cache folder, whose contents can be recreated and may be deleted at any time."""

import contextlib
import errno
import os
import shutil
import stat
import sys
import tempfile
import uuid
from pathlib import Path


def cache_folder() -> Path:
    """The folder of compiled kernels, latency profiles, low-bit weights and the chat history."""
    if sys.platform == "win32" and "LOCALAPPDATA" in os.environ:
        return Path(os.environ["LOCALAPPDATA"]) / "selfspec" / "cache"
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "selfspec"
    except RuntimeError:  # the system knows no home of this user, as in some containers
        return Path(tempfile.gettempdir()) / f"selfspec-{os.getuid()}"


def check_own(path: Path) -> None:
    """Refuses a file of the cache folder that another user made or could change, since what is in it is run.

    Raises ``PermissionError``; other ``OSError`` where there is no such file. Members of the user's own group, which
    has no other members on most systems, may write it.
    """
    if sys.platform == "win32":
        return
    for each in (path, path.parent):
        found = each.stat()
        by_others = stat.S_IWOTH if found.st_gid == os.getgid() else stat.S_IWOTH | stat.S_IWGRP
        if found.st_uid not in (0, os.getuid()) or found.st_mode & by_others:
            raise PermissionError(errno.EPERM, "another user made it or could change it; delete it", str(each))


def replace_file(path: Path, content: str | bytes) -> None:
    """Writes a temporary file in the same folder, then renames it to ``path``, so that readers see a whole file.

    If writing fails, an older file stays as it was and the temporary file is removed. Several processes may write the
    same path at once; the last rename counts. The permissions of an existing file are kept. Text is written as UTF-8.
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
