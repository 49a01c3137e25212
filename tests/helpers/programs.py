"""C++ programs in tests/runtimes that run the kernels without Python."""

import hashlib
import shutil
import subprocess
import tempfile
from pathlib import Path

import torch

from selfspec.files import cache_folder
from selfspec.runtimes.kernel_build import _FLAGS, SOURCE

PROGRAMS = Path(__file__).parents[1] / "runtimes"
LOGITS = 9 * 100
"""Numbers at the start of each line of ``whole_forward.cpp``; drawn tokens follow."""


def run_program(
    name: str, binary: Path, compiler: str, *options: str, emulator: tuple[str, ...] = ()
) -> list[list[str]]:
    """Builds a program, which checks much by itself, and runs it; it is built once a machine, while nothing changes.

    Args:
        name: of its file.
        binary: the file to write.
        compiler: its command.
        options: for the compiler, after those of the kernels.
        emulator: the command that runs binaries of the compiler.

    Returns:
        The words of each line that it prints.
    """
    command = [compiler, *_FLAGS, "-fopenmp", *options]
    built = cache_folder() / "test-programs" / _key(command, name)
    if not built.exists():
        source = ["-I", str(SOURCE.parent), "-I", str(PROGRAMS), str(PROGRAMS / name), "-o", str(binary)]
        subprocess.run([*command, *source], check=True, capture_output=True, timeout=300)
        built.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=built.parent) as folder:  # appears at once, for other workers
            Path(shutil.copy(binary, folder)).replace(built)
    shutil.copy(built, binary)
    ran = subprocess.run([*emulator, str(binary)], check=True, capture_output=True, text=True, timeout=300)
    return [line.split() for line in ran.stdout.splitlines()]


def _key(command: list[str], name: str) -> str:
    """A name of what a program is made from: the compiler, its options, and all sources."""
    version = subprocess.run([command[0], "--version"], check=True, capture_output=True).stdout
    files = (PROGRAMS / name, *sorted(PROGRAMS.glob("*.h")), *sorted(SOURCE.parent.glob("*.h")), SOURCE)
    content = b"".join(file.name.encode() + file.read_bytes() for file in files)
    return f"{name}-{hashlib.sha256(version + repr(command).encode() + content).hexdigest()[:24]}"


def assert_forwards_close(lines: list[list[str]], others: list[list[str]]) -> None:
    """Compares what ``whole_forward.cpp`` printed twice: float32 and bfloat16 in turns, at 16, 8, 6 and 4 bits."""
    assert len(lines) == len(others) == 8
    for index, (line, other) in enumerate(zip(lines, others, strict=True)):
        logits, expected = (torch.tensor([*map(float, words[:LOGITS])]) for words in (line, other))
        tolerance = (1e-4 if index == 0 else 2e-3) if index % 2 == 0 else 5e-2
        torch.testing.assert_close(logits, expected, rtol=tolerance, atol=tolerance)
        assert logits.std() > 0.5
        assert len(line) == len(other) > LOGITS
    assert lines[0][LOGITS:] == others[0][LOGITS:], "float32 draws other tokens"
