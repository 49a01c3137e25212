"""Claims 6 and 9: replays against real rounds, verdicts both ways, and small runs."""

from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from helpers.checkpoints import save_checkpoint
from helpers.models import LAYERS, build, prompt
from judging import as_read, drawn, holding
from selfspec.engine import Engine
from selfspec_lab.checks import conclude
from selfspec_lab.exit_replay import replay_rounds, shadow_matches, static_rounds
from selfspec_lab.experiments import (
    del_static,
    del_untrained,
    find_experiment,
)
from selfspec_lab.experiments.base import Data
from selfspec_lab.experiments.del_static import pick_elsewhere
from selfspec_lab.experiments.del_static_checks import split_static_name, static_name
from selfspec_lab.experiments.lab import Lab
from selfspec_lab.prompts import PROMPTS
from selfspec_lab.replay import Played, play, tokens_per_layer

DOMAINS = list(PROMPTS)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_checkpoint(tmp_path_factory.mktemp("llama"))


# Claim 6


@pytest.mark.parametrize(("exit_layer", "draft_length"), [(1, 3), (3, 1), (4, 6), (5, 18)])
def test_a_replay_has_the_rounds_of_layerskip(exit_layer: int, draft_length: int) -> None:
    settings = {"exit_layer": exit_layer, "draft_length": draft_length}
    engine = Engine(build("llama"), method="layerskip", settings=settings)
    result = engine.generate(prompt(17), max_new_tokens=40)
    assert result.accepted > 0
    matches = shadow_matches(engine.target, prompt(17), result.token_ids)
    assert len(matches) == LAYERS - 1
    rounds = replay_rounds(matches[exit_layer - 1], draft_length)
    assert rounds == [(record.drafted, record.accepted) for record in result.rounds]
    assert tokens_per_layer(static_rounds(matches, exit_layer, draft_length, LAYERS), LAYERS) == pytest.approx(
        tokens_per_layer(play(result.rounds), LAYERS)
    )


