"""Rounds that results hold are read back as they were."""

import pytest

from selfspec.model.kept import KeptSet
from selfspec.runtimes.precision import Precision
from selfspec.types import Forecast, PhaseSeconds, Round
from selfspec_lab.bench.run.measurement import read_round
from selfspec_lab.methods.mixed.precision import MixedPrecision

SUBLAYERS = 8
MIXED = MixedPrecision(head=8, sublayers=(4, 16) * 4)


def played(precision: Precision | None) -> Round:
    kept, seconds = KeptSet((0, 1, 3), SUBLAYERS), PhaseSeconds(draft=0.25, verify=0.5)
    return Round(4, 4, 2, (7, 9, 3), kept, 0.5, seconds, precision=precision, forecast=Forecast(200.0, 100.0))


@pytest.mark.parametrize("precision", [None, Precision(4, 8, 16, 32), MIXED], ids=str)
def test_a_round_is_read_back(precision: Precision | None) -> None:
    written = played(precision).to_dict()
    assert read_round(written, SUBLAYERS) == played(precision)
    for name in ("precision", "forecast"):  # as in files that are older
        del written[name]
        assert getattr(read_round(written, SUBLAYERS), name) is None


def test_bits_by_sublayer_of_older_files_are_read() -> None:
    described = {**played(MIXED).to_dict(), "precision": {"sublayers": [4, 16] * 4, "head": 8, "group": 32}}
    assert read_round(described, SUBLAYERS) == played(MIXED)
