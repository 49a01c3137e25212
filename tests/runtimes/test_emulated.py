"""The kernels of arm64 under emulation: forwards and chains of a small model, beside those of this processor."""

import platform
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

from selfspec.runtimes.kernel_build import _FLAGS, SOURCE

PROGRAM = Path(__file__).with_name("whole_forward.cpp")
COMPILER, EMULATOR = "aarch64-linux-gnu-g++", "qemu-aarch64"
LOGITS = 9 * 100

pytestmark = pytest.mark.skipif(
    platform.machine() != "x86_64" or not all(map(shutil.which, ("g++", COMPILER, EMULATOR))),
    reason=f"{COMPILER} and {EMULATOR} are not installed",
)


def run(folder: Path, compiler: str, *options: str, emulator: tuple[str, ...] = ()) -> list[list[str]]:
    """The lines of the program, which checks rows and chains by itself."""
    program = folder / compiler
    source = ["-I", str(SOURCE.parent), str(PROGRAM), "-o", str(program)]
    subprocess.run([compiler, *_FLAGS, "-fopenmp", *options, *source], check=True, capture_output=True, timeout=300)
    ran = subprocess.run([*emulator, str(program)], check=True, capture_output=True, text=True, timeout=300)
    return [line.split() for line in ran.stdout.splitlines()]


def test_arm64_computes_what_this_processor_computes(tmp_path: Path) -> None:
    """Lines are of float32 and bfloat16 in turns, at 16, 8, 6 and 4 bits."""
    own, arm = run(tmp_path, "g++"), run(tmp_path, COMPILER, "-static", emulator=(EMULATOR,))
    assert len(own) == len(arm) == 8
    for index, (mine, theirs) in enumerate(zip(own, arm, strict=True)):
        logits, others = (torch.tensor([*map(float, line[:LOGITS])]) for line in (mine, theirs))
        tolerance = (1e-4 if index == 0 else 2e-3) if index % 2 == 0 else 5e-2
        torch.testing.assert_close(logits, others, rtol=tolerance, atol=tolerance)
        assert logits.std() > 0.5
        assert len(mine) == len(theirs) > LOGITS
    assert own[0][LOGITS:] == arm[0][LOGITS:], "float32 draws other tokens"
