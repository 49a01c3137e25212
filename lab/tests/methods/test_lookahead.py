"""Lookahead decoding: its mask, its n-gram pool and its window against slow references, and its sampled output."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from helpers.drafts import begin, ngram_model, paths, play
from helpers.models import VOCABULARY, build, prompt
from helpers.table import TARGET, TableTarget, speculative
from selfspec.decoding.draft import TokenDraft
from selfspec.decoding.output import Output
from selfspec.decoding.prompt import Chunks
from selfspec.decoding.request import Advanced, Request
from selfspec.decoding.scheduler import Scheduler
from selfspec.engine import Engine
from selfspec.errors import StateError
from selfspec.methods import find_method, make_method
from selfspec.methods.state import LearnedState
from selfspec.runtimes.target import Target
from selfspec.sampling.processors import ScoreProcessor
from selfspec_lab.methods.lookahead import NgramPool, TreeBuilder, Window

NGRAMS = st.lists(st.tuples(*[st.integers(0, 3)] * 3), max_size=60)


def make(**changes: Any) -> Any:
    return make_method("lookahead", Target(build("llama")), changes)


def paper_mask(columns: int, levels: int) -> torch.Tensor:
    """Which window token sees which, as the paper draws it: rows by level, then column; the pending token is first."""
    places = [(level, column) for level in range(levels) for column in range(columns)]
    return torch.tensor(
        [[(m == 0 and j <= column) or (0 < m <= level and j == column) for m, j in places] for level, column in places]
    )


@given(st.integers(1, 7), st.integers(1, 5))
def test_the_mask_of_the_window_is_the_papers(columns: int, levels: int) -> None:
    unused = iter(range(1000))
    window, builder = Window(columns, levels, lambda: next(unused)), TreeBuilder()
    window.plant(builder)
    draft = builder.draft()
    visible = draft.tree.visibility() if isinstance(draft, TokenDraft) else torch.ones(1, 1, dtype=torch.bool)
    assert torch.equal(visible, paper_mask(columns, levels))
    if isinstance(draft, TokenDraft):
        assert draft.token_ids == tuple(range(1, columns * levels)), "a token was lost, or merged without need"
        positions = [level + column for level in range(levels) for column in range(columns)]
        assert list(draft.tree.depths) == positions


@given(st.integers(1, 6), st.integers(1, 4), NGRAMS, st.data())
def test_merged_branches_keep_every_path(columns: int, levels: int, tails: list[tuple[int, ...]], data: Any) -> None:
    window, builder = Window(columns, levels, lambda: data.draw(st.integers(0, 2))), TreeBuilder()
    for tail in tails:
        node = -1
        for token in tail:
            node = builder.child(node, token)
    last = window.plant(builder)
    draft = builder.draft()
    found = paths(draft) if isinstance(draft, TokenDraft) else []
    assert len(set(found)) == len(found), "two siblings are the same token"
    chain = window.levels[0][1:]
    wanted = {tuple(tail[:length]) for tail in tails for length in range(1, 4)}
    for column, node in enumerate(last):
        path = (*chain[:column], *(level[column] for level in window.levels[1:]))
        assert (found[node] if node >= 0 else ()) == path
        wanted |= {path[:length] for length in range(1, len(path) + 1)}
    assert set(found) == wanted


@given(NGRAMS, st.integers(1, 4))
def test_the_pool_keeps_the_latest_ngrams(ngrams: list[tuple[int, ...]], capacity: int) -> None:
    pool = NgramPool(capacity)
    for place in range(0, len(ngrams), 4):
        pool.add(ngrams[place : place + 4])
    copy = NgramPool(capacity)
    copy.replace(pool.ngrams())
    for first in range(4):
        latest = [ngram[1:] for ngram in reversed(ngrams) if ngram[0] == first]
        wanted = list(dict.fromkeys(latest))[:capacity]
        assert pool.find(first) == copy.find(first) == wanted


@pytest.mark.parametrize("room", [1000, 4])
def test_rounds_are_those_of_a_naive_lookahead(room: int) -> None:
    """The window as one token for each (position, iteration), n-grams as slices of its columns."""
    columns, size, guesses = 5, 4, 3
    model, text = ngram_model(1, 9), [1, 2, 3, 4]
    drafter: Any = begin(make(window_size=columns, ngram_size=size, guess_set_size=guesses), text)
    history: list[tuple[int, ...]] = []
    accepted = verified = 0
    for _ in range(25):
        before, levels = list(text), [list(level) for level in drafter.window.levels]
        draft, stood = play(drafter, model, text, VOCABULARY, room)
        found = paths(draft)
        known = [ngram[1:] for ngram in reversed(history) if ngram[0] == before[-1]]
        for tail in list(dict.fromkeys(known))[:guesses]:
            assert tail in found
            verified += 1
        newest = []
        for column in range(columns):
            path = (*levels[0][1 : column + 1], *(level[column] for level in levels[1:]))
            assert not path or path in found
            newest.append(model((*before, *path)) if len(path) <= room else None)
            if newest[-1] is not None:
                first = before[-1] if column == 0 else levels[0][column]
                history.append((first, *(level[column] for level in levels[1:]), newest[-1]))
        iterated = [*levels[1:], newest]
        for level, wanted in zip(drafter.window.levels, iterated, strict=True):
            assert len(level) == columns
            for place, token in enumerate(wanted[stood:]):
                assert token is None or level[place] == token
            assert set(level[len(wanted[stood:]) :]) <= {1, 2, 3}, "a new column is not from the prompt"
        accepted += stood
    assert accepted > 10
    assert verified > 10


def test_no_tree_needs_more_slots_than_were_asked_for() -> None:
    for columns, size, guesses in ((1, 2, 0), (1, 2, 4), (1, 5, 3), (6, 2, 5), (4, 3, 0), (5, 4, 6)):
        method = make(window_size=columns, ngram_size=size, guess_set_size=guesses, pool_from_prompt=True)
        text = prompt(60) * 2
        drafter = begin(method, text)
        for _ in range(20):
            draft, _ = play(drafter, ngram_model(1, 12), text, VOCABULARY)
            if isinstance(draft, TokenDraft):
                assert len(draft.tree) - max(draft.tree.depths) <= method.needs.sibling_rows


def test_the_prompt_can_fill_the_pool() -> None:
    text = [1, 2, 3, 4, 5, 1]
    for fills in (False, True):
        drafter = begin(make(window_size=1, ngram_size=3, pool_from_prompt=fills), text)
        assert ((2, 3) in paths(drafter.plan())) == fills


def test_a_kept_pool_survives_requests_and_a_file(tmp_path: Any) -> None:
    settings = {"window_size": 4, "ngram_size": 3, "guess_set_size": 4, "keep_pool": True}
    first = Engine(build("llama"), method="lookahead", settings=settings)
    cold = first.generate(prompt(17), max_new_tokens=24)
    first.save_state(tmp_path / "state")
    warm = first.generate(prompt(17), max_new_tokens=24)
    second = Engine(build("llama"), method="lookahead", settings=settings)
    second.load_state(tmp_path / "state")
    again = second.generate(prompt(17), max_new_tokens=24)
    assert cold.token_ids == warm.token_ids == again.token_ids
    trees = [[record.candidates for record in result.rounds] for result in (cold, warm, again)]
    assert trees[1] == trees[2]
    assert trees[0][0] < trees[1][0], "nothing was kept"
    forgetful = Engine(build("llama"), method="lookahead", settings={**settings, "keep_pool": False})
    for _ in range(2):
        result = forgetful.generate(prompt(17), max_new_tokens=24)
        assert [record.candidates for record in result.rounds] == trees[0]
    with pytest.raises(StateError, match="set keep_pool"):
        forgetful.save_state(tmp_path / "other")


@pytest.mark.parametrize(
    "values",
    [{}, {"ngrams": 3}, {"ngrams": [[1, 2, 3, 4]]}, {"ngrams": [[1, 2, VOCABULARY]]}, {"ngrams": [[1, True, 2]]}],
)
def test_a_state_that_does_not_fit_changes_nothing(values: dict[str, Any]) -> None:
    method = make(window_size=4, ngram_size=3, keep_pool=True)
    method.restore(LearnedState({"ngrams": [[1, 2, 3], [1, 5, 6]]}))
    with pytest.raises(StateError, match="n-grams of 3 tokens"):
        method.restore(LearnedState(values))
    assert method.state().values == {"ngrams": [[1, 2, 3], [1, 5, 6]]}


class SmallTarget(TableTarget):
    """The table with what methods ask of a target."""

    vocab_size = len(TARGET)


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("lookahead", {"window_size": 3, "ngram_size": 3, "guess_set_size": 3}),
        ("token-recycling", {"candidates": 3, "tree_size": 10, "prompt_rows": 0}),
    ],
)
def test_sampled_trees_write_the_targets_distribution(name: str, settings: dict[str, int]) -> None:
    counts = np.zeros((len(TARGET), len(TARGET)))
    accepted, length = 0, 800  # 600 show a correction that is drawn from the target itself
    for run in range(3):
        target: Any = SmallTarget()
        method = find_method(name)(target, find_method(name).Settings(**settings))
        output = Output(max_new_tokens=length)
        processor = ScoreProcessor()
        request = Request([0, 1, 2], length, speculative(run), processor, output, method)
        scheduler = Scheduler(target, chunks=Chunks(16, 1), max_batch=1)
        scheduler.add(request)
        while scheduler.busy:
            accepted += sum(event.round.accepted for event in scheduler.step() if isinstance(event, Advanced))
        np.add.at(counts, (output.token_ids[:-1], output.token_ids[1:]), 1)
    expected = TARGET.double().numpy() * counts.sum(1, keepdims=True)
    possible = expected > 0
    assert accepted > length
    assert not counts[~possible].any()
    statistic = ((counts - expected)[possible] ** 2 / expected[possible]).sum()
    assert stats.chi2.sf(statistic, possible.sum() - len(TARGET)) > 1e-3
