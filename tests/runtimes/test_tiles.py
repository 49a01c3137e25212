"""AMX tiles, whose instructions are emulated in C++: products and attention at odd shapes; whole forwards.

The same with the real instructions, where the processor has them. The programs check by themselves that a row has the
same bits alone and among others, that sums are close to those in double precision, and that tiles were used.
"""

import shutil
from pathlib import Path

import pytest
import torch

from helpers.kernels import found_again, needs_kernels
from helpers.low_bit_model import random_model
from helpers.programs import PROGRAMS, assert_forwards_close, run_program
from selfspec import Engine
from selfspec.runtimes import kernels
from selfspec.runtimes.kernel_build import machine, processor_features, usable_levels
from selfspec_lab.testing import verifies_exactly

TILES = '-DTILE_INSTRUCTIONS="tile_emulation.h"'
_OWN = {level.name: level.flags for level in usable_levels(machine(), processor_features())}
FLAGS = [flags for name, flags in _OWN.items() if name != "amx"]
"""Of the compiler, for the levels that this processor has."""

REAL = _OWN.get("amx", ())
needs_amx = pytest.mark.skipif(not REAL, reason="this processor lacks AMX")

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


ATTENTION_HASHES = """
1 1 32 0 1 0 a28cabe33763f14b
2 1 64 0 5 0 ab28e9433a27cf17
6 2 64 31 9 0 11241733cfd16be6
12 2 128 130 12 0 757031e844e87382
3 3 96 300 40 0 d22e64623f908fd7
7 1 160 97 6 0 038a10cc0f64b826
4 2 64 200 20 50 e967a257b1189085
4 1 32 400 33 129 64762b15dc49481d
2 1 32 45 24 7 908b97396b29b675
5 1 576 70 8 0 3e2dd99181a20ca2
"""
"""The same of ``tile_attention.cpp``: heads, key heads, numbers of a head, cached tokens, rows, window, a hash."""


@pytest.mark.slow
@pytest.mark.parametrize("flags", dict.fromkeys((FLAGS[0], FLAGS[-1])), ids=lambda flags: " ".join(flags[-1:]))
def test_products(flags: tuple[str, ...], tmp_path: Path) -> None:
    """Bit for bit what the real instructions give (``docs/packaging.md``)."""
    lines = run_program("tile_products.cpp", tmp_path / "products", "g++", *flags, "-O0", TILES)
    assert lines == [line.split() for line in HASHES.strip().splitlines()]


@needs_amx
def test_products_of_the_real_instructions(tmp_path: Path) -> None:
    lines = run_program("tile_products.cpp", tmp_path / "products", "g++", *REAL, "-O1")
    assert lines == [line.split() for line in HASHES.strip().splitlines()]


@pytest.mark.slow
@pytest.mark.skipif("-mavx512f" not in FLAGS[-1], reason="attention runs in tiles beside AVX-512 alone")
def test_attention(tmp_path: Path) -> None:
    """Bit for bit what the real instructions give."""
    lines = run_program("tile_attention.cpp", tmp_path / "attention", "g++", *FLAGS[-1], "-O0", TILES)
    assert lines == [line.split() for line in ATTENTION_HASHES.strip().splitlines()]


@needs_amx
def test_attention_of_the_real_instructions(tmp_path: Path) -> None:
    lines = run_program("tile_attention.cpp", tmp_path / "attention", "g++", *REAL, "-O1")
    assert lines == [line.split() for line in ATTENTION_HASHES.strip().splitlines()]


@pytest.mark.slow
@needs_amx
def test_forwards_of_the_real_instructions(tmp_path: Path) -> None:
    """Logits and drawn tokens are those of emulated tiles, bit for bit."""
    emulated = run_program("whole_forward.cpp", tmp_path / "emulated", "g++", *FLAGS[-1], "-O0", TILES)
    assert run_program("whole_forward.cpp", tmp_path / "real", "g++", *REAL, "-O0") == emulated


@pytest.mark.slow
def test_forwards(tmp_path: Path) -> None:
    """Forwards in tiles are nearly those without."""
    plain = run_program("whole_forward.cpp", tmp_path / "plain", "g++", *FLAGS[-1], "-O0")
    tiled = run_program("whole_forward.cpp", tmp_path / "tiled", "g++", *FLAGS[-1], "-O0", TILES)
    assert_forwards_close(tiled, plain)
    assert tiled[0] == plain[0], "a forward in float32 used tiles"


@pytest.mark.slow
@needs_kernels
@pytest.mark.skipif(kernels.BUILT_FOLDER.exists(), reason="the kernels are those of a wheel")
def test_an_engine_writes_the_same_with_drafts_and_in_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    """In bfloat16, bit for bit as plain decoding of each prompt alone, with kernels that are built with tiles."""
    monkeypatch.setenv("CXXFLAGS", f"-O1 -I{PROGRAMS} '{TILES}'")
    prompts = [torch.arange(first, first + length) % 128 for first, length in ((1, 39), (7, 3), (40, 20))]
    with found_again():
        model = random_model(torch.bfloat16)
        plain = Engine(model, method="autoregressive", runtime="compiled")
        expected = [plain.generate(prompt, max_new_tokens=24) for prompt in prompts]
        drafting = Engine(model, method="low-bit", runtime="compiled")
        alone = [drafting.generate(prompt, max_new_tokens=24) for prompt in prompts]
        together = drafting.generate(prompts, max_new_tokens=24)
        assert kernels.load().emulated_tile_products() > 0
        assert verifies_exactly(torch.bfloat16)
    for generations in (alone, together):
        assert [each.token_ids for each in generations] == [each.token_ids for each in expected]
        assert all(0 < each.accepted <= each.drafted for each in generations)
