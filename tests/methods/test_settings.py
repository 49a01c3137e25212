"""Settings of methods: types, ranges, texts of a command line, nearest names, descriptions."""

from dataclasses import dataclass
from typing import Any

import pytest

from selfspec.errors import InvalidSettingError, UnknownMethodError
from selfspec.methods import METHODS
from selfspec.methods.registry import find_method
from selfspec.methods.settings import MethodSettings, setting


@dataclass(frozen=True)
class Example(MethodSettings):
    count: int = setting(3, "how many", minimum=1, maximum=8)
    ratio: float = setting(0.5, "how much", minimum=0.0, maximum=1.0)
    layer: int | None = setting(None, "which", minimum=1)
    adaptive: bool = setting(True, "whether")
    order: str = setting("first", "in which order", choices=("first", "last"))


def parse(**values: Any) -> Example:
    return Example.parse("example", values)


def test_defaults() -> None:
    assert parse() == Example(count=3, ratio=0.5, layer=None, adaptive=True, order="first")


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({"count": "8"}, Example(count=8)),
        ({"ratio": "1"}, Example(ratio=1.0)),
        ({"ratio": ".25"}, Example(ratio=0.25)),
        ({"layer": "4"}, Example(layer=4)),
        ({"layer": "none"}, Example(layer=None)),
        ({"layer": "None"}, Example(layer=None)),
        ({"adaptive": "false"}, Example(adaptive=False)),
        ({"adaptive": "True"}, Example(adaptive=True)),
        ({"order": "last"}, Example(order="last")),
    ],
)
def test_texts_are_read_as_the_type_of_their_setting(values: dict[str, str], expected: Example) -> None:
    assert parse(**values) == expected


def test_whole_numbers_stand_for_floats() -> None:
    ratio = parse(ratio=1).ratio
    assert ratio == 1.0
    assert isinstance(ratio, float)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("count", 0, "count must be at least 1 and at most 8, not 0"),
        ("count", 9, "at most 8, not 9"),
        ("count", 2.0, "count must be int, not 2.0"),
        ("count", True, "count must be int, not True"),
        ("count", "2.5", "count must be int, not '2.5'"),
        ("count", "", "count must be int, not ''"),
        ("count", None, "count must be int, not None"),
        ("ratio", -0.1, "ratio must be at least 0 and at most 1, not -0.1"),
        ("ratio", float("nan"), "ratio must be float, not nan"),
        ("ratio", "nan", "ratio must be float, not nan"),
        ("ratio", "inf", "ratio must be float, not inf"),
        ("ratio", "half", "ratio must be float, not 'half'"),
        ("ratio", 10**400, "ratio must be float, not inf"),
        ("ratio", False, "ratio must be float, not False"),
        ("layer", 0, "layer must be at least 1, not 0"),
        ("layer", "two", "layer must be int or none, not 'two'"),
        ("adaptive", 1, "adaptive must be bool, not 1"),
        ("adaptive", "maybe", "adaptive must be bool, not 'maybe'"),
        ("order", "frist", "order is one of first, last, not 'frist'; did you mean 'first'?"),
        ("order", 1, "order must be str, not 1"),
    ],
)
def test_what_does_not_fit_is_refused(name: str, value: Any, message: str) -> None:
    with pytest.raises(InvalidSettingError) as refusal:
        parse(**{name: value})
    assert message in str(refusal.value)


def test_settings_check_themselves_without_parsing() -> None:
    with pytest.raises(InvalidSettingError, match="count must be at least 1"):
        Example(count=-1)


def test_unknown_settings_name_the_nearest_and_all() -> None:
    with pytest.raises(InvalidSettingError) as refusal:
        parse(ratoi=0.5)
    assert str(refusal.value) == (
        "example has no setting 'ratoi'; did you mean 'ratio'? (its settings: count, ratio, layer, adaptive, order)"
    )


def test_unknown_settings_of_a_method_without_any() -> None:
    with pytest.raises(InvalidSettingError, match=r"autoregressive has no setting 'draft_length' \(it has none\)"):
        find_method("autoregressive").Settings.parse("autoregressive", {"draft_length": 4})


@pytest.mark.parametrize(("wrong", "right"), [("layerskp", "layerskip"), ("unifrom", "uniform"), ("fastest", None)])
def test_unknown_methods_name_the_nearest_and_all(wrong: str, right: str | None) -> None:
    with pytest.raises(UnknownMethodError) as refusal:
        find_method(wrong)
    assert all(name in str(refusal.value) for name in METHODS)
    assert ("did you mean" in str(refusal.value)) == (right is not None)
    assert right is None or f"did you mean '{right}'?" in str(refusal.value)


def test_description_says_type_default_range_and_help() -> None:
    described = {entry["name"]: entry for entry in Example.describe()}
    assert described["count"] == {
        "name": "count",
        "type": "int",
        "default": 3,
        "minimum": 1,
        "maximum": 8,
        "choices": [],
        "help": "how many",
    }
    assert described["layer"]["type"] == "int or none"
    assert described["order"]["choices"] == ["first", "last"]


@pytest.mark.parametrize("name", METHODS)
def test_every_method_describes_itself(name: str) -> None:
    method = METHODS[name]
    assert method.summary
    assert method.source
    defaults = method.Settings()
    for entry in method.Settings.describe():
        assert entry["help"]
        assert getattr(defaults, entry["name"]) == entry["default"]
