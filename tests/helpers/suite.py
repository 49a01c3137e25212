"""What holds for every test: one thread, reproducible property tests, nothing kept by this machine's user."""

import gc
import os
import sys

import pytest
import torch
from hypothesis import settings

from helpers.auto import eager_preparation, give
from helpers.covering import mark_the_rest
from selfspec import memory
from selfspec.runtimes.costs.parts import LatencyProfile, measure_latencies
from selfspec.runtimes.precision import Precision
from selfspec.runtimes.target import Target


def set_up() -> None:
    """One thread, since tiny models gain nothing from more, and property tests that draw the same every time.

    With a sanitizer (`make test-sanitized`) each matrix has memory of its own, whose ends are watched.
    """
    torch.set_num_threads(1)
    if "libasan" in os.environ.get("LD_PRELOAD", ""):
        memory._LARGE = sys.maxsize
    settings.register_profile("selfspec", deadline=None, derandomize=True)
    settings.load_profile("selfspec")
    gc.set_threshold(20_000, 20, 20)


@pytest.hookimpl(tryfirst=True)  # before `-m "not slow"` looks at the markers
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Leaves out of `make test` what `make test-slow` runs of large matrices; what takes long begins first.

    No worker then waits at the end for another that builds kernels, and one worker alone has the tests that wait for
    the same processes.
    """
    mark_the_rest(items)
    items.sort(key=lambda item: item.get_closest_marker("early") is None)


@pytest.fixture(autouse=True, scope="module")
def cheap_collections() -> None:
    """What outlives a file of tests, such as imported modules and shared models, is not looked through for garbage.

    Collections take a third of the time otherwise, and every measurement of memory begins with one.
    """
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def no_kept_profiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """No test depends on the latency profiles that the user of this machine keeps."""
    monkeypatch.setattr("selfspec.runtimes.costs.latencies.read_latencies", lambda _: None)
    monkeypatch.setattr("selfspec.runtimes.costs.latencies.keep_latencies", lambda *_: None)
    monkeypatch.setattr("selfspec.runtimes.costs.latencies.kept_latencies", measured_latencies)


def measured_latencies(target: Target, precision: Precision) -> LatencyProfile:
    """Latencies of low-bit weights, measured each time."""
    return measure_latencies(target, (8, 16), 1, precision)


@pytest.fixture(autouse=True)
def auto_that_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    """No test depends on the speed of this machine: ``auto`` is told that drafts pay."""
    give(monkeypatch, eager_preparation)
