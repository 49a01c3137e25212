"""The kernels of the CPU: ``kernels.cpp`` and its headers, built once with the machine's own compiler.

torch multiplies a few rows with bfloat16 weights at half the memory's speed, because its kernels rearrange the weights
in every call; weights rearranged ahead would be a second copy of the model. A kernel that reads the rows of the weights
as they are needs neither. On processors without instructions for bfloat16 torch multiplies element by element, and
these kernels, which widen weights in registers, take prompts of any length.
"""

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from ctypes import POINTER, c_int, c_long, c_void_p
from functools import cache
from pathlib import Path
from typing import Any

import torch

from selfspec.runtimes.structures import Linear, NativeCall
from selfspec.user_cache import cache_folder

DTYPES = {torch.float32: "float32", torch.bfloat16: "bfloat16"}
"""The dtypes that have kernels, and how their functions' names end."""

_VERIFIED = 128
"""Rows of the widest verification; ``kernels.cpp`` has the same."""

_SOURCE = Path(__file__).with_name("kernels.cpp")
_HEADERS = ("vectors.h", "packed.h", "product.h", "attention.h", "rows.h", "forward.h")
_FLAGS = (
    *("-O3", "-march=native", "-std=c++17", "-fopenmp", "-fPIC", "-shared"),
    *("-fno-math-errno", "-fno-trapping-math", "-ffp-contract=off"),
)


class KernelBuildError(Exception):
    """There is no compiler, or it could not build the kernels. The target falls back; no user sees it."""


@cache
def load() -> ctypes.CDLL:
    """The built kernels, from the user's cache folder if they were built before.

    Raises:
        KernelBuildError: they cannot be built or loaded.
    """
    built = _build()
    try:
        library = ctypes.CDLL(str(built))
    except OSError as error:
        raise KernelBuildError(f"the kernels cannot be loaded: {error}; delete {built}") from error
    for suffix in DTYPES.values():
        signatures: dict[str, list[Any]] = {
            "product": [POINTER(Linear), *[c_void_p] * 2, *[c_long] * 3, c_int],
            "pack": [c_void_p, POINTER(Linear), *[c_long] * 2, c_int],
            "forward": [POINTER(NativeCall), c_void_p, c_long],
        }
        for name, arguments in signatures.items():
            function = getattr(library, f"{name}_{suffix}")
            function.argtypes, function.restype = arguments, None
        for name in ("most_rows", "most_attending"):
            function = getattr(library, f"{name}_{suffix}")
            function.argtypes, function.restype = [], c_long
    return library


def most_rows(dtype: torch.dtype) -> int:
    """Most rows of one sequence whose products run in the kernels; with more, torch is faster on this processor.

    Args:
        dtype: one of ``DTYPES``.

    Raises:
        KernelBuildError: the kernels cannot be built.
    """
    return int(getattr(load(), f"most_rows_{DTYPES[dtype]}")())


def most_attending(dtype: torch.dtype) -> int:
    """Most rows of one sequence whose attention runs in the kernels; see ``most_rows``."""
    return int(getattr(load(), f"most_attending_{DTYPES[dtype]}")())


def verifies_exactly(dtype: torch.dtype) -> bool:
    """Whether the kernels run every verification, so that its rows are bit for bit those of single steps.

    It is so in bfloat16 on processors without AMX, for models that the compiled runtime takes. In float32 rows differ
    by rounding.

    Args:
        dtype: of the weights.
    """
    try:
        return dtype == torch.bfloat16 and most_attending(dtype) >= _VERIFIED
    except KernelBuildError:
        return False


def _build() -> Path:
    source = b"".join(path.read_bytes() for path in (_SOURCE, *map(_SOURCE.with_name, _HEADERS)))
    name = hashlib.sha256(source + repr((_FLAGS, platform.machine(), _processor())).encode()).hexdigest()[:16]
    built = cache_folder() / f"kernels-{name}.so"
    if built.exists():
        return built
    compiler = os.environ.get("CXX") or shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        raise KernelBuildError("there is no C++ compiler; install g++, or name one in the environment variable CXX")
    try:
        built.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=built.parent) as folder:
            made = Path(folder) / built.name
            command = [compiler, *_FLAGS, str(_SOURCE), "-o", str(made)]
            subprocess.run(command, check=True, capture_output=True, text=True, timeout=300)
            made.replace(built)  # at once, so that no other process loads half a file
    except (OSError, subprocess.SubprocessError) as error:
        detail = (getattr(error, "stderr", None) or str(error)).strip().splitlines()[-1:]
        raise KernelBuildError(f"the kernels could not be built with {compiler}: {' '.join(detail)}") from error
    return built


def _processor() -> str:
    """What ``-march=native`` depends on: the instructions that this processor has."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line for line in lines if line.startswith(("flags", "Features"))), platform.processor())
