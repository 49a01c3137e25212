"""What is said, and what runs, where a model has no kernels."""

import warnings
from pathlib import Path

import pytest

from helpers.low_bit_model import SUBLAYERS, random_model
from selfspec.runtimes import kernels, runner
from selfspec.runtimes.branches import describe_weights
from selfspec.runtimes.target import Target


def test_float16_is_said_to_have_no_kernels() -> None:
    """Once: many checkpoints are in it, and nothing else says why they are slow."""
    runner._warn_once.cache_clear()
    with pytest.warns(RuntimeWarning, match="load the model in bfloat16"):
        Target(random_model().half())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Target(random_model().half())
        Target(random_model().bfloat16())
        Target(random_model().half(), "eager")
    runner._warn_once.cache_clear()


def test_without_a_compiler_it_falls_back(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """With a warning each time where kernels were asked for, with one in all where they were not."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("CXX", str(tmp_path / "no-compiler"))
    kernels.find.cache_clear()
    runner._warn_once.cache_clear()
    try:
        with pytest.warns(RuntimeWarning, match="falls back to fused blocks") as caught:
            target = Target(random_model(), "compiled")
        assert len(caught) == 1
        assert target.fused_count == SUBLAYERS
        with pytest.warns(RuntimeWarning, match="are unpacked: the kernels could not be built"):
            assert Target(random_model()).fused_count == SUBLAYERS
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert Target(random_model()).fused_count == SUBLAYERS
        assert kernels.describe().startswith("none (decoding is much slower")
        assert not any(map(describe_weights, target.sublayers))
    finally:
        kernels.find.cache_clear()
