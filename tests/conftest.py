"""Settings of the whole suite: one thread (tiny models gain nothing from more), reproducible property tests."""

import gc

import pytest
import torch
from hypothesis import settings

torch.set_num_threads(1)
settings.register_profile("selfspec", deadline=None, derandomize=True)
settings.load_profile("selfspec")


def pytest_collection_finish() -> None:
    """What is imported by now stays, and no garbage collection looks through a million objects for it again."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def no_kept_profiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """No test depends on the latency profiles that the user of this machine keeps."""
    monkeypatch.setattr("selfspec.methods.knapspec.read_latencies", lambda _: None)
