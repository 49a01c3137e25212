"""The tests of claims have few texts; that fewer than 20 decide nothing is tested in ``test_decide.py``."""

import pytest


@pytest.fixture(autouse=True)
def few_pairs(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("decide", "experiments.knapspec_prediction"):
        monkeypatch.setattr(f"selfspec_lab.{module}.LEAST_PAIRS", 2)
