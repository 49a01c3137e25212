"""Triton kernels for accelerators: what torch does badly for 1 to 16 rows.

``TRITON_INTERPRET=1`` in the environment, before the first use, runs them in Triton's interpreter on the CPU.
"""

from importlib import import_module
from importlib.util import find_spec
from typing import Any

from selfspec.errors import MissingPackageError

DEVICES = ("cuda", "xpu")
"""The devices that Triton compiles for; those of ROCm are called CUDA, too."""


def has_triton() -> bool:
    """Whether Triton is installed."""
    return find_spec("triton") is not None


def load_kernels(module: str = "launch") -> Any:
    """A module of this package that needs Triton; ``launch`` calls products.

    Raises:
        MissingPackageError: Triton is not installed.
    """
    if not has_triton():
        raise MissingPackageError(
            "kernels on an accelerator need Triton, which runs on Linux; run: pip install 'selfspec[triton]'"
        )
    return import_module(f"selfspec.gpu.{module}")
