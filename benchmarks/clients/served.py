"""``selfspec serve`` in a process of its own, for as long as a client runs."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

STARTS_WITHIN = 300.0
"""Seconds; the first use of a model by ``auto`` measures it."""


@dataclass(frozen=True)
class Served:
    """A server that takes requests.

    Attributes:
        url: without a slash at its end.
        log: the file of its log, a JSON object a line.
        process: the server.
    """

    url: str
    log: Path
    process: subprocess.Popen[str]


@contextmanager
def serve(arguments: Sequence[str], folder: Path, program: Sequence[str] = ("-m", "selfspec")) -> Iterator[Served]:
    """Starts a server on a free port, and ends it with SIGTERM.

    Args:
        arguments: what follows ``selfspec serve``.
        folder: for its output and its log.
        program: Python's arguments for ``selfspec``.

    Raises:
        RuntimeError: it did not start, or did not end with exit code 0.
    """
    output, log = folder / "server.out", folder / "server.log"
    command = [sys.executable, "-u", *program, "serve", "--port", "0", *arguments]
    with output.open("w") as stdout, log.open("w") as stderr:
        process = subprocess.Popen(command, stdout=stdout, stderr=stderr, text=True)
    try:
        yield Served(_url(process, output, log), log, process)
    finally:
        process.terminate()
        code = process.wait(120)
    if code != 0:
        raise RuntimeError(f"the server ended with exit code {code}; see {log}")


def _url(process: subprocess.Popen[str], output: Path, log: Path) -> str:
    limit = time.monotonic() + STARTS_WITHIN
    while time.monotonic() < limit and process.poll() is None:
        if found := re.search(r" at (https?://\S+)", output.read_text()):
            return found[1]
        time.sleep(0.1)
    raise RuntimeError(f"the server did not start; see {log}")
