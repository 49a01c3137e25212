"""Searches without scikit-learn: random search runs, Bayesian optimisation is refused before it generates."""

import sys
from dataclasses import replace

import pytest

from helpers.models import build, prompt
from selfspec import Engine
from selfspec.errors import MissingPackageError

RANDOM = {"context_window": 8, "bayesian_interval": 25, "max_optimization_steps": 24, "skip_ratio": 0.4}


@pytest.fixture(autouse=True)
def _no_scikit_learn(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "sklearn"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "sklearn", None)


def test_random_search_needs_no_scikit_learn() -> None:
    model = build("llama")
    result = Engine(model, None, "swift", settings=RANDOM).generate(prompt(12), max_new_tokens=40, ignore_eos=True)
    plain = Engine(model, method="autoregressive").generate(prompt(12), max_new_tokens=40, ignore_eos=True)
    assert result.token_ids == plain.token_ids
    assert result.drafted > 0
    assert result.accepted > 0


@pytest.mark.parametrize("changed", [{"max_optimization_steps": 25}, {"recheck_interval": 5}])
def test_swift_says_what_to_install_when_it_is_made(changed: dict[str, int]) -> None:
    with pytest.raises(MissingPackageError, match=r"selfspec\[search\].*max_optimization_steps"):
        Engine(build("llama"), None, "swift", settings=RANDOM | changed)


def test_a_state_that_leads_to_a_gaussian_process_is_refused() -> None:
    """The state is that of a search that began anew after step 24, so its next step would ask the Gaussian process."""
    method = Engine(build("llama"), None, "swift", settings=RANDOM).method
    state = method.state()
    method.restore(state)
    begun_anew = replace(state, values={**state.values, "steps": 24, "begun": 24})
    with pytest.raises(MissingPackageError, match=r"selfspec\[search\]"):
        method.restore(begun_anew)
