"""``benchmarks/host_time.py``: which gaps between native calls it finds."""

from collections.abc import Callable
from types import ModuleType

import pytest

from helpers.kernels import needs_kernels


@pytest.fixture
def script(benchmarks: Callable[[str], ModuleType]) -> ModuleType:
    return benchmarks("host_time")


@needs_kernels
@pytest.mark.parametrize(
    ("method", "kinds"),
    [("autoregressive", {"in-chain"}), ("low-bit", {"draft-verify", "verify-draft"}), ("uniform", {"draft-verify"})],
)
def test_gaps_are_told_apart(script: ModuleType, method: str, kinds: set[str]) -> None:
    found = script.measure("tiny", method, {}, new_tokens=32)
    assert kinds | {"forward"} <= set(found)
    assert all(gaps["first_ms"] <= gaps["median_ms"] <= gaps["third_ms"] for gaps in found.values())
