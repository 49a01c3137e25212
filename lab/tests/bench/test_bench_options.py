"""Options that the benchmarks share."""

from selfspec import METHODS
from selfspec_lab.bench.options import default_settings


def test_default_exit_layer() -> None:
    assert default_settings(METHODS["layerskip"], 16) == {"exit_layer": 6}
    assert default_settings(METHODS["layerskip"], 2) == {"exit_layer": 1}
    assert default_settings(METHODS["uniform"], 16) == {}
