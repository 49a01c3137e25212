"""Options that the benchmarks share."""

import pytest

from selfspec import METHODS
from selfspec.errors import InvalidParameterError, UnknownMethodError
from selfspec.methods import find_method
from selfspec_lab.bench.options import BenchOptions, default_settings
from selfspec_lab.cli.bench_options import chosen_methods


def test_default_exit_layer() -> None:
    assert default_settings(METHODS["layerskip"], 16) == {"exit_layer": 6}
    assert default_settings(METHODS["layerskip"], 2) == {"exit_layer": 1}
    assert default_settings(METHODS["uniform"], 16) == {}
    assert default_settings(METHODS["del"], 16) == {}


def test_a_papers_exit_layer_is_its_own() -> None:
    assert default_settings(find_method("paper(layerskip)"), 16) == {}


def test_a_method_that_is_not_installed_is_measured_by_its_reference() -> None:
    reference = "selfspec.methods.fixed:Uniform"
    options = BenchOptions(methods=("uniform", reference), settings={reference: {"skip_ratio": 0.25}})
    assert options.method_names == ["uniform", reference]
    assert all(find_method(name) is METHODS["uniform"] for name in options.method_names)
    assert options.settings == {reference: {"skip_ratio": 0.25}}
    with pytest.raises(UnknownMethodError):
        BenchOptions(methods=("nothing",))


def test_papers_come_after_the_methods_that_are_named() -> None:
    assert chosen_methods(None, "all", None, False) == ("all",)
    assert chosen_methods("suffix,del", "all", None, False) == ("suffix", "del")
    assert chosen_methods(None, "all", "del,swift-v1", False) == ("paper(del)", "paper(swift-v1)")
    assert chosen_methods("swift", "all", "swift-v1", True) == ("swift", "paper(swift-v1, authors)")
    assert chosen_methods("del,paper(del, authors)", "all", None, False) == ("del", "paper(del, authors)")
    with pytest.raises(InvalidParameterError, match="give --paper too"):
        chosen_methods(None, "all", None, True)
