"""Processes of a Ray that a test started: their folder, their replicas, and their end."""

import os
import signal
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

ENDS_WITHIN = 30.0


@contextmanager
def ray_folder() -> Iterator[dict[str, str]]:
    """The environment of a Ray with a folder of its own, whose processes are ended if they do not end themselves.

    The folder's path is short, since that of a socket in it must be.
    """
    with tempfile.TemporaryDirectory(prefix="ray", dir="/tmp", ignore_cleanup_errors=True) as folder:
        try:
            yield {
                "RAY_TMPDIR": folder,
                "RAY_ADDRESS": "",
                "RAY_USAGE_STATS_ENABLED": "0",
                "RAY_AUTH_MODE": "disabled",
                "RAY_metrics_report_interval_ms": "500",
            }
        finally:
            _end(folder)


def replicas(folder: str) -> set[int]:
    """The ids of the processes of Ray Serve's replicas."""
    return {pid for pid, title in _processes(folder).items() if title.startswith("ray::ServeReplica")}


def _end(folder: str) -> None:
    """Waits for all processes of the folder, and kills those that stay."""
    until = time.monotonic() + ENDS_WITHIN
    while (left := _processes(folder)) and time.monotonic() < until:
        time.sleep(0.2)
    for pid in left:
        os.kill(pid, signal.SIGKILL)


def _processes(folder: str) -> dict[int, str]:
    """The titles of the processes that have this folder in their environment, without this one."""
    found = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                if f"RAY_TMPDIR={folder}".encode() in (entry / "environ").read_bytes().split(b"\0"):
                    found[int(entry.name)] = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()
            except OSError:  # it ended, or is another user's
                continue
    return found
