"""Builds the kernels, ``kernels.cpp`` and its headers, for a level of the processor's instructions.

The wheel's build hook and the build at first use are this one, with the same options, so that a level gives the same
bits whichever built it (with the same compiler). The hook imports this module where torch is not installed.
"""

import hashlib
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from selfspec.runtimes.levels import Level

SOURCE = Path(__file__).with_name("kernels.cpp")

BUILT_FOLDER = Path(__file__).with_name("built")
"""Where a wheel has its libraries; there is no such folder in a checkout."""

_FLAGS = ("-O3", "-std=c++17", "-fPIC", "-fno-math-errno", "-fno-trapping-math", "-ffp-contract=off")
_SECONDS = 600


class KernelBuildError(Exception):
    """There is no compiler, or it could not build the kernels, or they cannot be loaded. The target falls back."""


def library_name(level: Level) -> str:
    """The name of the file of a level's library.

    Args:
        level: the level.
    """
    return f"kernels-{level.name}.so"


def find_compiler() -> list[str]:
    """The command of the C++ compiler: that of the environment variable ``CXX``, else g++ or clang++.

    Raises:
        KernelBuildError: there is none.
    """
    if command := shlex.split(os.environ.get("CXX", "")):
        return command
    compiler = shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        raise KernelBuildError("there is no C++ compiler; install g++, or name one in the environment variable CXX")
    return [compiler]


def build_key(level: Level) -> str:
    """A short name of what a library is built from: the sources, the level and the options.

    Args:
        level: the level.
    """
    files = (SOURCE, *sorted(SOURCE.parent.glob("*.h")))
    options = repr((level.machine, _options(level)))
    return hashlib.sha256(b"".join(path.read_bytes() for path in files) + options.encode()).hexdigest()[:16]


def build(level: Level, library: Path) -> None:
    """Builds the library of a level. It appears at its place at once, so that no other process loads half a file.

    Args:
        level: the level; the compiler need not run on a processor that has it.
        library: the file to write; its folder is created.

    Raises:
        KernelBuildError: it could not be built.
    """
    compiler = find_compiler()
    try:
        library.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=library.parent) as folder:
            compiled, linked = Path(folder) / "kernels.o", Path(folder) / library.name
            is_clang = "clang" in _run([*compiler, "--version"])
            openmp = ("-Xclang", "-fopenmp") if sys.platform == "darwin" else ("-fopenmp",)
            _run([*compiler, *_options(level), *openmp, "-c", str(SOURCE), "-o", str(compiled)])
            _run([*compiler, "-shared", *_link_options(is_clang), str(compiled), "-o", str(linked)])
            linked.replace(library)
    except (OSError, subprocess.SubprocessError) as error:
        detail = (getattr(error, "stderr", None) or str(error)).strip().splitlines()[-1:]
        name = shlex.join(compiler)
        raise KernelBuildError(f"the kernels could not be built with {name}: {' '.join(detail)}") from error


def _options(level: Level) -> tuple[str, ...]:
    return (*_FLAGS, *level.flags, *shlex.split(os.environ.get("CXXFLAGS", "")))


def _link_options(is_clang: bool) -> tuple[str, ...]:
    """The library names no OpenMP runtime where that of torch, which is in the process, has what it needs.

    A second runtime would have threads of its own, which wait actively beside those of torch.
    """
    if sys.platform == "darwin":
        return ("-undefined", "dynamic_lookup")
    return ("-fopenmp",) if is_clang else ("-s",)


def _run(command: list[str]) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=_SECONDS).stdout
