"""The levels of processor instructions that the kernels are built for, and how ``kernels.cpp`` is built for one.

A wheel carries one library a level, and the highest level that the processor has is loaded. The wheel's build hook and
the build at first use are this one, with the same options, so that a level gives the same bits whichever built it (with
the same compiler). The hook imports this module where torch is not installed.
"""

import contextlib
import ctypes
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from selfspec.errors import InvalidParameterError

SOURCE = Path(__file__).with_name("kernels.cpp")

BUILT_FOLDER = Path(__file__).with_name("built")
"""Where a wheel has its libraries; there is no such folder in a checkout."""

_FLAGS = ("-O3", "-std=c++17", "-fPIC", "-fno-math-errno", "-fno-trapping-math", "-ffp-contract=off")
_SECONDS = 600

LEVEL_VARIABLE = "SELFSPEC_KERNELS"
"""The environment variable that names the level to load; then no trial chooses one."""

_preferred: list[str] = []
"""The level that a trial has chosen for this process, last."""


@dataclass(frozen=True)
class Level:
    """A set of instructions of an architecture (``machine``; empty for any), by the names that Linux has for them."""

    name: str
    machine: str
    flags: tuple[str, ...] = ()
    features: frozenset[str] = frozenset()


def _x86(name: str, *features: str) -> Level:
    flags = tuple(
        f"-m{feature.replace('avx512_', 'avx512').replace('avx_', 'avx').replace('_', '-')}" for feature in features
    )
    return Level(name, "x86_64", flags, frozenset(features))


def _arm(name: str, *extensions: str) -> Level:
    features = frozenset("asimddp" if extension == "dotprod" else extension for extension in extensions)
    return Level(name, "aarch64", (f"-march=armv8.2-a+{'+'.join(extensions)}",), features)


_AVX2 = ("avx2", "fma", "f16c")
_AVX512 = (*_AVX2, "avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl")
_VNNI = (*_AVX512, "avx512_vnni")
_BF16 = (*_VNNI, "avx512_bf16")

LEVELS = (
    Level("generic", ""),
    _x86("sse2", "sse2"),
    _x86("avx2", *_AVX2),
    _x86("avx-vnni", *_AVX2, "avx_vnni"),
    _x86("avx512", *_AVX512),
    _x86("avx512-vnni", *_VNNI),
    _x86("avx512-bf16", *_BF16),
    _x86("amx", *_BF16, "amx_tile", "amx_bf16", "amx_int8"),
    Level("neon", "aarch64"),
    _arm("neon-dot", "dotprod"),
    _arm("neon-i8mm", "dotprod", "i8mm"),
    _arm("neon-bf16", "dotprod", "i8mm", "bf16"),
)
"""All levels; of one architecture from low to high."""


def machine() -> str:
    """The architecture of this process's processor, as Linux names it."""
    name = platform.machine().lower()
    return {"amd64": "x86_64", "arm64": "aarch64"}.get(name, name)


def processor_features() -> frozenset[str]:
    """The instructions that this process may use, as Linux names them; none are known on other systems.

    Those of AMX are left out where Linux does not permit tiles; see ``refusal``.
    """
    listed = listed_features()
    return frozenset(feature for feature in listed if not feature.startswith("amx_")) if refusal() else listed


def refusal() -> str:
    """Why the highest level that the processor has may not be used, in words; empty where there is no such reason."""
    if "amx_tile" not in listed_features() or _permits_tiles():
        return ""
    return "AMX is not used: Linux does not permit this process to use its tiles"


@lru_cache
def _permits_tiles() -> bool:
    """Asks Linux, once a process, for permission to use AMX tiles, for all its threads and its children.

    A thread that uses them has 8 KB more of state, which Linux reserves only for processes that asked (Linux 5.16, the
    page on the use of extended states in its documentation of x86).
    """
    arch_prctl, request_permission, tile_data = 158, 0x1023, 18
    syscall = ctypes.CDLL(None).syscall
    syscall.restype = ctypes.c_long
    return bool(syscall(*map(ctypes.c_long, (arch_prctl, request_permission, tile_data))) == 0)


