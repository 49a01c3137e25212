"""How fast the machine reads memory."""

from __future__ import annotations

import subprocess
import tempfile
from pathlib import Path

from gguf_sides.process import FOLDER, environment
from selfspec.runtimes.kernel_build import choose_level, find_compiler

_MEBIBYTES, _PASSES = 512, 9


class ReadBandwidth:
    """The program ``read.cpp``, built for this processor; a context manager that removes it.

    Args:
        threads: that read.
    """

    def __init__(self, threads: int) -> None:
        self._threads = threads
        self._folder = tempfile.TemporaryDirectory()
        self._program = Path(self._folder.name) / "read"
        options = ["-O3", "-std=c++17", "-fopenmp", *choose_level().flags]
        source = FOLDER / "gguf_sides" / "read.cpp"
        subprocess.run([*find_compiler(), *options, str(source), "-o", str(self._program)], check=True)

    def measure(self) -> float:
        """Bytes a second, of the fastest of some passes."""
        command = [str(self._program), str(_MEBIBYTES), str(_PASSES)]
        finished = subprocess.run(command, env=environment(self._threads), capture_output=True, text=True, check=True)
        return max(map(float, finished.stdout.split()))

    def __enter__(self) -> ReadBandwidth:
        return self

    def __exit__(self, *_: object) -> None:
        self._folder.cleanup()
