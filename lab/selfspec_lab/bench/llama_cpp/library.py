"""The package ``llama_cpp``: whether it is there, and whether it was built for this processor."""

import ctypes
import importlib
import importlib.util
import re
from pathlib import Path
from typing import Any

import torch

from selfspec.errors import SelfSpecError
from selfspec_lab.bench.stamp import package_version

PACKAGE = "llama-cpp-python"
INSTALL = "pip install 'selfspec[peers]'"

_FLAGS = {
    **{"avx": "AVX", "avx2": "AVX2", "avx_vnni": "AVX_VNNI", "f16c": "F16C", "fma": "FMA", "bmi2": "BMI2"},
    **{"avx512f": "AVX512", "avx512vbmi": "AVX512_VBMI", "avx512_vnni": "AVX512_VNNI", "avx512_bf16": "AVX512_BF16"},
    **{"amx_int8": "AMX_INT8", "asimd": "NEON", "asimddp": "DOTPROD", "i8mm": "MATMUL_INT8", "sve": "SVE"},
}
"""By the kernel's name of a processor feature that of llama.cpp, for those that its kernels make use of."""

_keep: list[Any] = []
"""The callback for messages, which the library goes on calling."""


def is_installed() -> bool:
    """Whether llama.cpp and the package that writes its files can be imported."""
    return all(_is_there(name) for name in ("llama_cpp", "gguf"))


def obstacle(device: str | torch.device = "cpu", temperature: float = 0.0) -> str | None:
    """Why llama.cpp cannot be measured.

    Args:
        device: where the others run.
        temperature: what they decode with.

    Returns:
        The reason with its remedy; ``None`` where there is none.
    """
    if not is_installed():
        return f"{PACKAGE} or gguf is not installed; run: {INSTALL}"
    if torch.device(device).type != "cpu":
        return f"llama.cpp is measured on the processor only, and the others run on {device}; take --device cpu"
    if temperature > 0:
        return f"llama.cpp is measured greedily only, and the temperature is {temperature:g}; take --temperature 0"
    return None


def import_library() -> Any:
    """The package, whose library then says nothing on stderr any more.

    Raises:
        SelfSpecError: it is not installed, or cannot be loaded.
    """
    try:
        library = importlib.import_module("llama_cpp")
    except ImportError as error:
        raise SelfSpecError(f"llama.cpp needs {PACKAGE}; run: {INSTALL}") from error
    except (OSError, RuntimeError) as error:
        raise SelfSpecError(f"{PACKAGE} is broken ({error}); install it anew: {INSTALL}") from error
    if not _keep:
        _keep.append(library.llama_log_callback(lambda *_: None))
        library.llama_log_set(_keep[0], ctypes.c_void_p(0))
    return library


def describe_build() -> dict[str, Any]:
    """What is said of the library in a result, ready for JSON.

    Returns:
        ``version``, ``system_info`` (``llama_print_system_info``), and ``missing``: features that the processor has
        and the build does without.
    """
    information = import_library().llama_print_system_info().decode("utf-8", "replace").strip()
    return {
        "version": package_version(PACKAGE),
        "system_info": information,
        "missing": missing_features(information, _flags()),
    }


def missing_features(information: str, flags: set[str]) -> list[str]:
    """The features of a processor that a build of llama.cpp does not use.

    Args:
        information: what ``llama_print_system_info`` says, ``AVX = 1 | AVX2 = 1 | …``; what is not named is not used.
        flags: the processor's features by the kernel's names.
    """
    used = {name for name, number in re.findall(r"(\w+) = (\d+)", information) if int(number)}
    return [name for flag, name in _FLAGS.items() if flag in flags and name not in used]


def _flags() -> set[str]:
    """The features of this processor; none where the system does not say."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return set()
    values = (line.partition(":")[2] for line in lines if line.startswith(("flags", "Features")))
    return set(next(values, "").split())


def _is_there(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ValueError:  # a module that was put in place of it without a spec
        return True
