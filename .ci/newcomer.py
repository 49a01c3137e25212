"""Does what README.md says, as somebody who has never seen it: ``python3 .ci/newcomer.py ENVIRONMENT``.

The commands are read out of README.md and run one after the other, in order, each in a shell or as a program of its
own: the lines of blocks without a language, blocks of ``python``, blocks of ``bash``. ``selfspec serve`` runs until all
others are done, and what follows waits until it is ready. ``make`` makes the virtual environment ENVIRONMENT, which
later commands run in; in it ``pip install`` gets a ``--dry-run``, which resolves what would be installed, since the
environment has it already. What other commands write to the home folder goes to one that is deleted.

``--skip make`` leaves out the commands that begin so. The exit code is 1 as soon as a command fails or says nothing.
"""

from __future__ import annotations

import argparse
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
SERVER = "http://127.0.0.1:8000"
SECONDS = {"make": 1800, "pip": 600}
"""Deadlines by the first word of a command; others have 300."""
_BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)


class Command(NamedTuple):
    """What the README says to run.

    Attributes:
        language: empty for a line of a shell, ``python`` or ``bash`` for a block.
        text: as it stands there.
    """

    language: str
    text: str


def commands(page: str) -> Iterator[Command]:
    """The commands of a page, in order.

    Raises:
        ValueError: a block has a language that nothing here runs.
    """
    for language, block in _BLOCK.findall(page):
        if language not in ("", "python", "bash"):
            raise ValueError(f"a block of {language} cannot be run")
        texts = [block] if language == "python" else re.split(r"(?<!\\)\n", block.strip())
        yield from (Command(language, text) for text in texts if text.strip())


class Newcomer:
    """Runs commands in an environment.

    Args:
        environment: folder of the virtual environment.
        folder: for files that commands write.
    """

    def __init__(self, environment: Path, folder: Path) -> None:
        path = f"{environment / 'bin'}{os.pathsep}{os.environ['PATH']}"
        cache = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
        self._variables = {**os.environ, "VENV": str(environment), "PATH": path}
        self._own_home = {"HOME": str(folder), "XDG_CACHE_HOME": cache}  # with the kernels that are built already
        (folder / ".curlrc").write_text("fail\nsilent\nshow-error\n", encoding="utf-8")
        self._server: subprocess.Popen[bytes] | None = None

    def run(self, command: Command) -> None:
        """Runs one command, and prints what it is and how long it took.

        Raises:
            RuntimeError: it failed, said nothing, or took too long.
        """
        print(f"\n>>> {command.text.strip()}", flush=True)
        start = time.monotonic()
        if command.text.startswith("selfspec serve"):
            self._serve(command.text)
        else:
            self._wait_for(command)
        print(f"<<< {time.monotonic() - start:.0f} s", flush=True)

    def _wait_for(self, command: Command) -> None:
        word = command.text.split()[0]
        text = f"{command.text.partition('#')[0]} --dry-run" if word == "pip" else command.text
        program = ["python", "-c", text] if command.language == "python" else ["bash", "-c", text]
        shown = word == "make"  # its progress is the log of CI
        variables = self._variables | ({} if shown else self._own_home)
        if word == "pip":
            variables["SELFSPEC_WHEEL_KERNELS"] = "never"  # `make test-slow` builds a wheel with them
        done = subprocess.run(
            program,
            cwd=ROOT,
            env=variables,
            input=b"Hello!\n",
            stdout=None if shown else subprocess.PIPE,
            timeout=SECONDS.get(word, 300),
            check=False,
        )
        if not shown:
            print(done.stdout.decode(errors="replace"), flush=True)
        if done.returncode or not (shown or done.stdout.strip()):
            raise RuntimeError(f"exit code {done.returncode}" if done.returncode else "it printed nothing")

    def _serve(self, command: str) -> None:
        self._server = subprocess.Popen(
            ["bash", "-c", f"exec {command}"], cwd=ROOT, env=self._variables | self._own_home
        )
        deadline = time.monotonic() + 120
        while self._server.poll() is None and time.monotonic() < deadline:
            try:
                urllib.request.urlopen(f"{SERVER}/ready", timeout=5).close()
            except (urllib.error.URLError, OSError):
                time.sleep(0.2)
            else:
                return
        raise RuntimeError("the server is not ready")

    def close(self) -> None:
        """Ends the server as Ctrl-C does."""
        if self._server is not None and self._server.poll() is None:
            self._server.send_signal(signal.SIGINT)
            self._server.wait(timeout=60)


def main() -> int:
    """Runs all commands of README.md."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("environment", type=Path)
    parser.add_argument("--skip", help="the first word of commands to leave out")
    options = parser.parse_args()
    found = list(commands((ROOT / "README.md").read_text(encoding="utf-8")))
    with tempfile.TemporaryDirectory() as folder:
        newcomer = Newcomer(options.environment.resolve(), Path(folder))
        try:
            for command in found:
                if command.text.split()[0] != options.skip:
                    newcomer.run(command)
        except (RuntimeError, subprocess.SubprocessError) as error:
            print(f"README.md: this failed: {error}", file=sys.stderr)
            return 1
        finally:
            newcomer.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
