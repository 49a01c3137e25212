"""Products of weights of every format on every level of instructions; those that this processor lacks are emulated.

The program checks by itself that a row has the same bits alone and among others, and that sums are those of the weights
that are unpacked.
"""

import platform
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

from helpers.programs import PROGRAMS, run_program
from selfspec.runtimes.kernel_build import LEVELS, machine, processor_features, usable_levels

FORMATS, ARITHMETICS = 37, 3
ARM_COMPILER, ARM_EMULATOR, ARM_OBJDUMP = "aarch64-linux-gnu-g++", "qemu-aarch64", "aarch64-linux-gnu-objdump"

ALL = {level.name: level.flags for level in usable_levels(machine(), processor_features())}
OWN = {name: flags for name, flags in ALL.items() if name != "amx"}
ARM = {level.name: level.flags for level in LEVELS if level.machine == "aarch64"}

pytestmark = pytest.mark.slow
needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="g++ is not installed")
needs_amx = pytest.mark.skipif("amx" not in ALL, reason="this processor lacks AMX")
needs_arm = pytest.mark.skipif(
    platform.machine() != "x86_64" or not all(map(shutil.which, ("g++", ARM_COMPILER, ARM_EMULATOR))),
    reason=f"{ARM_COMPILER} and {ARM_EMULATOR} are not installed",
)


def sums(lines: list[list[str]]) -> torch.Tensor:
    assert len(lines) == FORMATS * ARITHMETICS
    return torch.tensor([[*map(float, line)] for line in lines])


def assert_close(lines: list[list[str]], others: list[list[str]]) -> None:
    """Sums of integers are equal; floats of them are added up in one order, fused or not."""
    found, expected = sums(lines), sums(others)
    for arithmetic, tolerance in enumerate((1e-4, 1e-2, 1e-4)):
        own, other = found[arithmetic::ARITHMETICS], expected[arithmetic::ARITHMETICS]
        assert (own - other).abs().max() <= tolerance * other.abs().max()
        assert other.std() > 0


@pytest.fixture(scope="module")
def lowest(tmp_path_factory: pytest.TempPathFactory) -> list[list[str]]:
    """What the lowest level of this processor computes."""
    folder = tmp_path_factory.mktemp("lowest")
    return run_program("packed_products.cpp", folder / "lowest", "g++", *next(iter(OWN.values())), "-O1")


@needs_compiler
@pytest.mark.parametrize("name", list(OWN)[1:])
def test_every_level_of_this_processor(name: str, lowest: list[list[str]], tmp_path: Path) -> None:
    assert_close(run_program("packed_products.cpp", tmp_path / name, "g++", *OWN[name], "-O1"), lowest)


@pytest.fixture(scope="module")
def highest(tmp_path_factory: pytest.TempPathFactory) -> list[list[str]]:
    """What the highest level of this processor computes without tiles."""
    folder = tmp_path_factory.mktemp("highest")
    return run_program("packed_products.cpp", folder / "highest", "g++", *list(OWN.values())[-1], "-O1")


@needs_compiler
@pytest.mark.skipif("avx512-vnni" not in OWN, reason="this processor lacks AVX-512 VNNI")
@pytest.mark.parametrize("real", [False, pytest.param(True, marks=needs_amx)])
def test_tiles(real: bool, highest: list[list[str]], tmp_path: Path) -> None:
    """Bit for bit what vectors give."""
    flags = ALL["amx"] if real else (*list(OWN.values())[-1], '-DTILE_INSTRUCTIONS="tile_emulation.h"')
    assert run_program("packed_products.cpp", tmp_path / "tiles", "g++", *flags, "-O1") == highest


@needs_compiler
@pytest.mark.skipif("avx2" not in OWN, reason="this processor lacks AVX2")
def test_avx_vnni(lowest: list[list[str]], tmp_path: Path) -> None:
    flags = *OWN["avx2"], "-O1", "-include", str(PROGRAMS / "vnni_emulation.h")
    assert_close(run_program("packed_products.cpp", tmp_path / "vnni", "g++", *flags), lowest)


def run_arm(name: str, folder: Path) -> list[list[str]]:
    emulator = ARM_EMULATOR, "-cpu", "max"
    options = *ARM[name], "-O1", "-static"
    return run_program("packed_products.cpp", folder / name, ARM_COMPILER, *options, emulator=emulator)


@pytest.fixture(scope="module")
def arm_dot(tmp_path_factory: pytest.TempPathFactory) -> list[list[str]]:
    """What Arm's dot products of bytes compute."""
    return run_arm("neon-dot", tmp_path_factory.mktemp("arm"))


@needs_arm
def test_arm(lowest: list[list[str]], tmp_path: Path) -> None:
    assert_close(run_arm("neon", tmp_path), lowest)


@needs_arm
def test_arm_with_dot_products(lowest: list[list[str]], arm_dot: list[list[str]]) -> None:
    assert_close(arm_dot, lowest)


@needs_arm
@pytest.mark.parametrize("name", list(ARM)[2:])
def test_arm_with_products_of_matrices(name: str, arm_dot: list[list[str]], tmp_path: Path) -> None:
    assert run_arm(name, tmp_path) == arm_dot, "integer products have equal bits"
    code = subprocess.run([ARM_OBJDUMP, "-d", str(tmp_path / name)], check=True, capture_output=True, text=True).stdout
    assert "smmla" in code
