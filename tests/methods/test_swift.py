"""SWIFT: proposals against a Gaussian process by hand, matchness from scratch, the search's rules, state, threads."""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from helpers.matchness import matchness_from_scratch
from helpers.models import LAYERS, SUBLAYERS, build, plain_text, prompt
from helpers.table import DRAWS, KEPT, p_value, speculative
from selfspec.decoding.draft import ConfidenceThreshold, LayerDraft
from selfspec.decoding.drafter import Probe
from selfspec.engine import Engine
from selfspec.errors import InvalidSettingError, StateError
from selfspec.methods import layer_search, make_method, swift, swift_search
from selfspec.methods.layer_search import (
    Observations,
    Point,
    discretise,
    generator_of,
    point_of,
    random_point,
    skipped_by,
    suggest_point,
)
from selfspec.methods.skipping import evenly_skipped
from selfspec.methods.state import LearnedState
from selfspec.methods.swift import Swift, authors_greedy_count, candidate_count
from selfspec.methods.swift_search import SwiftSearch, SwiftSearchSettings
from selfspec.model.kept import KeptSet
from selfspec.runtimes.target import Target

FREE = range(2, 2 * LAYERS - 2)
QUICK = {
    "schedule": "paper",
    "context_window": 6,
    "bayesian_interval": 4,
    "max_matchness": 1.0,
    "adjustment_interval": 1000,
}


# Points and proposals


def test_points_and_sublayers() -> None:
    point = point_of((2, 5, 9), FREE)
    assert point.tolist() == [True, False, False, True, False, False, False, True]
    assert skipped_by(point, FREE) == (2, 5, 9)
    assert skipped_by(point_of((), FREE), FREE) == ()


def test_discretise_by_hand() -> None:
    values = np.array([[0.9, 0.1, 0.6, 0.55], [0.2, 0.3, 0.1, 0.4]])
    assert discretise(values, 2).astype(int).tolist() == [[1, 0, 1, 0], [0, 1, 0, 1]]
    assert discretise(values, None).astype(int).tolist() == [[1, 0, 1, 1], [0, 0, 0, 0]]


def test_random_search_tries_every_set_equally_often() -> None:
    tries = [skipped_by(random_point(4, 2, generator_of(0, step)), range(4)) for step in range(1200)]
    counts = {drawn: tries.count(drawn) for drawn in set(tries)}
    assert len(counts) == 6
    assert all(150 < count < 250 for count in counts.values()), counts


def upper_bounds(points: Any, scores: Any, sets: Any, kappa: float) -> Any:
    """Mean + kappa · deviation of a Gaussian process, written out; the likeliest of the length scales."""

    def kernel(left: Any, right: Any, length: float) -> Any:
        distance = np.sqrt(((left[:, None] - right[None]) ** 2).sum(-1) / points.shape[1]) * np.sqrt(5) / length
        return (1 + distance + distance**2 / 3) * np.exp(-distance)

    centred = (scores - scores.mean()) / scores.std()
    likelihoods = {}
    for length in (0.25, 0.5, 1.0, 2.0):
        covariance = kernel(points, points, length) + 0.01 * np.eye(len(points))
        likelihoods[length] = -centred @ np.linalg.inv(covariance) @ centred - np.linalg.slogdet(covariance)[1]
    length = max(likelihoods, key=lambda length: likelihoods[length])
    inverse = np.linalg.inv(kernel(points, points, length) + 0.01 * np.eye(len(points)))
    cross = kernel(sets, points, length)
    mean = cross @ inverse @ centred
    deviation = np.sqrt(1 - np.einsum("ij,jk,ik->i", cross, inverse, cross))
    return scores.mean() + scores.std() * (mean + kappa * deviation)


