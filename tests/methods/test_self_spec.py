"""Draft & Verify: the profile, and the threshold that outlives requests."""

from pathlib import Path
from typing import Any

import pytest

from helpers.models import LAYERS, SUBLAYERS, build, plain_text, prompt
from selfspec.engine import Engine
from selfspec.errors import InvalidSettingError, StateError
from selfspec.methods import make_method
from selfspec.methods.fixed import Profile, SelfSpec
from selfspec.methods.skipping import evenly_skipped
from selfspec.methods.state import LearnedState
from selfspec.model.kept import KeptSet
from selfspec.runtimes.target import Target

UNIFORM = evenly_skipped(LAYERS, 0.2)


def make_engine(**settings: Any) -> tuple[Engine, SelfSpec]:
    engine = Engine(build("llama"), method="self-spec", settings=settings)
    assert isinstance(engine.method, SelfSpec)
    return engine, engine.method


def test_without_a_profile_skipping_is_uniform() -> None:
    engine, method = make_engine()
    result = engine.generate(prompt(17), max_new_tokens=24)
    assert {record.kept for record in result.rounds} == {KeptSet.skipping(UNIFORM, SUBLAYERS)}
    assert method.profile == Profile(UNIFORM)


def test_a_ratio_that_skips_nothing_is_refused() -> None:
    with pytest.raises(InvalidSettingError, match="raise it"):
        make_method("self-spec", Target(build("llama")), {"skip_ratio": 0.01})


def test_the_threshold_outlives_the_request() -> None:
    engine, _ = make_engine(step=0.5, target_acceptance=1.0, threshold=0.1)
    first, second = (engine.generate(prompt(17, seed), max_new_tokens=24) for seed in range(2))
    fresh, _ = make_engine(step=0.5, target_acceptance=1.0, threshold=0.1)
    thresholds = [record.threshold for record in first.rounds]
    assert thresholds[0] == 0.1
    assert len(set(thresholds)) > 1
    assert second.rounds[0].threshold != fresh.generate(prompt(17, 1), max_new_tokens=24).rounds[0].threshold
    last = first.rounds[-1]
    assert last.threshold is not None
    moved = 0.05 if last.drafted else 0.0  # a tenth of the step, up or down or not at all
    assert abs(second.rounds[0].threshold - last.threshold) <= moved + 1e-9


def test_profile_and_threshold_are_saved_and_loaded(tmp_path: Path) -> None:
    engine, method = make_engine()
    profile = Profile((3, 4, 8), {"iterations": 40, "versions": {"selfspec": "0.1.0"}})
    method.adopt(profile)
    engine.generate(prompt(17), max_new_tokens=24)
    engine.save_state(tmp_path / "profile")
    other, loaded = make_engine()
    other.load_state(tmp_path / "profile")
    assert loaded.profile == profile
    assert loaded.state() == method.state()
    result, expected = (one.generate(prompt(17, 1), max_new_tokens=24) for one in (other, engine))
    assert [record.threshold for record in result.rounds] == [record.threshold for record in expected.rounds]
    assert {record.kept for record in result.rounds} == {KeptSet.skipping((3, 4, 8), SUBLAYERS)}
    assert result.token_ids == plain_text("llama", prompt(17, 1), 24)
    assert result.accepted > 0


@pytest.mark.parametrize(
    "changes",
    [
        {"skipped": [0]},
        {"skipped": [10]},
        {"skipped": [4, 3]},
        {"skipped": None},
        {"threshold": 2.0},
        {"threshold": None},
    ],
    ids=str,
)
def test_a_damaged_profile_changes_nothing(changes: dict[str, Any]) -> None:
    _, method = make_engine()
    before = method.state()
    with pytest.raises(StateError, match=r"(tune|learn) it again"):
        method.restore(LearnedState({**before.values, **changes}))
    assert method.state() == before