def listed_features() -> frozenset[str]:
    """The processor's instructions, as Linux names them, permitted or not; none on other systems."""
    return frozenset(next(_in_cpuinfo("flags", "Features"), "").split())


@lru_cache
def processor_name() -> str:
    """The processor's model as Linux names it, with the numbers of its design; elsewhere its architecture.

    A virtual machine may name only the brand, as in ``AMD EPYC``: designs years apart have one name then.
    """
    name, *numbers = (next(_in_cpuinfo(*names), "") for names in _PROCESSOR)
    design = " ".join(f"{word} {number}" for word, number in zip(("family", "model"), numbers, strict=True) if number)
    return ", ".join(filter(None, (name or machine(), design)))


_PROCESSOR = (("model name",), ("cpu family", "CPU implementer"), ("model\t", "CPU part"))
"""What Linux calls a processor's name, family and model: on x86, and on Arm where that differs."""


def _in_cpuinfo(*names: str) -> Iterator[str]:
    """The values that Linux gives for the processors under some names; none elsewhere."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith(names):
                yield line.partition(":")[2].strip()


def levels_of(architecture: str) -> tuple[Level, ...]:
    """The levels of an architecture, from low to high; ``generic`` where it has none of its own."""
    own = tuple(level for level in LEVELS if level.machine == architecture)
    return own or LEVELS[:1]


def usable_levels(architecture: str, features: Collection[str]) -> tuple[Level, ...]:
    """The levels whose instructions a processor has, from low to high. The lowest needs none that could be missing."""
    levels = levels_of(architecture)
    return (levels[0], *(level for level in levels[1:] if level.features <= set(features)))


def prefer(name: str) -> None:
    """Makes a level the one that this process loads, unless ``SELFSPEC_KERNELS`` names another."""
    _preferred[:] = [name]


def choose_level() -> Level:
    """The level that ``SELFSPEC_KERNELS`` names, or that a trial has chosen, or the highest that this processor has."""
    usable = {level.name: level for level in usable_levels(machine(), processor_features())}
    name = os.environ.get(LEVEL_VARIABLE) or [*usable, *_preferred][-1]
    if name not in usable:
        reason = f". {refusal()}" if refusal() else ""
        raise InvalidParameterError(
            f"the environment variable {LEVEL_VARIABLE} is '{name}'; this processor has {', '.join(usable)}{reason}"
        )
    return usable[name]


class KernelBuildError(Exception):
    """There is no compiler, or it could not build the kernels, or they cannot be loaded. The target falls back."""


def library_name(level: Level) -> str:
    """The name of the file of a level's library."""
    return f"kernels-{level.name}.so"


def find_compiler() -> list[str]:
    """The command of the C++ compiler: that of the environment variable ``CXX``, else g++ or clang++."""
    if command := shlex.split(os.environ.get("CXX", "")):
        return command
    compiler = shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        raise KernelBuildError("there is no C++ compiler; install g++, or name one in the environment variable CXX")
    return [compiler]


def sources() -> int:
    """A number of what kernels are built from, which their library holds (``layout.h``)."""
    files = (SOURCE, *sorted(SOURCE.parent.glob("*.h")))
    return int(hashlib.sha256(b"".join(path.read_bytes() for path in files)).hexdigest()[:15], 16)


def build_key(level: Level) -> str:
    """A short name for what the kernels of a level are made from: their sources, and the options for the compiler."""
    return hashlib.sha256(repr((level.machine, _options(level))).encode()).hexdigest()[:16]


def build(level: Level, library: Path) -> None:
    """Builds the library of a level. It appears at its place at once, so that no other process loads half a file."""
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
    return (*_FLAGS, f"-DSOURCES={sources()}L", *level.flags, *shlex.split(os.environ.get("CXXFLAGS", "")))


def _link_options(is_clang: bool) -> tuple[str, ...]:
    """The library names no OpenMP runtime where that of torch, which is in the process, has what it needs.

    A second runtime would have threads of its own, which wait actively beside those of torch.
    """
    if sys.platform == "darwin":
        return ("-undefined", "dynamic_lookup")
    return ("-fopenmp",) if is_clang else ("-s",)


def _run(command: list[str]) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=_SECONDS).stdout
