"""The kernels of arm64 under emulation: forwards and chains of a small model, beside those of this processor."""

import platform
import shutil
from pathlib import Path

import pytest

from helpers.programs import assert_forwards_close, run_program

COMPILER, EMULATOR = "aarch64-linux-gnu-g++", "qemu-aarch64"

pytestmark = pytest.mark.skipif(
    platform.machine() != "x86_64" or not all(map(shutil.which, ("g++", COMPILER, EMULATOR))),
    reason=f"{COMPILER} and {EMULATOR} are not installed",
)


def test_arm64_computes_what_this_processor_computes(tmp_path: Path) -> None:
    # What is hardly optimised is built in a third of the time, and computes the same.
    own = run_program("whole_forward.cpp", tmp_path / "own", "g++", "-O1")
    arm = run_program("whole_forward.cpp", tmp_path / "arm", COMPILER, "-O1", "-static", emulator=(EMULATOR,))
    assert_forwards_close(own, arm)
