"""The kernels of the CPU, built: those of the wheel, or ``kernels.cpp`` and its headers, built once at first use.

torch multiplies a few rows with bfloat16 weights at half the memory's speed, because its kernels rearrange the weights
in every call; weights rearranged ahead would be a second copy of the model. A kernel that reads the rows of the weights
as they are needs neither. On processors without instructions for bfloat16 torch multiplies element by element, and
these kernels, which widen weights in registers, take prompts of any length.
"""

import ctypes
import logging
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch
from filelock import FileLock

from selfspec.files import cache_folder, check_own
from selfspec.runtimes.kernel_build import (
    BUILT_FOLDER,
    KernelBuildError,
    Level,
    build,
    build_key,
    choose_level,
    library_name,
    machine,
    prefer,
    processor_features,
    refusal,
    usable_levels,
)
from selfspec.runtimes.structures import declare, disagreements, read_layout

DTYPES = {torch.float32: "float32", torch.bfloat16: "bfloat16"}
"""The dtypes that have kernels, and how their functions' names end."""

_LOGGER = logging.getLogger(__name__)

WITHOUT_KERNELS = "decoding is much slower, and weights of few bits are unpacked"
"""What it costs to have no kernels."""


@dataclass(frozen=True)
class Kernels:
    """The kernels that this process runs: for a level of instructions, and from where, in words."""

    library: ctypes.CDLL
    constants: Mapping[str, int]
    """Of the headers, by name; see ``layout.h``."""
    level: str
    origin: str


@cache
def find() -> Kernels:
    """The kernels for this processor: the wheel's, or those built before in the user's cache folder, or built now."""
    level = choose_level()
    path, origin = _find_library(level)
    if not path.exists():
        _build_once(level, path)
    return _open(path, level, origin)


def find_all() -> list[Kernels]:
    """The kernels of each level that this processor has and that need not be built, the highest first."""
    found = []
    for level in reversed(usable_levels(machine(), processor_features())):
        path, origin = _find_library(level)
        if path.exists():
            with suppress(KernelBuildError):
                found.append(_open(path, level, origin))
    return found


def use(level: str) -> None:
    """Makes this process run the kernels of a level from now on."""
    prefer(level)
    find.cache_clear()


def load() -> ctypes.CDLL:
    """The functions of the kernels; see ``find``."""
    return find().library


def loaded() -> ctypes.CDLL | None:
    """The functions of the kernels if this process has loaded them; it builds nothing."""
    return load() if find.cache_info().currsize else None


def why_no_kernels() -> KernelBuildError | None:
    """Why there are no kernels; ``None`` where there are."""
    try:
        find()
    except KernelBuildError as error:
        return error
    return None


def describe() -> str:
    """The level and the origin of the kernels, or why there are none and what that costs."""
    if (reason := why_no_kernels()) is not None:
        return f"none ({WITHOUT_KERNELS}): {reason}"
    kernels = find()
    return "; ".join(filter(None, (f"{kernels.level}, {kernels.origin}", refusal())))


def row_limit(dtype: torch.dtype, *, attends: bool = False, low_bit: bool = False) -> int:
    """Most rows of one sequence that run in the kernels; with more, torch is faster on this processor.

    Whatever runs in kernels or in torch by the number of its rows compares it with this: nothing else decides. The
    limit of attention (``attends``) is not that of products; low-bit weights have none, since only the kernels
    multiply them.
    """
    if low_bit:
        return sys.maxsize
    limit = f"most_attending_{DTYPES[dtype]}" if attends else f"most_rows_{DTYPES[dtype]}"
    return int(getattr(load(), limit)())


def _find_library(level: Level) -> tuple[Path, str]:
    """Where the library of a level is, or is put when it is built, and its origin in words."""
    carried = BUILT_FOLDER / library_name(level)
    if carried.exists():
        return carried, "from the wheel"
    return cache_folder() / f"kernels-{level.name}-{build_key(level)}.so", "built on this machine"


def _build_once(level: Level, built: Path) -> None:
    """Builds a library; one of several processes that need it builds it, and the others wait."""
    try:
        built.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(built.with_suffix(".lock")):
            if not built.exists():
                _LOGGER.info("building the kernels for %s, once; this may take minutes", level.name)
                build(level, built)
    except OSError as error:
        raise KernelBuildError(f"the kernels cannot be kept in {built.parent}: {error}") from error


def _open(path: Path, level: Level, origin: str) -> Kernels:
    """Loads a library, and refuses one whose structures or constants are not those of ``structures.py``."""
    try:
        if path.parent != BUILT_FOLDER:
            check_own(path)
    except OSError as error:
        raise KernelBuildError(f"the kernels in {error.filename} are not loaded: {error.strerror}") from error
    try:
        library = _with_openmp(path)
        layout = read_layout(library)
    except (OSError, AttributeError) as error:
        raise KernelBuildError(f"the kernels cannot be loaded: {error}; delete {path}") from error
    if different := disagreements(layout):
        raise KernelBuildError(
            f"the kernels are of another version of selfspec: {different[0]}; delete {path}, or "
            "install selfspec again where it is part of the installation"
        )
    declare(library, DTYPES.values())
    return Kernels(library, layout, level.name, origin)


def _with_openmp(path: Path) -> ctypes.CDLL:
    """Loads a library whose OpenMP functions are those of the runtime that torch has loaded, or else of the system."""
    try:
        return ctypes.CDLL(str(path))
    except OSError:
        runtimes = sorted(Path(torch.__file__).parent.glob("lib/lib*omp*"))
        ctypes.CDLL(str(runtimes[0]) if runtimes else "libgomp.so.1", mode=ctypes.RTLD_GLOBAL)
        return ctypes.CDLL(str(path))
