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
1 1 f1bf5efa07e3891b
32 16 f444fbe468c67639
31 15 871476d07ac4d9c9
33 17 ffe9e1494b559560
100 70 2b992ae9452a16b3
1024 33 2b8f11d4c834c39e
1025 48 95fef59d66b8b637
2079 20 ab21298a1d06c55f
1056 600 056a43307c84a582
96 40 e61b22348b47f89c
"""
"""What ``tile_products.cpp`` prints with AMX: inputs, outputs, and a hash of the sums of 18 rows."""


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
