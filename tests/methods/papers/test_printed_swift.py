"""``--paper swift-v1`` and ``swift-v2`` against sections 4.1 and 4.2 of SWIFT: what is tried, scored and drafted."""

from typing import Any

import numpy as np
import pytest

from helpers.matchness import matchness_from_scratch
from helpers.models import LAYERS, SUBLAYERS, build, plain_text, prompt
from selfspec.engine import Engine
from selfspec.methods import swift, swift_search
from selfspec.methods.layer_search import generator_of, random_point
from selfspec.methods.skipping import alternately_skipped, evenly_skipped
from selfspec.methods.swift_search import SwiftSearch, SwiftSearchSettings
from selfspec.model.kept import KeptSet
from selfspec.runtimes.target import Target
from selfspec.types import Generation

pytestmark = pytest.mark.filterwarnings("ignore::selfspec.errors.ChangedPaperWarning")
GAMMA, BETA, RATIO, PROMPT, NEW_TOKENS = 32, 25, 0.45, 20, 120
"""Appendix B.2."""


class Steps:
    """The optimisation steps of an engine: the set, the end of the window, the score; and which ones were Bayesian."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.scored: list[tuple[KeptSet, int, int, float]] = []
        self.bayesian: list[int] = []
        score, suggest = swift.matchness, swift_search.suggest_point

        def scored(probe: Any, kept: KeptSet, window: int, end: int | None = None, precision: Any = None) -> float:
            found = score(probe, kept, window, end, precision)
            self.scored.append((kept, window, end or 0, found))
            return found

        def suggested(*arguments: Any) -> Any:
            self.bayesian.append(len(self.scored) + 1)
            return suggest(*arguments)

        monkeypatch.setattr(swift, "matchness", scored)
        monkeypatch.setattr(swift_search, "suggest_point", suggested)


def write(paper: str, name: str = "llama", **options: Any) -> tuple[Generation, Any]:
    engine = Engine(build(name), paper=paper, **options)
    result = engine.generate(prompt(PROMPT), max_new_tokens=NEW_TOKENS)
    assert result.token_ids == plain_text(name, prompt(PROMPT), NEW_TOKENS)
    assert result.drafted > 0
    assert result.accepted > 0
    return result, engine.method


@pytest.mark.parametrize("paper", ["swift-v1", "swift-v2"])
@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_every_step_of_section_4_1(paper: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    steps = Steps(monkeypatch)
    result, method = write(paper, name, settings={"max_matchness": 1.0})
    written, before = 1, []
    for each in result.rounds:  # 4.1.1: context accumulation
        before.append(written)
        written += each.accepted + 1
    optimised = [each for each, tokens in zip(result.rounds, before, strict=True) if tokens >= GAMMA]
    assert len(steps.scored) == len(optimised) > BETA  # 4.1.2: a step before each decoding step, one forward each
    uniform = KeptSet.skipping(evenly_skipped(LAYERS, RATIO, fixed_ends=False), SUBLAYERS)
    for each, tokens in zip(result.rounds, before, strict=True):
        if tokens < GAMMA:
            assert each.kept == uniform  # 4.1.1: uniformly skipping layers
    assert {len(kept.skipped) for kept, *_ in steps.scored} == {int(RATIO * SUBLAYERS)}  # equation 2: (L choose rL)
    tried = {index for kept, *_ in steps.scored for index in kept.skipped}
    assert tried == set(range(SUBLAYERS))
    assert {window for _, window, _, _ in steps.scored} == {GAMMA}
    assert {end for _, _, end, _ in steps.scored} == {PROMPT + GAMMA}  # equation 3: y_1 to y_γ
    assert steps.bayesian == [o for o in range(1, len(steps.scored) + 1) if o % BETA == 0]  # equation 2
    random_step = random_point(SUBLAYERS, int(RATIO * SUBLAYERS), generator_of(0, 1))
    assert steps.scored[0][0].skipped == tuple(np.flatnonzero(random_step).tolist())  # equation 2, o = 1
    text = [*prompt(PROMPT), *result.token_ids]
    best, score = None, -1.0
    for (kept, _, _, found), each in zip(steps.scored, optimised, strict=True):
        if found > score:  # 4.1.2: the highest-scoring candidate is retained
            best, score = kept, found
        if each.kept is not None:
            assert each.kept == best
    for kept, window, end, found in steps.scored[:3]:  # equations 3 and 4
        assert found == pytest.approx(matchness_from_scratch(method.target, text[:end], kept, window))


def test_confidence_aware_drafts_of_section_4_2() -> None:
    """Early stop, k = 10, 5, 3, 1 by confidence, and no limit of the tree."""
    method: Any = Engine(build("llama"), paper="swift-v2").method
    draft = method.draft(method.search.kept, samples=False)
    assert draft.limit == 25
    assert draft.threshold == 0.8
    assert [draft.widths(p) for p in (0.5, 0.51, 0.8, 0.81, 0.95, 0.96)] == [10, 5, 5, 3, 3, 1]
    assert method.needs.sibling_rows == 24 * 2 + 9
    bounded: Any = Engine(build("llama"), method="swift").method
    assert bounded.needs.sibling_rows == 32


def test_an_instance_starts_with_uniform_skipping_while_the_search_lasts() -> None:
    """4.1.1: each instance in the optimisation phase; afterwards the best set drafts (4.2)."""
    engine = Engine(build("llama"), paper="swift-v1", settings={"max_matchness": 1.0, "max_optimization_steps": 40})
    uniform = KeptSet.skipping(evenly_skipped(LAYERS, RATIO, fixed_ends=False), SUBLAYERS)
    search: Any = engine.method.search  # type: ignore[attr-defined]
    engine.generate(prompt(PROMPT), max_new_tokens=60)
    assert not search.finished
    assert search.kept != uniform
    second = engine.generate(prompt(PROMPT, 1), max_new_tokens=20)
    assert {each.kept for each in second.rounds if each.kept is not None} == {uniform}
    while not search.finished:
        engine.generate(prompt(PROMPT), max_new_tokens=60)
    third = engine.generate(prompt(PROMPT, 1), max_new_tokens=20)
    assert {each.kept for each in third.rounds if each.kept is not None} == {search.kept}
    assert third.accepted > 0


def test_only_the_second_version_lowers_the_ratio() -> None:
    """C.2, footnote of v2: from 0.5 to 0.4 while α stays below 0.7. v1 has a fixed r."""
    for paper, lowest in (("swift-v1", 0.5), ("swift-v2", 0.4)):
        method: Any = Engine(build("llama"), paper=paper, settings={"skip_ratio": 0.5}).method
        method.search.observe(method.search.next_candidate(), 0.3)
        for _ in range(1000):
            method.search.note_round(10, 6)
        assert method.search.skip_ratio == pytest.approx(lowest)


def test_the_ratio_is_that_of_the_models_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """B.2: 0.45 for 13 billion parameters, 0.5 for 34 and 70."""
    for parameters, ratio in ((13_000_000_000, 0.45), (34_000_000_000, 0.5), (70_000_000_000, 0.5)):
        monkeypatch.setattr(Target, "parameter_count", parameters)
        method: Any = Engine(build("llama"), paper="swift-v1").method
        assert method.search.skip_ratio == ratio


def test_the_authors_code(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every second layer at the start, y_2 to y_(γ+1) after γ + 3 tokens, wider trees, first and last layer kept."""
    steps = Steps(monkeypatch)
    result, method = write("swift-v2", authors=True, settings={"context_window": 16, "max_matchness": 1.0})
    start = KeptSet.skipping(alternately_skipped(LAYERS), SUBLAYERS)
    assert start.skipped == (2, 3, 6, 7)
    assert result.rounds[0].kept == start
    assert {end for _, _, end, _ in steps.scored} == {PROMPT + 17}
    before = [sum(each.accepted + 1 for each in result.rounds[:index]) + 1 for index in range(len(result.rounds))]
    assert len(steps.scored) == sum(tokens >= 19 for tokens in before) < sum(tokens >= 17 for tokens in before)
    assert {len(kept.skipped) for kept, *_ in steps.scored} == {int(0.45 * 2 * (LAYERS - 2))}
    assert not {0, 1, SUBLAYERS - 2, SUBLAYERS - 1} & {index for kept, *_ in steps.scored for index in kept.skipped}
    assert method.draft(start, samples=False).widths(0.9) == 5
    assert method.draft(start, samples=True).widths(0.9) == 3


def test_a_first_set_that_is_not_scored_leaves_with_the_first_candidate_that_predicts_a_token() -> None:
    """A set that predicts nothing replaces none, as in the authors' code; the first set is still not scored."""
    search = SwiftSearch(LAYERS, SwiftSearchSettings(skip_ratio=0.5, score_start=False, patience=2))
    candidates = []
    for score in (0.0, 0.1):
        candidate = search.next_candidate()
        assert candidate is not None
        assert search.skipped_by(candidate) != search.start.skipped
        search.observe(candidate, score)
        candidates.append(KeptSet.skipping(search.skipped_by(candidate), SUBLAYERS))
        assert search.kept == (candidates[-1] if score else search.start)
    assert candidates[0] != candidates[1]
    assert not search.finished
