"""Copy bandwidth."""

import pytest
import torch

from selfspec_lab.measuring import copy_bytes_per_second

CPU = torch.device("cpu")


def test_a_copy_counts_what_is_read_and_what_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("selfspec_lab.measuring.bandwidth.timed", lambda task, device: 0.5)
    assert copy_bytes_per_second(CPU, size=1000) == 4000
