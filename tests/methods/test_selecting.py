"""``SelectingMethod``: what every selecting method does where a selection pays, and where it does not."""

import warnings
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from helpers.clock import Always
from helpers.models import SUBLAYERS, build, plain_text, prompt
from selfspec.decoding.drafter import Needs
from selfspec.engine import Engine
from selfspec.errors import StateError
from selfspec.methods.payoff import Record
from selfspec.methods.state import LearnedState
from selfspec.methods.swift import matchness, matchness_if_above
from selfspec.methods.swift_search import expected_improvement
from selfspec.model.kept import KeptSet
from selfspec.runtimes.costs.parts import LatencyProfile
from selfspec.runtimes.target import Target
from selfspec_lab.testing import read_text

SETTINGS: dict[str, dict[str, Any]] = {
    "clasp": {"skipped_layers": 2, "draft_exit_threshold": 0.2, "update_interval": 3},
    "del": {},
    "knapspec": {"interval": 4, "recent_tokens": 6},
    "swift": {"context_window": 8, "bayesian_interval": 50, "max_matchness": 1.0},
}


@pytest.fixture(autouse=True)
def one_profile(monkeypatch: pytest.MonkeyPatch) -> None:
    """KnapSpec selects with the same latencies in every test."""
    profile = LatencyProfile("cpu", "float32", SUBLAYERS // 2, 0.0, 1e-3, 1e-3, 0.0, 0.0)
    monkeypatch.setattr("selfspec.runtimes.costs.latencies.measure_latencies", lambda _: profile)


def engine(method: str, pays: bool) -> Engine:
    made = Engine(build("llama"), method=method, settings=SETTINGS[method])
    made.method.payoff = Always(pays)
    return made


def write(made: Engine, new_tokens: int = 48) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        result = made.generate(prompt(17), max_new_tokens=new_tokens)
    assert result.token_ids == plain_text("llama", prompt(17), new_tokens)
    return result


def selections(made: Engine) -> int:
    return len(made.method.payoff._costs) if made.method.name != "swift" else made.method.search.steps


@pytest.mark.parametrize("method", SETTINGS)
def test_selections_are_made_only_where_they_pay(method: str) -> None:
    made = engine(method, pays=True)
    result = write(made)
    assert result.drafted > 0
    assert selections(made) > 3
    made.method.payoff = Always(False)
    steps = made.method.search.steps if method == "swift" else 0
    assert write(made).accepted > 0, "the last choice drafts on"
    assert selections(made) == steps


@pytest.mark.parametrize("method", ["clasp", "knapspec"])
def test_a_request_starts_with_the_last_choice_which_is_saved(method: str) -> None:
    made = engine(method, pays=True)
    write(made)
    other = engine(method, pays=False)
    assert write(other).drafted == 0, "it has no choice yet, and none pays"
    other.method.restore(made.method.state())
    other.method.payoff = Always(False)
    result = write(other)
    assert other.method.last_choice.selection == made.method.last_choice.selection
    assert {record.kept for record in result.rounds if record.kept} == {made.method.last_choice.draft.kept}
    assert result.accepted > 0


@pytest.mark.parametrize("skipped", [[0], [1, 0], [0, 9], "all"])
def test_layers_that_do_not_fit_are_refused(skipped: Any) -> None:
    with pytest.raises(StateError, match="learn it again"):
        engine("clasp", pays=False).method.restore(LearnedState({"skipped": skipped}))


def records(method: Any) -> list[Record]:
    """The records of whatever it may draft with."""
    return method._records if method.name == "del" else [method.last_choice.record]


@pytest.mark.parametrize("method", SETTINGS)
def test_a_choice_that_promises_less_than_plain_decoding_is_declined(method: str) -> None:
    made = engine(method, pays=True)
    write(made)
    made.method.payoff = Always(False)
    for accepted in (0, 4):
        for each in records(made.method):
            for _ in range(400):
                each.note_round(4, accepted)
        assert (write(made).drafted > 0) == (accepted > 0)


def test_the_record_of_swift_belongs_to_its_best_set() -> None:
    method = engine("swift", pays=False).method
    before = method.last_choice.record
    assert method.last_choice.record is before
    candidate = method.search.next_candidate()
    method.search.observe(candidate, 0.1)
    better = method.search.next_candidate()
    method.search.observe(better, 0.9)
    assert method.last_choice.record is not before


@given(st.floats(0, 1), st.floats(0, 1), st.floats(0.01, 1))
def test_the_expected_improvement_against_a_sum(best: float, mean: float, deviation: float) -> None:
    step = deviation / 200
    total = 0.0
    for index in range(-1600, 1600):
        value = mean + (index + 0.5) * step
        density = 2.718281828459045 ** (-0.5 * ((value - mean) / deviation) ** 2) / (deviation * 2.5066282746310002)
        total += max(0.0, value - best) * density * step
    assert expected_improvement(best, mean, deviation) == pytest.approx(total, abs=1e-4)


@torch.inference_mode()
def test_a_candidate_that_cannot_win_is_left_after_a_quarter() -> None:
    """The score is above the best one exactly where the matchness is."""
    _, prefill = read_text(Target(build("llama")), prompt(40), Needs(probe_rows=16))
    probe, end = prefill.probe, 41
    seen = set()
    for skipped in range(1, 8):
        kept = KeptSet.skipping(range(2, 2 + skipped), SUBLAYERS)
        whole = matchness(probe, kept, 16, end)
        for best in (0.0, 0.3, whole - 0.01, whole, whole + 0.01, 0.99):
            found = matchness_if_above(probe, kept, 16, best, end)
            assert (found > best) == (whole > best)
            assert found == whole or found <= best
            seen.add(found == whole)
    assert seen == {True, False}
