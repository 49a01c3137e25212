"""The package ``llama_cpp``: whether it is installed, and whether it was built for this processor."""

import ctypes
import importlib
import importlib.util
import re
from collections.abc import Collection
from typing import Any

import torch

from selfspec.errors import SelfSpecError
from selfspec.runtimes.kernel_build import listed_features
from selfspec_lab.bench.stamp import package_version

PACKAGE = "llama-cpp-python"
INSTALL = "pip install './lab[peers]' in a checkout of selfspec"

_FLAGS = {
    **{"avx": "AVX", "avx2": "AVX2", "avx_vnni": "AVX_VNNI", "f16c": "F16C", "fma": "FMA", "bmi2": "BMI2"},
    **{"avx512f": "AVX512", "avx512vbmi": "AVX512_VBMI", "avx512_vnni": "AVX512_VNNI", "avx512_bf16": "AVX512_BF16"},
    **{"amx_int8": "AMX_INT8", "asimd": "NEON", "asimddp": "DOTPROD", "i8mm": "MATMUL_INT8", "sve": "SVE"},
}
"""llama.cpp's names of the processor features that its kernels use, by the kernel's names."""

_keep: list[Any] = []
"""Keeps the callback for messages alive, as the library holds a pointer to it."""


def is_installed() -> bool:
    """Whether ``llama_cpp`` and ``gguf`` can be imported."""
    return all(_is_there(name) for name in ("llama_cpp", "gguf"))


def obstacle(device: str | torch.device = "cpu", temperature: float = 0.0) -> str | None:
    """Why llama.cpp cannot be measured.

    Args:
        device: device of the other candidates.
        temperature: their temperature.

    Returns:
        The reason with its remedy, or ``None`` if it can be measured.
    """
    if not is_installed():
        return f"{PACKAGE} or gguf is not installed; run: {INSTALL}"
    if torch.device(device).type != "cpu":
        return f"llama.cpp is measured on the CPU only, and the device is {device}; use --device cpu"
    if temperature > 0:
        return f"llama.cpp is measured greedily only, and the temperature is {temperature:g}; use --temperature 0"
    return None


def import_library() -> Any:
    """Imports the package and silences its messages on stderr.

    Raises:
        SelfSpecError: it is not installed or cannot be loaded.
    """
    try:
        library = importlib.import_module("llama_cpp")
    except ImportError as error:
        raise SelfSpecError(f"llama.cpp needs {PACKAGE}; run: {INSTALL}") from error
    except (OSError, RuntimeError) as error:
        raise SelfSpecError(f"{PACKAGE} is broken ({error}); reinstall it: {INSTALL}") from error
    if not _keep:
        _keep.append(library.llama_log_callback(lambda *_: None))
        library.llama_log_set(_keep[0], ctypes.c_void_p(0))
    return library


def describe_build() -> dict[str, Any]:
    """Describes the library for a result, ready for JSON.

    Returns:
        ``version``, ``system_info`` (from ``llama_print_system_info``), and ``missing``: features that the processor
        has and the build does not use.
    """
    information = import_library().llama_print_system_info().decode("utf-8", "replace").strip()
    return {
        "version": package_version(PACKAGE),
        "system_info": information,
        "missing": missing_features(information, listed_features()),
    }


def missing_features(information: str, flags: Collection[str]) -> list[str]:
    """Features of a processor that a build of llama.cpp does not use.

    Args:
        information: output of ``llama_print_system_info``, ``AVX = 1 | AVX2 = 1 | …``; others are not used.
        flags: the processor's features, by the kernel's names.
    """
    used = {name for name, number in re.findall(r"(\w+) = (\d+)", information) if int(number)}
    return [name for flag, name in _FLAGS.items() if flag in flags and name not in used]


def _is_there(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ValueError:  # a replaced module without a spec
        return True
