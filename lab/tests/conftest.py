"""The laboratory's tests run under the settings of the library's, and measure nothing of the machine."""

import os

os.environ.setdefault("TRITON_INTERPRET", "1")  # read when Triton is imported, and torch may import it

import importlib
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest

from helpers.checkpoints import save_checkpoint
from helpers.suite import (
    auto_that_drafts,
    cheap_collections,
    no_kept_profiles,
    pytest_collection_modifyitems,
    set_up,
)
from measured_runs import LATENCIES, measure
from selfspec.runtimes.target import Target
from selfspec_lab.methods.mixed.measuring import Conditions, Found
from selfspec_lab.methods.mixed.plan import Plan

__all__ = ["auto_that_drafts", "cheap_collections", "no_kept_profiles", "pytest_collection_modifyitems"]

set_up()


@pytest.fixture(autouse=True, scope="session")
def _no_measuring_of_the_machine() -> Iterator[None]:
    """Copies are small, and runs take given latencies."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("selfspec_lab.measuring.bandwidth.CPU_COPY_BYTES", 2**16)
        part = {"attention_per_token": 0.0, "attention_base": 1e-3, "mlp": 1e-3, "head": 1e-3, "rest": 0.0}
        profile = {"latencies": LATENCIES.to_dict(), "rows": {"1": part, "8": {**part, "mlp": 2e-3}}}
        patch.setattr("selfspec_lab.bench.run.runner.kept_profile", lambda *_: profile)
        yield


@pytest.fixture(autouse=True, scope="session")
def _clean_checkout() -> Iterator[None]:
    """Commands write their results whatever state the checkout is in; ``test_stamp.py`` tests that they look."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("selfspec_lab.bench.stamp.git_state", lambda _: ("0" * 40, False))
        yield


@pytest.fixture(autouse=True)
def no_kept_plans(monkeypatch: pytest.MonkeyPatch) -> None:
    """No test depends on the plan of ``mixed`` that the user of this machine keeps."""
    monkeypatch.setattr("selfspec_lab.methods.mixed.method.find_plan", given_plan)


@pytest.fixture
def benchmarks(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], ModuleType]:
    """Imports a module of the folder ``benchmarks`` by its name."""
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "benchmarks")
    return importlib.import_module


def given_plan(target: Target, _: Conditions) -> Found:
    """A plan of ``mixed`` that drafts, whatever the speed of this machine."""
    bits = (8, 6) * target.layer_count + (8,)
    return Found(Plan(bits, draft_length=4, acceptance=0.9, seconds=1e-3, tokens_per_second=2e3), pays=True)


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The folder of a tiny Llama model and its tokenizer, without a chat template. No test changes it."""
    return str(save_checkpoint(tmp_path_factory.mktemp("checkpoint")))


@pytest.fixture(scope="session")
def run_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a finished run with the standard options; tests only read it."""
    path = tmp_path_factory.mktemp("run") / "out"
    measure(path)
    return path