@pytest.mark.parametrize("kappa", [0.0, 2.5, 2.576])
@pytest.mark.parametrize("seed", range(4))
def test_the_proposal_has_the_highest_upper_bound_of_all_new_sets(seed: int, kappa: float) -> None:
    every = np.array([[index in chosen for index in range(6)] for chosen in combinations(range(6), 3)])
    generator = np.random.default_rng(seed)
    order, weights = generator.permutation(len(every)), generator.standard_normal(6)
    known, new = every[order[:7]], every[order[7:]]
    scores = known @ weights + 0.1 * generator.standard_normal(7)
    bounds = upper_bounds(known.astype(float), scores, new.astype(float), kappa)
    proposed = suggest_point(known, scores, 3, np.random.default_rng(seed), kappa)
    assert proposed.tolist() == new[bounds.argmax()].tolist()


def search(score: Callable[[Point], float], free: int, count: int | None, budget: int, *, bayesian: bool) -> float:
    observations = Observations(free)
    for step in range(budget):
        generator = generator_of(7, step)
        if bayesian and step >= 5:
            point = suggest_point(*observations.table(), count, generator)
        else:
            point = random_point(free, free // 2 if count is None else count, generator)
        observations.add(point, score(point))
    assert len({point.tobytes() for point in observations.table()[0]}) > 0.9 * budget
    return float(observations.table()[1].max())


@pytest.mark.parametrize("count", [8, None])
def test_bayesian_search_beats_random_search(count: int | None) -> None:
    weights = np.random.default_rng(1).standard_normal((18, 18)) / 4
    weights[np.diag_indices(18)] = np.random.default_rng(2).standard_normal(18)

    def score(point: Point) -> float:
        return float(point @ weights @ point)

    assert search(score, 18, count, 40, bayesian=True) > search(score, 18, count, 40, bayesian=False) + 0.5


def test_a_proposal_depends_on_its_generator_alone() -> None:
    generator = np.random.default_rng(0)
    points = generator.random((20, 12)) > 0.5
    proposals = [suggest_point(points, points.sum(1) / 12, 4, np.random.default_rng(seed)) for seed in (3, 3, 4)]
    assert proposals[0].tolist() == proposals[1].tolist()
    assert {int(point.sum()) for point in proposals} == {4}


def test_where_every_set_is_known_one_of_them_is_proposed() -> None:
    every = discretise(np.eye(3), 1)
    assert suggest_point(every, np.array([0.1, 0.5, 0.2]), 1, np.random.default_rng(0)).sum() == 1


def test_only_the_last_observations_are_kept() -> None:
    observations = Observations(2)
    for index in range(layer_search.MOST_OBSERVATIONS + 3):
        observations.add(point_of((2,), range(2, 4)), float(index))
    assert observations.table()[1].tolist() == [float(index + 3) for index in range(layer_search.MOST_OBSERVATIONS)]


# The rules of the search


def settings(**changes: Any) -> SwiftSearchSettings:
    return SwiftSearchSettings(**{"skip_ratio": 0.5, **changes})


def run(state: SwiftSearch, scores: Iterator[float] | list[float]) -> list[tuple[int, ...]]:
    candidates = []
    for score in scores:
        point = state.next_candidate()
        if point is None:
            break
        candidates.append(state.skipped_by(point))
        state.observe(point, score)
    return candidates


def test_the_search_starts_from_uniform_skipping_and_keeps_the_best() -> None:
    state = SwiftSearch(LAYERS, settings())
    assert state.kept == KeptSet.skipping(evenly_skipped(LAYERS, 0.5), SUBLAYERS)
    assert state.matchness is None
    candidates = run(state, [0.5, 0.25, 0.75, 0.75, 0.5])
    assert candidates[0] == evenly_skipped(LAYERS, 0.5)
    assert state.kept.skipped == candidates[2], "the first of equals stays"
    assert (state.matchness, state.steps, state.finished) == (0.75, 5, False)
    assert {len(skipped) for skipped in candidates} == {4}


def test_every_third_step_asks_the_gaussian_process(monkeypatch: pytest.MonkeyPatch) -> None:
    proposed = point_of((2, 3, 4, 5), FREE)
    monkeypatch.setattr(swift_search, "suggest_point", lambda *_: proposed)
    monkeypatch.setattr(swift_search, "random_point", lambda *_: point_of((6, 7, 8, 9), FREE))
    candidates = run(SwiftSearch(LAYERS, settings(bayesian_interval=3)), [0.5] * 10)
    assert [step for step, skipped in enumerate(candidates, 1) if skipped == (2, 3, 4, 5)] == [3, 6, 9]


@pytest.mark.parametrize(
    ("changes", "scores", "steps"),
    [
        ({"max_optimization_steps": 4}, [0.1] * 9, 4),
        ({"max_optimization_steps": 0}, [0.1] * 9, 0),
        ({"patience": 3}, [0.1, 0.2, 0.2, 0.1, 0.3, 0.3, 0.0, 0.2, 0.9], 8),
        ({"max_matchness": 0.8}, [0.1, 0.8, 0.81, 0.9], 3),
    ],
    ids=["steps", "no step at all", "no gain", "good enough"],
)
def test_the_search_ends(changes: dict[str, Any], scores: list[float], steps: int) -> None:
    state = SwiftSearch(LAYERS, settings(**changes))
    assert len(run(state, scores)) == steps
    assert state.finished
    assert state.next_candidate() is None


def test_the_ratio_steps_down_while_too_little_is_accepted() -> None:
    state = SwiftSearch(12, settings(adjustment_interval=2, acceptance_tolerance=0.7, min_skip_ratio=0.42))
    state.note_round(10, 0)
    state.note_round(10, 0)
    assert state.skip_ratio == 0.5, "the search has not begun"
    before = run(state, [0.25, 0.75])[-1]
    state.note_round(10, 7)
    state.note_round(0, 0)  # nothing drafted
    state.note_round(10, 7)
    assert state.skip_ratio == 0.5, "enough was accepted"
    state.note_round(10, 9)
    state.note_round(10, 4)
    assert state.skip_ratio == 0.45
    assert state.matchness is None
    assert len(state.kept.skipped) == 9
    assert set(state.kept.skipped) < set(before)
    assert run(state, [0.5])[0] == state.kept.skipped, "the new set is scored first"
    for _ in range(6):
        state.note_round(10, 0)
    assert (state.skip_ratio, len(state.kept.skipped)) == (0.42, 8)


def test_a_score_of_the_ratio_before_does_not_become_the_best() -> None:
    state = SwiftSearch(12, settings(adjustment_interval=1))
    run(state, [0.5])
    late = state.next_candidate()
    assert late is not None
    state.note_round(10, 0)
    state.observe(late, 1.0)
    assert state.matchness is None
    assert len(state.kept.skipped) == 9


def ended(**changes: Any) -> tuple[SwiftSearch, list[tuple[int, ...]]]:
    """A search that has just ended, with the second set of two, and what it tried."""
    state = SwiftSearch(LAYERS, settings(**{"max_matchness": 0.9, "patience": 3, **changes}))
    tried = run(state, [0.5, 0.95])
    assert state.finished
    return state, tried


def test_a_search_that_has_ended_never_looks_at_its_set_again() -> None:
    state, _ = ended()
    assert not any(state.check_is_due() for _ in range(50))


def test_a_set_that_is_no_good_any_more_opens_the_search_again() -> None:
    state, tried = ended(recheck_interval=3, reopen_below=0.6)
    assert [state.check_is_due() for _ in range(6)] == [False, False, True, False, False, True]
    state.note_check(0.6)
    assert state.finished
    assert state.next_candidate() is None
    state.note_check(0.59)
    assert not state.finished
    assert not state.check_is_due()
    assert state.kept.skipped == tried[-1]
    again = run(state, [0.2, 0.3, 0.1, 0.1, 0.1, 0.9])
    assert again[0] == tried[-1], "the set in use is the first to beat"
    assert state.kept.skipped == again[1], "scores of the text before count no more"
    assert len(again) == 5, "patience begins anew"
    assert again[1:3] != run(SwiftSearch(LAYERS, settings()), [0.5] * 3)[1:], "not the same sets once more"
    assert len(state.state().tensors["scores"]) == 5
    later = SwiftSearch(LAYERS, settings(max_matchness=0.9, patience=3, recheck_interval=3))
    later.restore(state.state())
    assert later.finished
    assert same(later.state(), state.state())


def test_a_reopened_search_has_all_its_steps_again() -> None:
    state, _ = ended(max_optimization_steps=4, recheck_interval=1)
    assert state.check_is_due()
    state.note_check(0.1)
    assert len(run(state, [0.1, 0.2, 0.3, 0.4, 0.5])) == 4
    assert state.steps == 6


def test_without_a_search_there_is_nothing_to_check() -> None:
    state = SwiftSearch(LAYERS, settings(max_optimization_steps=0, recheck_interval=1))
    assert not state.check_is_due()


@pytest.mark.parametrize(
    ("layers", "ratio", "message"), [(6, 0.05, "raise it"), (2, 0.9, "too few layers"), (1, 0.9, "too few layers")]
)
def test_a_search_that_skips_nothing_is_refused(layers: int, ratio: float, message: str) -> None:
    with pytest.raises(InvalidSettingError, match=message):
        SwiftSearch(layers, settings(skip_ratio=ratio))


# Matchness


@pytest.fixture
def scored(monkeypatch: pytest.MonkeyPatch) -> list[tuple[list[int], KeptSet, int, float]]:
    """Of every optimisation step the text up to the end of its window, candidate, window and score."""
    steps = []
    original = swift.matchness

    def spy(probe: Probe, kept: KeptSet, window: int, end: int | None = None, precision: Any = None) -> float:
        score = original(probe, kept, window, end, precision)
        steps.append((probe.token_ids[:end].tolist(), kept, window, score))
        return score

    monkeypatch.setattr(swift, "matchness", spy)
    return steps


@pytest.mark.parametrize("window", ["fixed", "sliding"])
@pytest.mark.parametrize("name", ["llama", "gemma3", "mistral-window"])
def test_matchness_is_that_of_every_token_alone(
    name: str, window: str, scored: list[tuple[list[int], KeptSet, int, float]]
) -> None:
    engine = Engine(build(name), method="swift", settings={**QUICK, "context_window": 8, "window": window})
    result = engine.generate(prompt(5), max_new_tokens=40)
    assert len(scored) > 4
    text = [*prompt(5), *result.token_ids]
    for token_ids, kept, size, score in [*scored[:4], scored[-1]]:
        assert token_ids == text[: len(token_ids)]
        assert len(token_ids) >= 5 + 8, "the window reaches into the prompt"
        assert score == matchness_from_scratch(engine.target, token_ids, kept, size)
    ends = [len(token_ids) for token_ids, *_ in scored]
    if window == "fixed":
        assert set(ends) == {5 + 8}, "equation 3: the first tokens after the input"
    else:
        assert ends == sorted(set(ends)), "a window further on in every round"
    assert len({score for *_, score in scored}) > 1
    assert result.token_ids == plain_text(name, prompt(5), 40)
    assert result.accepted > 0


def test_a_prompt_of_one_token_is_all_that_the_first_window_follows(
    scored: list[tuple[list[int], KeptSet, int, float]],
) -> None:
    engine = Engine(build("llama"), method="swift", settings=QUICK)
    engine.generate(prompt(1), max_new_tokens=24)
    assert {len(token_ids) for token_ids, *_ in scored} == {1 + 6}
    for token_ids, kept, size, score in scored[:4]:
        assert score == matchness_from_scratch(engine.target, token_ids, kept, size)


def test_the_best_score_is_that_of_the_stream(scored: list[tuple[list[int], KeptSet, int, float]]) -> None:
    """Scores of different requests are compared as they are: the first of the highest stays, wherever it was scored."""
    engine = Engine(build("llama"), method="swift", settings=QUICK)
    assert isinstance(engine.method, Swift)
    of_request: list[int] = []
    for seed in range(4):
        engine.generate(prompt(17, seed), max_new_tokens=24)
        of_request += [seed] * (len(scored) - len(of_request))
        assert engine.method.search.kept == engine_set_after(scored)
        assert engine.method.search.matchness == max(score for *_, score in scored)
    texts = {(seed, tuple(token_ids)) for seed, (token_ids, *_) in zip(of_request, scored, strict=True)}
    assert len(texts) == 4, "one text for all candidates of a request"
    of_best = of_request[max(range(len(scored)), key=lambda step: scored[step][3])]
    assert of_best < 3, "the last request decided"


def test_unknown_windows_and_widths_are_refused() -> None:
    for name in ("window", "tree_widths"):
        with pytest.raises(InvalidSettingError, match=f"{name} is one of"):
            make_method("swift", Target(build("llama")), {name: "moving"})


def test_the_search_waits_for_its_context(scored: list[tuple[list[int], KeptSet, int, float]]) -> None:
    engine = Engine(build("llama"), method="swift", settings=QUICK)
    engine.generate(prompt(17), max_new_tokens=6)
    assert not scored
    result = engine.generate(prompt(17), max_new_tokens=24)
    written, waited = 1, 0
    for record in result.rounds:
        waited += written < 6
        written += len(record.token_ids)
    assert len(scored) == result.round_count - waited > 0
    start = KeptSet.skipping(evenly_skipped(LAYERS, 0.2), SUBLAYERS)
    assert {record.kept for record in result.rounds[:waited]} == {start}
    assert scored[0][1] == start


def test_a_search_opens_again_while_it_generates(scored: list[tuple[list[int], KeptSet, int, float]]) -> None:
    checks = {**QUICK, "max_optimization_steps": 3, "recheck_interval": 2, "reopen_below": 1.0}
    engine = Engine(build("llama"), method="swift", settings=checks)
    result = engine.generate(prompt(17), max_new_tokens=40)
    assert result.token_ids == plain("llama")
    assert result.drafted > 0
    assert result.accepted > 0
    kept = [step[1] for step in scored]
    assert kept[3] == engine_set_after(scored[:3]), "the check is of the set in use"
    assert scored[3][3] < 1.0
    assert kept[4] == kept[3], "which is then the first to beat"
    assert isinstance(engine.method, Swift)
    assert engine.method.search.steps > 3


def engine_set_after(steps: list[tuple[list[int], KeptSet, int, float]]) -> KeptSet:
    """The best of some steps, the first of equals."""
    return max(steps, key=lambda step: step[3])[1]


# Drafts


def test_candidate_counts_are_those_of_the_paper() -> None:
    bounds = [0.0, 0.5, 0.5001, 0.8, 0.8001, 0.95, 0.9501, 1.0]
    assert [candidate_count(confidence) for confidence in bounds] == [10, 10, 5, 5, 3, 3, 1, 1]


def test_the_authors_code_has_wider_trees_in_greedy_decoding() -> None:
    bounds = [0.0, 0.5, 0.5001, 0.8, 0.8001, 0.95, 0.9501, 1.0]
    assert [authors_greedy_count(confidence) for confidence in bounds] == [10, 10, 8, 8, 5, 5, 3, 3]


@pytest.mark.parametrize(
    ("tree_widths", "parameters", "used"),
    [
        ("paper", {}, "candidate_count"),
        ("authors", {}, "authors_greedy_count"),
        ("authors", {"temperature": 0.9, "seed": 3}, "candidate_count"),
        ("authors", {"temperature": 0.9, "seed": 3, "acceptance": "speculative"}, "candidate_count"),
    ],
)
def test_widths_follow_setting_and_sampling(
    tree_widths: str, parameters: dict[str, Any], used: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: dict[str, list[int]] = {"candidate_count": [], "authors_greedy_count": []}
    for name, counts in asked.items():

        def spy(confidence: float, name: str = name, counts: list[int] = counts) -> int:
            width = (candidate_count if name == "candidate_count" else authors_greedy_count)(confidence)
            if confidence > 1e-9:  # else it is asked how wide a tree can be
                counts.append(width)
            return width

        monkeypatch.setattr(swift, name, spy)
    options = {**QUICK, "confidence_threshold": 0.0, "max_draft_length": 3, "max_siblings": 100}
    engine = Engine(build("llama"), method="swift", settings={**options, "tree_widths": tree_widths})
    result = engine.generate(prompt(17), max_new_tokens=40, **parameters)
    assert [name for name, counts in asked.items() if counts] == [used]
    siblings = sum(record.candidates - record.drafted for record in result.rounds)
    assert siblings == sum(width - 1 for width in asked[used]) > 0
    assert result.accepted > 0
    if parameters.get("acceptance") != "speculative":
        assert result.token_ids == plain("llama", **parameters)


def plain(name: str, **parameters: Any) -> tuple[int, ...]:
    return Engine(build(name), method="autoregressive").generate(prompt(17), max_new_tokens=40, **parameters).token_ids


@pytest.mark.parametrize("name", ["llama", "mistral-window"])
@pytest.mark.parametrize("parameters", [{}, {"temperature": 0.9, "seed": 3}], ids=["greedy", "coupled"])
@pytest.mark.parametrize("threshold", [0.0, 0.3])
def test_trees_give_the_plain_text(name: str, parameters: dict[str, Any], threshold: float) -> None:
    options = {**QUICK, "confidence_threshold": threshold, "max_siblings": 12}
    engine = Engine(build(name), method="swift", settings=options)
    result = engine.generate(prompt(17), max_new_tokens=40, **parameters)
    assert result.token_ids == plain(name, **parameters)
    assert result.accepted > 0
    widths = [record.candidates - record.drafted for record in result.rounds]
    assert 0 < max(widths) <= 12
    assert any(record.accepted > 1 for record in result.rounds)


def test_without_dynamic_verification_drafts_are_chains() -> None:
    engine = Engine(build("llama"), method="swift", settings={**QUICK, "dynamic_verification": False})
    result = engine.generate(prompt(17), max_new_tokens=24)
    assert all(record.candidates == record.drafted for record in result.rounds)
    assert engine.method.needs.sibling_rows == 0
    assert result.accepted > 0


@pytest.mark.parametrize(
    ("changes", "rows"),
    [
        ({}, 32),
        ({"max_siblings": 1000}, 24 * 2 + 9),
        ({"max_siblings": 1000, "max_draft_length": 3, "confidence_threshold": 0.0}, 2 * 9 + 9),
        ({"max_siblings": 5}, 5),
        ({"max_siblings": 1000, "tree_widths": "authors"}, 24 * 4 + 9),
    ],
)
def test_cache_slots_for_siblings(changes: dict[str, Any], rows: int) -> None:
    needs = make_method("swift", Target(build("llama")), changes).needs
    assert (needs.sibling_rows, needs.probe_rows) == (rows, 32)


def swift_tree(_: tuple[int, ...]) -> LayerDraft:
    return LayerDraft(KEPT, 4, stop=ConfidenceThreshold(0.6), widths=candidate_count)


def test_sampled_trees_follow_the_targets_distribution() -> None:
    value, accepted = p_value(swift_tree, speculative, DRAWS // 4)
    assert accepted > DRAWS / 80
    assert value > 1e-3


def test_speculative_sampling_of_a_real_model_accepts_trees() -> None:
    engine = Engine(build("llama"), method="swift", settings={**QUICK, "confidence_threshold": 0.0})
    params = {"temperature": 1.0, "seed": 1, "acceptance": "speculative"}
    result = engine.generate(prompt(17), max_new_tokens=40, **params)
    assert result.drafted > 0
    assert result.accepted > 0
    assert max(record.candidates - record.drafted for record in result.rounds) > 0


# State and threads


def stream(engine: Engine, seeds: range) -> list[tuple[int, ...]]:
    results = [engine.generate(prompt(17, seed), max_new_tokens=24) for seed in seeds]
    assert all(result.drafted > 0 for result in results)
    assert sum(result.accepted for result in results) > 0
    return [result.token_ids for result in results]


def same(left: LearnedState, right: LearnedState) -> bool:
    tensors = all(torch.equal(left.tensors[name], right.tensors[name]) for name in ("points", "scores"))
    return left.values == right.values and left.tensors.keys() == right.tensors.keys() and tensors


def test_a_saved_search_goes_on_as_it_would_have(tmp_path: Path) -> None:
    first, second, third = (Engine(build("llama"), method="swift", settings=QUICK) for _ in range(3))
    stream(first, range(2))
    first.save_state(tmp_path / "state")
    second.load_state(tmp_path / "state")
    assert same(first.method.state(), second.method.state())
    for engine in (first, second):
        assert stream(engine, range(2, 4)) == [plain_text("llama", prompt(17, seed), 24) for seed in (2, 3)]
    assert same(first.method.state(), second.method.state())
    values = first.method.state().values
    assert values["steps"] == len(first.method.state().tensors["scores"]) > 20
    stream(third, range(2, 4))
    assert not same(first.method.state(), third.method.state())


def test_a_fresh_search_can_be_saved_too(tmp_path: Path) -> None:
    engine = Engine(build("llama"), method="swift")
    engine.save_state(tmp_path / "state")
    engine.load_state(tmp_path / "state")
    assert engine.method.state().values["steps"] == 0


def test_states_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    engine = Engine(build("llama"), method="swift", settings=QUICK)
    stream(engine, range(1))
    engine.save_state(tmp_path / "state")
    with pytest.raises(StateError, match="another skip_ratio"):
        Engine(build("llama"), method="swift", settings={**QUICK, "skip_ratio": 0.5}).load_state(tmp_path / "state")
    with pytest.raises(StateError, match="another model"):
        Engine(build("llama-ungrouped"), method="swift", settings=QUICK).load_state(tmp_path / "state")


@pytest.mark.parametrize(
    "changes",
    [
        {"layers": 7},
        {"steps": -1},
        {"steps": 1.5},
        {"skipped": [0, 4]},
        {"skipped": [4, 4]},
        {"skipped": []},
        {"skipped": "4"},
        {"matchness": 1.5},
        {"skip_ratio": None},
        {"unknown": 1},
        {"points": torch.zeros(3, 4, dtype=torch.uint8)},
        {"points": torch.full((1, 8), 2, dtype=torch.uint8)},
        {"scores": torch.tensor([float("nan")], dtype=torch.float64)},
        {"scores": None},
    ],
    ids=str,
)
def test_a_damaged_state_changes_nothing(changes: dict[str, Any]) -> None:
    state = SwiftSearch(LAYERS, settings())
    run(state, [0.5])
    before = state.state()
    tensors = {name: changes.pop(name) if name in changes else tensor for name, tensor in before.tensors.items()}
    damaged = LearnedState({**before.values, **changes}, {n: t for n, t in tensors.items() if t is not None})
    with pytest.raises(StateError, match="learn it again"):
        state.restore(damaged)
    assert same(state.state(), before)


def test_threads_share_one_search() -> None:
    engine = Engine(build("llama"), method="swift", settings={**QUICK, "adjustment_interval": 5})
    prompts = [prompt(17, seed) for seed in range(6)]
    expected = [plain_text("llama", ids, 24) for ids in prompts]
    with ThreadPoolExecutor(4) as pool:
        results = list(pool.map(lambda ids: engine.generate(ids, max_new_tokens=24), prompts))
    assert [result.token_ids for result in results] == expected
    assert all(result.accepted > 0 for result in results)
    method = engine.method
    assert isinstance(method, Swift)
    state = method.state()
    points, scores = state.tensors["points"], state.tensors["scores"]
    assert state.values["steps"] == len(scores) > 20
    counts = {int(2 * (LAYERS - 2) * 0.2)}
    assert set(points.sum(1).tolist()) <= counts
    of_now = scores[points.sum(1) == len(state.values["skipped"])]
    assert state.values["matchness"] == float(of_now.max())
    method.restore(state)
    assert same(method.state(), state)
