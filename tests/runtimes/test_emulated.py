"""The kernels of arm64 under emulation: forwards and chains of a small model, beside those of this processor."""

import platform
import shutil
from pathlib import Path

import pytest

from helpers.programs import assert_forwards_close, run_program
from selfspec.runtimes.kernel_build import LEVELS

COMPILER, EMULATOR = "aarch64-linux-gnu-g++", "qemu-aarch64"

pytestmark = [
    pytest.mark.early,  # programs are built
    pytest.mark.skipif(
        platform.machine() != "x86_64" or not all(map(shutil.which, ("g++", COMPILER, EMULATOR))),
        reason=f"{COMPILER} and {EMULATOR} are not installed",
    ),
]


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory) -> list[list[str]]:
    """What this processor computes. What is hardly optimised is built in a third of the time, and computes the same."""
    return run_program("whole_forward.cpp", tmp_path_factory.mktemp("own") / "own", "g++", "-O1")


@pytest.mark.parametrize("name", [pytest.param("neon", marks=pytest.mark.slow), "neon-bf16"])
def test_arm64_computes_what_this_processor_computes(name: str, own: list[list[str]], tmp_path: Path) -> None:
    flags = *next(level.flags for level in LEVELS if level.name == name), "-O1", "-static"
    arm = run_program("whole_forward.cpp", tmp_path / name, COMPILER, *flags, emulator=(EMULATOR, "-cpu", "max"))
    assert_forwards_close(own, arm)