@given(st.lists(st.booleans(), min_size=1, max_size=40), st.integers(1, 20))
def test_replayed_rounds_write_the_whole_text(matches: list[bool], draft_length: int) -> None:
    rounds = replay_rounds(matches, draft_length)
    assert sum(accepted + 1 for _, accepted in rounds) == len(matches)
    assert all(0 <= accepted <= drafted <= draft_length for drafted, accepted in rounds)
    if all(matches):
        assert len(rounds) == -(-len(matches) // (draft_length + 1))
    if not any(matches):
        assert len(rounds) == len(matches)


def test_tokens_per_layer_by_hand() -> None:
    assert tokens_per_layer([Played(0.0, 0.0, 0, 1, 1)] * 5, 16) == 1 / 16
    drafted = [Played(0.25, 0.25, 3, 4, 4), Played(0.25, 0.25, 3, 4, 1)]
    assert tokens_per_layer(drafted, 16) == 5 / (2 * (12 + 16))
    plain = Engine(build("llama"), method="autoregressive").generate(prompt(17), max_new_tokens=6)
    assert tokens_per_layer(play(plain.rounds), LAYERS) == pytest.approx(1 / LAYERS)


def test_a_static_choice_is_picked_on_the_other_half() -> None:
    """By the even prompts one is best, by the odd ones the other; each is judged where it is worse."""
    static = {
        "one": {"a": [9.0, 1.0, 9.0], "b": [2.0, 1.0, 2.0]},
        "other": {"a": [3.0, 5.0, 3.0], "b": [1.0, 1.0, 1.0]},
    }
    assert pick_elsewhere(static, ["a", "b"]) == {"a": [3.0, 1.0, 3.0], "b": [1.0, 1.0, 1.0]}
    assert pick_elsewhere(static, ["b"]) == {"b": [2.0, 1.0, 2.0]}
    assert split_static_name(static_name(12, 6)) == (12, 6)


def noisy(value: float) -> dict[str, list[float]]:
    """Ten prompts a domain, all alike but for a trace of noise."""
    return {domain: [value * (1 + 1e-3 * (index % 3)) for index in range(10)] for domain in DOMAINS}


def of_del(etpl: float, machine: float) -> dict[str, list[Data]]:
    both = noisy(etpl), noisy(machine)
    return {
        domain: [{"etpl": one, "machine": other} for one, other in zip(both[0][domain], both[1][domain], strict=True)]
        for domain in DOMAINS
    }


def claim_6(
    own: float = 0.12, best: float = 0.1, picked: float = 0.09, each: float = 0.095, machine: float = 1.5
) -> Data:
    return {
        "layers": 16,
        "static": {
            "E3-γ4": dict.fromkeys(DOMAINS, best),
            "E5-γ6": dict.fromkeys(DOMAINS, best - 0.01),
            "E5-γ3": dict.fromkeys(DOMAINS, best - 0.02),
        },
        "best_static": {"E3-γ4": noisy(best)},
        "picked": {"for all": noisy(picked), "for each": noisy(each), "machine": noisy(1.3)},
        "del": {
            "0.5": of_del(own - 0.003, machine),
            "0.95": of_del(own, machine),
            "1.0": of_del(own - 0.001, machine),
        },
        "speed": {
            "plain": [40.0, 42.0],
            "DEL ω=0.5": [60.0, 61.0],
            "DEL ω=0.95": [61.0, 62.0],
            "DEL ω=1.0": [60.0, 62.0],
            "E3-γ4": [55.0, 56.0],
            "E5-γ6": [50.0, 52.0],
        },
    }


def slow_static(data: Data) -> None:
    data["speed"]["E5-γ6"] = [60.0, 63.0]


def one_bad_domain(data: Data) -> None:
    for by_domain in data["del"].values():
        by_domain["math"] = [{"etpl": 0.0895, "machine": 1.5}] * 10


def other_omega(data: Data) -> None:
    data["del"]["0.5"]["code"] = [{"etpl": 0.05, "machine": 1.0}] * 10


@pytest.mark.parametrize(
    ("data", "change", "failing"),
    [
        (claim_6(), None, set()),
        (claim_6(own=0.095), None, {1}),
        (claim_6(own=0.08), None, {0, 1, 2}),
        (claim_6(), one_bad_domain, {2}),
        (claim_6(each=0.09), None, {3}),
        (claim_6(machine=1.2), None, {4}),
        (claim_6(), slow_static, {5}),
        (claim_6(), other_omega, {6}),
    ],
)
def test_claim_6_is_judged(data: Data, change: Callable[[Data], None] | None, failing: set[int]) -> None:
    if change is not None:
        change(data)
    held = holding(find_experiment("del-static")(), data)
    assert len(held) == 7
    assert {index for index, holds in enumerate(held) if not holds} == failing


def test_claim_6_is_not_applicable_where_no_early_exit_pays() -> None:
    experiment, data = find_experiment("del-static")(), claim_6(best=0.06)
    del data["del"], data["speed"]
    checks = experiment.judge(data)
    assert conclude(checks) == "not applicable"
    assert "E3-γ4, the best, has 0.0600 tokens per loaded layer, plain decoding 0.0625" in checks[0].figure
    assert len(drawn(experiment, data)) == 1


def test_claim_6_is_drawn() -> None:
    assert len(drawn(find_experiment("del-static")(), claim_6())) == 3


def test_claim_6_is_measured(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    amounts = del_static.Amounts(2, 20, (0.5, 0.95), (0.5, 0.95), (1, 4), 1, 8, 1, widen=1)
    experiment = del_static.DelStatic(amounts)
    monkeypatch.setattr(del_static.checks, "early_exit_pays", lambda _: False)
    data = as_read(experiment.measure(Lab(str(folder))))
    assert "del" not in data, "DEL was run though no early exit pays"
    monkeypatch.setattr(del_static.checks, "early_exit_pays", lambda _: True)
    data = as_read(experiment.measure(Lab(str(folder))))
    assert len(data["static"]) == (LAYERS - 1) * 2
    assert all(set(by_domain) == set(DOMAINS) for by_domain in data["static"].values())
    assert len({str(values) for values in data["del"]["0.95"].values()}) == 3
    assert any(each["etpl"] != pytest.approx(1 / LAYERS) for each in data["del"]["0.95"]["math"]), "nothing was drafted"
    assert all(each["machine"] > 0 for values in data["del"]["0.95"].values() for each in values)
    assert set(data["speed"]) > {"plain", "DEL ω=0.5", "DEL ω=0.95"}
    assert len(data["speed"]) == 3 + 3, "three static choices are timed"
    assert all(speed > 0 for samples in data["speed"].values() for speed in samples)
    assert len(holding(experiment, data)) == 7
    assert drawn(experiment, data)


# Claim 9


def drafts(accepted: int) -> dict[str, list[Data]]:
    """Outputs of 20 tokens with five draft tokens of half of the layers a round, of which some are accepted."""
    each = {"prompt_tokens": 50, "tokens_per_second": 30.0, "drafted": 50, "accepted": 10 * accepted}
    rounds = [[0.5, 0.5, 5, 6, accepted + 1]] * 10
    return {domain: [{**each, "rounds": rounds, "trace": f"{domain} {n}"} for n in range(3)] for domain in DOMAINS}


def claim_9(slow: float = 0.8, few: int = 1, many: int = 4) -> Data:
    return {
        "speed": {
            domain: {
                "untrained plain": [40.0, 44.0],
                "untrained DEL": [40.0 * slow, 43.0 * slow],
                "trained plain": [40.0, 41.0],
                "trained DEL": [56.0, 57.0],
            }
            for domain in DOMAINS
        },
        "drafts": {"untrained": drafts(few), "trained": drafts(many)},
    }


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (claim_9(), [True, True, True, True]),
        (claim_9(few=5, many=5), [False, True, True, False]),
        (claim_9(slow=1.2), [True, False, True, True]),
        (claim_9(many=1), [True, True, False, False]),
    ],
)
def test_claim_9_is_judged(data: Data, expected: list[bool]) -> None:
    experiment = find_experiment("del-untrained")()
    assert holding(experiment, data) == expected
    assert [check.counts for check in experiment.judge(data)] == [True, False, False, False]
    assert len(drawn(experiment, data)) == 2


def test_claim_9_is_measured(folder: Path) -> None:
    """With a model of the lab's own, the trained checkpoint stays what it is."""
    experiment = del_untrained.DelUntrained(del_untrained.Amounts(1, 12, 1, 6, 1, widen=1))
    data = as_read(experiment.measure(Lab(str(folder))))
    assert set(data["speed"]) == set(DOMAINS)
    speeds = data["speed"]["code"]
    assert set(speeds) == {f"{kind} {name}" for kind in ("untrained", "trained") for name in ("plain", "DEL")}
    for kind in ("untrained", "trained"):
        outputs = [each for by_prompt in data["drafts"][kind].values() for each in by_prompt]
        assert sum(each["drafted"] for each in outputs) > 0
        assert {sum(row[-1] for row in each["rounds"]) for each in outputs} == {11}
    assert data["drafts"]["untrained"] != data["drafts"]["trained"]
    assert len(holding(experiment, data)) == 4
