"""The runtimes that accelerators have, as far as a CPU can play one: graphs, compiled blocks, Triton."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch

from helpers.devices import AMPLE, REFERENCE, reasons, small
from helpers.kernels import has_kernels
from helpers.low_bit_model import random_model
from helpers.models import prompt
from helpers.recorder import StrictRecorder
from selfspec import Engine
from selfspec.errors import (
    MissingPackageError,
)
from selfspec.model.observed import take_apart
from selfspec.runtimes import candidates, graphs, inductor
from selfspec.runtimes.candidates import find_candidate
from selfspec.runtimes.device_trial import Trial
from selfspec.runtimes.inductor import Compiler
from selfspec.runtimes.target import Target

INDUCTOR = find_candidate("inductor")


@pytest.fixture(autouse=True)
def _kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    has_kernels()  # finds those of the user: in an empty cache folder they would be built again
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


def test_graphs_can_be_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a recorder that replays operations on the CPU."""
    monkeypatch.setattr(graphs, "find_recorder", lambda device: StrictRecorder())
    graphed = dataclasses.replace(find_candidate("graphs"), devices=frozenset())
    trial = Trial(take_apart(random_model(max_position_embeddings=1024)), (REFERENCE, graphed), budget=AMPLE).run()
    assert reasons(trial)["graphs"] is None


def test_graphs_that_give_up_are_out() -> None:
    graphed = dataclasses.replace(find_candidate("graphs"), devices=frozenset())
    trial = Trial(small(), (REFERENCE, graphed), budget=AMPLE).run()
    assert reasons(trial)["graphs"] == "there are no CUDA graphs on a device of type 'cpu'"


@pytest.mark.slow
def test_compiled_blocks_pass() -> None:
    """One compiled form of each part serves all layers and any number of rows."""
    trial = Trial(take_apart(random_model()), (REFERENCE, INDUCTOR), budget=AMPLE).run()
    assert reasons(trial)["inductor"] is None


def test_what_is_compiled_is_called_as_it_is_uncompiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a compiler that changes nothing: its forms run, and write what uncompiled blocks write."""
    called = []
    monkeypatch.setattr(
        inductor, "compiled", lambda function: lambda *given: called.append(function) or function(*given)
    )
    model = random_model()
    written = {
        runtime: Engine(model, method="uniform", runtime=runtime).generate(prompt(9), max_new_tokens=8)
        for runtime in ("inductor", "eager")
    }
    assert len(set(called)) == 3, "queries, keys and values; what leaves attention; the MLP"
    assert written["inductor"].token_ids == written["eager"].token_ids
    assert sum(each.accepted for each in written["inductor"].rounds) > 0


def test_blocks_run_uncompiled_once_compiling_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    def compile(function: Any, **_: Any) -> Any:
        def call(*arguments: Any) -> Any:
            raise RuntimeError("no compiler")

        return call

    monkeypatch.setattr(inductor, "compiled", lambda function: compile(function))
    model = random_model()
    with pytest.warns(
        RuntimeWarning, match="inductor runtime falls back to fused blocks: torch.compile failed: no comp"
    ):
        result = Engine(model, method="autoregressive", runtime="inductor").generate(prompt(9), max_new_tokens=8)
    assert (
        result.token_ids
        == Engine(model, method="autoregressive", runtime="eager").generate(prompt(9), max_new_tokens=8).token_ids
    )
    trial = Trial(small(), (REFERENCE, INDUCTOR), budget=AMPLE).run()
    assert reasons(trial)["inductor"] == "torch.compile failed: no compiler"
    monkeypatch.setattr(inductor, "compiled", lambda function: failing_with(torch.OutOfMemoryError("out of memory")))
    with pytest.raises(torch.OutOfMemoryError):
        Compiler()(lambda rows, widest, adapt: rows, torch.zeros(1), 1, None)


def failing_with(error: Exception) -> Any:
    def call(*_: Any) -> None:
        raise error

    return call


def test_triton_needs_its_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(candidates, "find_spec", lambda name: None)
    with pytest.raises(MissingPackageError, match=r"pip install 'selfspec\[triton\]'"):
        Target(random_model(), "triton")
    assert find_candidate("triton").obstacle(torch.device("cuda")) is not None
