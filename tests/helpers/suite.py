"""What holds for every test: one thread, reproducible property tests, nothing kept by this machine's user."""

import pytest
import torch
from hypothesis import settings


def set_up() -> None:
    """One thread, since tiny models gain nothing from more, and property tests that draw the same every time."""
    torch.set_num_threads(1)
    settings.register_profile("selfspec", deadline=None, derandomize=True)
    settings.load_profile("selfspec")


@pytest.fixture(autouse=True)
def no_kept_profiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """No test depends on the latency profiles that the user of this machine keeps."""
    monkeypatch.setattr("selfspec.methods.knapspec.read_latencies", lambda _: None)
    monkeypatch.setattr("selfspec.methods.knapspec.keep_latencies", lambda *_: None)
