"""A real ``selfspec serve``, in a process of its own."""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

STARTS_WITHIN = 120.0


@dataclass
class ServerProcess:
    """A server that takes requests.

    Attributes:
        url: where it listens, without a slash at its end.
        process: the server.
        log: the file that it writes its log to.
    """

    url: str
    process: "subprocess.Popen[str]"
    log: Path


@contextmanager
def serve(
    folder: Path, *arguments: str, env: Mapping[str, str] | None = None, seconds: float = STARTS_WITHIN
) -> Iterator[ServerProcess]:
    """Starts a server on a free port, and ends it.

    Args:
        folder: for its output and its log.
        *arguments: what follows ``selfspec serve``.
        env: more environment variables.
        seconds: it has to take requests by then.
    """
    output, log = folder / "output", folder / "log"
    command = [sys.executable, "-m", "selfspec", "serve", "--port", "0", *arguments]
    with output.open("w") as stdout, log.open("w") as stderr:
        process = subprocess.Popen(
            command,
            stdout=stdout,
            stderr=stderr,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "2", "PYTHONUNBUFFERED": "1", **(env or {})},
        )
    try:
        yield ServerProcess(_url(process, output, log, seconds), process, log)
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _url(process: "subprocess.Popen[str]", output: Path, log: Path, seconds: float) -> str:
    """The address that the server prints when it takes requests."""
    limit = time.monotonic() + seconds
    while time.monotonic() < limit:
        if found := re.search(r" at (https?://\S+)", output.read_text()):
            return found[1]
        if process.poll() is not None:
            raise AssertionError(f"the server ended with {process.returncode}:\n{output.read_text()}{log.read_text()}")
        time.sleep(0.05)
    raise AssertionError(f"the server did not start within {seconds:.0f} s:\n{log.read_text()}")
