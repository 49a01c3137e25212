"""``benchmarks/host_time.py``: which gaps between native calls it finds."""

import importlib
from pathlib import Path
from types import ModuleType

import pytest

from helpers.kernels import needs_kernels

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(BENCHMARKS)
    return importlib.import_module("host_time")


@needs_kernels
@pytest.mark.parametrize(
    ("method", "kinds"),
    [("autoregressive", {"in-chain"}), ("low-bit", {"draft-verify", "verify-draft"}), ("uniform", {"draft-verify"})],
)
def test_gaps_are_told_apart(script: ModuleType, method: str, kinds: set[str]) -> None:
    found = script.measure("tiny", method, {}, new_tokens=32)
    assert kinds | {"forward"} <= set(found)
    assert all(gaps["first_ms"] <= gaps["median_ms"] <= gaps["third_ms"] for gaps in found.values())
