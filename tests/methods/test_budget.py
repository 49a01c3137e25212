"""How much drafts skip by default: by the size of the model, unless a setting says otherwise."""

import math

import pytest

from helpers.models import LAYERS, build, plain_text, prompt
from selfspec.engine import Engine
from selfspec.methods import make_method
from selfspec.methods.skipping import default_skip_ratio, skip_ratio_of_size
from selfspec.runtimes.target import Target


@pytest.mark.parametrize(
    ("parameters", "ratio"), [(0, 0.2), (135_000_000, 0.2), (7_000_000_000, 0.45), (70_000_000_000, 0.45)]
)
def test_small_and_large_models(parameters: int, ratio: float) -> None:
    assert skip_ratio_of_size(parameters) == pytest.approx(ratio)


def test_between_them_the_ratio_grows_with_the_logarithm_of_the_size() -> None:
    middle = math.sqrt(0.2e9 * 7e9)
    assert skip_ratio_of_size(int(middle)) == pytest.approx(0.325, abs=1e-6)
    ratios = [skip_ratio_of_size(int(middle * factor)) for factor in (0.5, 1, 2)]
    assert ratios[1] - ratios[0] == pytest.approx(ratios[2] - ratios[1], abs=1e-6)
    assert ratios == sorted(ratios)


def test_at_least_one_is_skipped() -> None:
    target = Target(build("llama"))
    assert default_skip_ratio(target, 8) == 0.2
    assert [int(count * default_skip_ratio(target, count)) for count in (1, 2, 4, 5, 10)] == [1, 1, 1, 1, 2]


@pytest.mark.parametrize(
    ("method", "others"),
    [
        ("uniform", {"confidence_threshold": 0.0}),
        ("swift", {"confidence_threshold": 0.0, "max_optimization_steps": 0}),
        ("clasp", {"draft_exit_threshold": 0.0}),
        ("self-spec", {"threshold": 0.0}),
    ],
)
def test_methods_skip_by_size_or_by_setting(method: str, others: dict[str, object]) -> None:
    unit = 2 if method == "clasp" else 1  # sublayers of what it skips
    for settings, skipped in (({}, 1), ({"skip_ratio": 0.5}, 3 if method == "clasp" else LAYERS - 2)):
        result = Engine(build("llama"), method=method, settings={**others, **settings}).generate(
            prompt(17), max_new_tokens=24
        )
        assert {len(record.kept.skipped) for record in result.rounds if record.kept} == {unit * skipped}
        assert result.token_ids == plain_text("llama", prompt(17), 24)
        assert result.accepted > 0
    assert make_method(method, Target(build("llama"))).settings.skip_ratio is None
