"""The compiled runtime of the CPU: ``kernels.cpp`` and ``forward.h``, built once with the machine's own compiler.

torch multiplies a few rows with bfloat16 weights at half the memory's speed, because its kernels lay the weights out
anew in every call; weights laid out ahead would be a second copy of the model. A kernel that reads the rows of the
weights as they are needs neither. On processors without instructions for bfloat16 torch multiplies element by element,
and the kernels, which widen weights on the way, take prompts of any length.
"""

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from ctypes import POINTER, Structure, c_float, c_int, c_long, c_void_p
from functools import cache
from pathlib import Path
from typing import Any

import torch

from selfspec.user_cache import cache_folder

DTYPES = {torch.float32: "float32", torch.bfloat16: "bfloat16"}
"""The dtypes there are kernels for, and how their functions' names end."""

_VERIFIED = 128
"""Rows of the widest verification; ``kernels.cpp`` has the same."""

_SOURCE = Path(__file__).with_name("kernels.cpp")
_INCLUDED = Path(__file__).with_name("forward.h")
_FLAGS = (
    *("-O3", "-march=native", "-std=c++17", "-fopenmp", "-fPIC", "-shared"),
    *("-fno-math-errno", "-fno-trapping-math", "-ffp-contract=off"),
)


class KernelBuildError(Exception):
    """There is no compiler, or it could not build the kernels. The target falls back; no user sees it."""


class Projection(Structure):
    """The weights of an attention branch up to its keys; ``kernels.cpp`` has the same."""

    _fields_ = (
        *((name, c_void_p) for name in ("norm", "weights", "bias")),
        ("epsilon", c_float),
        ("threads", c_int),
        *((name, c_long) for name in ("hidden", "heads", "key_heads", "head_dim")),
    )


class Mlp(Structure):
    """The weights of an MLP branch; ``kernels.cpp`` has the same."""

    _fields_ = (
        *((name, c_void_p) for name in ("norm", "gate_up", "gate_up_bias", "down", "down_bias")),
        ("epsilon", c_float),
        ("threads", c_int),
        *((name, c_long) for name in ("hidden", "inner")),
    )


class View(Structure):
    """What rows see through a window; ``forward.h`` has this and the next ones too."""

    _fields_ = (("visible", c_void_p), ("first", c_long))


class Turning(Structure):
    """Cosine and signed sine of the rows' positions."""

    _fields_ = (("cosine", c_void_p), ("sine", c_void_p), ("turned", c_long))


class NativeSublayer(Structure):
    """A branch of a forward: attention, or an MLP where there is no ``attention``."""

    _fields_ = (
        ("attention", POINTER(Projection)),
        ("mlp", POINTER(Mlp)),
        ("output", c_void_p),
        ("output_bias", c_void_p),
        ("scale", c_float),
        *((name, c_int) for name in ("layer", "view", "turn")),
    )


class Forward(Structure):
    """A forward over some rows: which sublayers, what is kept on the way, cache, what rows see, how they turn."""

    _fields_ = (
        ("sublayers", POINTER(NativeSublayer)),
        ("which", POINTER(c_int)),
        ("count", c_long),
        ("kept", POINTER(c_void_p)),
        ("kept_rows", POINTER(c_long)),
        ("caches", POINTER(c_void_p)),
        ("capacity", c_long),
        ("start", c_long),
        ("views", POINTER(View)),
        ("turns", POINTER(Turning)),
        ("threads", c_int),
    )


@cache
def load() -> ctypes.CDLL:
    """The built kernels, from the user's cache folder where they are there already.

    Raises:
        KernelBuildError: they are not there and cannot be built.
    """
    built = _build()
    try:
        library = ctypes.CDLL(str(built))
    except OSError as error:
        raise KernelBuildError(f"the kernels cannot be loaded: {error}; delete {built}") from error
    for suffix in DTYPES.values():
        signatures: dict[str, list[Any]] = {
            "project": [POINTER(Projection), *[c_void_p] * 3, c_long, *[c_void_p] * 2, *[c_long] * 3],
            "attend": [POINTER(Projection), *[c_void_p] * 2, *[c_long] * 3, c_void_p, c_float, c_void_p, c_long],
            "mlp": [POINTER(Mlp), c_void_p, c_void_p, c_long],
            "product": [*[c_void_p] * 4, *[c_long] * 3, c_int],
            "forward": [POINTER(Forward), c_void_p, c_long],
        }
        for name, arguments in signatures.items():
            function = getattr(library, f"{name}_{suffix}")
            function.argtypes, function.restype = arguments, None
        for name in ("most_rows", "most_attending"):
            function = getattr(library, f"{name}_{suffix}")
            function.argtypes, function.restype = [], c_long
    return library


def most_rows(dtype: torch.dtype) -> int:
    """Most rows of a forward that the kernels take; at more, torch's products are better on this processor.

    Args:
        dtype: one of ``DTYPES``.

    Raises:
        KernelBuildError: the kernels cannot be built.
    """
    return int(getattr(load(), f"most_rows_{DTYPES[dtype]}")())


def most_attending(dtype: torch.dtype) -> int:
    """Most rows whose attention the kernels take; see ``most_rows``."""
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
    source = _SOURCE.read_bytes() + _INCLUDED.read_bytes()
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
