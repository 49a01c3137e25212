"""The kernels of the CPU in tests: whether there are any, and those of other levels."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from selfspec.runtimes import kernels


def has_kernels() -> bool:
    """Whether this machine has kernels or can build them; where there is a compiler, they have to build."""
    try:
        kernels.load()
    except kernels.KernelBuildError:
        if shutil.which("g++") or shutil.which("clang++"):
            raise
        return False
    return True


needs_kernels = pytest.mark.skipif(not has_kernels(), reason="there is no C++ compiler")


@contextmanager
def found_again() -> Iterator[None]:
    """Kernels are looked for inside, and again after it."""
    kernels.find.cache_clear()
    try:
        yield
    finally:
        kernels.find.cache_clear()
