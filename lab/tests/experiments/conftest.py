"""The tests of claims have few texts; that fewer than 20 decide nothing is tested in ``test_decide.py``."""

import pytest


@pytest.fixture(autouse=True)
def few_pairs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("selfspec_lab.decide.LEAST_PAIRS", 2)
