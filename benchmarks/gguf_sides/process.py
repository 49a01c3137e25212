"""The processes of the sides, as the program sees them, and one that keeps a processor busy."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parents[1]
BUSY = """
import os
parent = os.getppid()
while os.getppid() == parent:
    for _ in range(10**6):
        pass
"""
"""A program that computes until the process that began it is gone."""


def environment(threads: int) -> dict[str, str]:
    """The environment of a process with as many threads, which finds this package."""
    paths = [str(FOLDER), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "OMP_NUM_THREADS": str(threads), "PYTHONPATH": os.pathsep.join(paths)}


class Process:
    """A side in a process of its own; a context manager that ends it.

    Args:
        name: class of the side, with its module or of ``gguf_sides.sides``.
        threads: of the process.
        python: the interpreter; by default this one.
        **arguments: of the side.

    Raises:
        RuntimeError: it failed; so do the methods.
    """

    def __init__(self, name: str, threads: int, python: str = sys.executable, **arguments: Any) -> None:
        self._name = name
        self._process = subprocess.Popen(
            [python, "-m", "gguf_sides.worker", name, json.dumps(arguments)],
            env=environment(threads),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        try:
            self._answer()
        except BaseException:
            self.close()
            raise

    def ask(self, do: str, **arguments: Any) -> Any:
        """Calls a method of the side."""
        assert self._process.stdin
        self._process.stdin.write(json.dumps({"do": do, "with": arguments}) + "\n")
        self._process.stdin.flush()
        return self._answer()

    def close(self) -> None:
        """Ends the process."""
        self._process.kill()
        self._process.communicate()

    def __enter__(self) -> Process:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _answer(self) -> Any:
        assert self._process.stdout
        line = self._process.stdout.readline()
        reply = json.loads(line) if line else {"error": f"the process ended with status {self._process.wait()}"}
        if "error" in reply:
            raise RuntimeError(f"{self._name}: {reply['error']}")
        return reply["answer"]


def command_seconds(command: list[str], threads: int) -> float:
    """Wall time of a command, from its start to its end.

    Raises:
        RuntimeError: it failed.
    """
    started = time.perf_counter()
    finished = subprocess.run(command, env=environment(threads), capture_output=True, text=True, check=False)
    seconds = time.perf_counter() - started
    if finished.returncode:
        raise RuntimeError(f"{' '.join(command)} failed: {finished.stderr.strip().splitlines()[-1:]}")
    return seconds


@contextmanager
def busy_process() -> Iterator[None]:
    """One process that computes all the time, until this one ends it or is gone."""
    process = subprocess.Popen([sys.executable, "-c", BUSY])
    try:
        yield
    finally:
        process.kill()
        process.wait()
