"""AMX tiles, whose instructions are emulated in C++: products at odd shapes, alone and among others; whole forwards.

The programs check by themselves that a row has the same bits alone and among others, that sums are close to those in
double precision, and that tiles were used.
"""

import shutil
from pathlib import Path

import pytest

from helpers.programs import assert_forwards_close, run_program
from selfspec.runtimes.levels import machine, processor_features, usable_levels

TILES = '-DTILE_INSTRUCTIONS="tile_emulation.h"'
FLAGS = [level.flags for level in usable_levels(machine(), processor_features()) if level.name != "amx"]
"""Of the compiler, for the levels that this processor has."""

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="g++ is not installed")

HASHES = """
1 1 e304c0b2d8ed8521
32 16 95d9c5365e36a635
31 15 24551654a41ffe7b
33 17 50dcc6d213bed138
100 70 6bab5eb6ec7b8a3e
1024 33 9a51d39ff0e18067
1025 48 2dde90f8976bb042
2079 20 09188c7d01f65800
1056 600 b3aa4b8befbc8de0
"""
"""What ``tile_products.cpp`` prints with AMX: inputs, outputs, and a hash of the results of all rows."""


@pytest.mark.parametrize("flags", {FLAGS[0], FLAGS[-1]}, ids=" ".join)
def test_products(flags: tuple[str, ...], tmp_path: Path) -> None:
    """Bit for bit what the real instructions gave, which were run once under Bochs (``docs/packaging.md``)."""
    lines = run_program("tile_products.cpp", tmp_path / "products", "g++", *flags, "-O0", TILES)
    assert lines == [line.split() for line in HASHES.strip().splitlines()]


def test_forwards(tmp_path: Path) -> None:
    """Forwards in tiles are nearly those without."""
    plain = run_program("whole_forward.cpp", tmp_path / "plain", "g++", *FLAGS[-1], "-O1")
    tiled = run_program("whole_forward.cpp", tmp_path / "tiled", "g++", *FLAGS[-1], "-O1", TILES)
    assert_forwards_close(tiled, plain)
    assert tiled[0] == plain[0], "a forward in float32 used tiles"
