"""The runtimes that accelerators have, as far as a CPU can play one: graphs and Triton."""

import dataclasses
from pathlib import Path

import pytest
import torch

from helpers.devices import AMPLE, REFERENCE, reasons, small
from helpers.kernels import has_kernels
from helpers.low_bit_model import random_model
from helpers.recorder import StrictRecorder
from selfspec.errors import (
    MissingPackageError,
)
from selfspec.model.observed import take_apart
from selfspec.runtimes import candidates, graphs
from selfspec.runtimes.candidates import find_candidate
from selfspec.runtimes.device_trial import Trial
from selfspec.runtimes.target import Target


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


def test_triton_needs_its_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(candidates, "find_spec", lambda name: None)
    with pytest.raises(MissingPackageError, match=r"pip install 'selfspec\[triton\]'"):
        Target(random_model(), "triton")
    assert find_candidate("triton").obstacle(torch.device("cuda")) is not None
