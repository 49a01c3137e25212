"""Kernels compiled offline: what the assemblers say, and that no form spills.

The interpreter and the compiler cannot run in one process, so the script runs in one of its own, on some of the forms;
``python benchmarks/triton_kernels.py --check`` compiles all of them.
"""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton", reason="the extra triton is not installed")
from selfspec_lab.offline.compiling import TARGETS, amd_binary, nvidia_binary
from selfspec_lab.offline.instructions import Instructions, _amd_lines, _count, _nvidia_lines

ROOT = Path(__file__).parents[3]
RESULTS = ROOT / "benchmarks" / "results" / "triton"

PTXAS = """ptxas info    : Compiling entry function 'k' for 'sm_90a'
ptxas info    : Function properties for k
    {stack} bytes stack frame, {stores} bytes spill stores, {loads} bytes spill loads
ptxas info    : Used 88 registers, used 1 barriers
"""
AMD = "    .sgpr_spill_count: {scalar}\n    .vgpr_count:     154\n    .vgpr_spill_count: {vector}\n"
SCRATCH = "    .private_segment_fixed_size: {scratch}\n"


@pytest.fixture
def script(benchmarks: Callable[[str], Any]) -> Any:
    return benchmarks("triton_kernels")


def test_the_log_of_ptxas_is_read() -> None:
    clean = nvidia_binary(PTXAS.format(stack=0, stores=0, loads=0), 1024, b"code", "ptx")
    assert (clean.registers, clean.shared, clean.spilled) == (88, 1024, 0)
    assert nvidia_binary(PTXAS.format(stack=8, stores=4, loads=4), 0, b"", "").spilled == 16
    with pytest.raises(AssertionError, match="found 0 times"):
        nvidia_binary("", 0, b"", "")


@pytest.mark.parametrize("spilled", ["scalar", "vector", "scratch"])
def test_the_metadata_of_amd_are_read(spilled: str) -> None:
    counts = dict.fromkeys(("scalar", "vector", "scratch"), 0)
    assert amd_binary(0, b"", (AMD + SCRATCH).format(**counts)).registers == 154
    assert amd_binary(0, b"", (AMD + SCRATCH).format(**counts)).spilled == 0
    assert amd_binary(0, b"", (AMD + SCRATCH).format(**counts | {spilled: 3})).spilled == 3


def test_instructions_of_loops_are_told_from_others() -> None:
    lines = """
        /*0000*/                   LDC R1, c[0x0][0x28] ;
.L_x_0:
        /*0010*/              @!P1 LDG.E.128 R6, desc[UR14][R4.64] ;
        /*0020*/                   LOP3.LUT R6, R6, 0xf, RZ, 0xc0, !PT ;
        /*0030*/               @P0 BRA `(.L_x_0) ;
        /*0040*/                   EXIT ;
.L_x_1:
        /*0050*/                   BRA `(.L_x_1);
        /*0060*/                   NOP;
    """.splitlines()
    assert _count(_nvidia_lines(lines, ("",))) == Instructions(3, (3,))
    assert _count(_nvidia_lines(lines, ("LOP",))) == Instructions(0, (1,))
    assert Instructions(3, (3, 7)).issued(10) == 3 + 3 + 70
    amd = ["\tv_mov_b32_e32 v0, 1", ".LBB0_1:", "\tv_add_u32 v0, v0, v1", "\ts_cbranch_scc0 .LBB0_1", "\ts_endpgm"]
    assert _count(_amd_lines(amd, ("v_",))) == Instructions(1, (1,))


def test_a_spill_and_another_binary_are_complaints(script: Any) -> None:
    good = {"spilled": 0, "deterministic": True}
    assert script.complaints({"a": {"sm_80": good}}, {}) == []
    assert script.complaints({"a": {"sm_80": good | {"spilled": 4}}}, {}) == ["a spills for sm_80"]
    assert "differ" in script.complaints({"a": {"sm_80": good | {"deterministic": False}}}, {})[0]
    assert "not in the committed table" in script.complaints({"a": {"sm_80": good}}, {"b": {}})[0]


@pytest.mark.parametrize(("target", "form"), [("sm_90", "attention, grouped, tree"), ("gfx942", "choice of bf16")])
def test_forms_compile_without_spills_and_twice_the_same(target: str, form: str) -> None:
    command = [sys.executable, "benchmarks/triton_kernels.py", "--check", "--only", form, "--targets", target]
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    path = os.pathsep.join(map(str, (ROOT / "src", ROOT / "lab", *sys.path)))
    done = subprocess.run(
        command, cwd=ROOT, env=environment | {"PYTHONPATH": path}, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert form in done.stdout


def test_the_committed_table_has_all_forms_without_spills(script: Any) -> None:
    results = json.loads((RESULTS / "kernels.json").read_text(encoding="utf-8"))["kernels"]
    assert set(results) == {form.name for form in script.all_forms()}
    assert all(set(targets) == set(TARGETS) for targets in results.values())
    assert script.complaints(results, {}) == []


def test_kernels_may_reach_the_goal_on_one_row_on_every_device() -> None:
    """All but those of weights of few bits by float32 rows, which have no matrix instructions on NVIDIA's."""
    kernels = json.loads((RESULTS / "kernels.json").read_text(encoding="utf-8"))["kernels"]
    found = {
        (name, device): fraction
        for name, targets in kernels.items()
        for each in targets.values()
        for device, fraction in each["fraction"].items()
        if " by fp32 " not in name or name.startswith("F32")
    }
    assert {device for _, device in found} == {"A100", "RTX 4090", "H100", "MI300X"}
    assert len(found) > 100
    assert {key: fraction for key, fraction in found.items() if fraction < 0.85} == {}
