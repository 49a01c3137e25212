"""Prompt lookup, suffix and token recycling against slow references."""

import itertools
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from helpers.drafts import begin, ngram_model, paths, play, preferences
from helpers.models import VOCABULARY, build, plain_text, prompt
from selfspec.decoding.draft import NoDraft, TokenDraft
from selfspec.decoding.drafter import Continuation
from selfspec.decoding.suffixes import KnownText, SuffixAutomaton, continuation
from selfspec.engine import Engine
from selfspec.errors import InvalidSettingError, StateError
from selfspec.methods import make_method, ngram
from selfspec.methods.base import Method
from selfspec.methods.ngram import NgramIndex
from selfspec.methods.state import LearnedState
from selfspec.methods.token_recycling import SuccessorTable, TokenRecycling, best_template, hit_rate
from selfspec.runtimes.target import Target
from selfspec_lab.testing import read_text

TEXTS = st.lists(st.integers(0, 2), min_size=1, max_size=40)
METHODS: dict[str, dict[str, Any]] = {
    "prompt-lookup": {"num_tokens": 5},
    "suffix": {"max_spec_factor": 3.0},
    "token-recycling": {"candidates": 4, "tree_size": 20},
}


def make(name: str, **changes: Any) -> Any:
    return make_method(name, Target(build("llama")), changes)


def test_a_copy_stops_where_it_is_long_enough() -> None:
    assert continuation([1, 2, 3, 4, 5], 1, 2) == [2, 3]
    assert continuation([1, 2, 3, 4, 5], 3, 2) == [4, 5]


def test_a_copy_that_reaches_the_end_goes_on_with_itself() -> None:
    assert continuation([9, 1, 2, 1, 2], 3, 5) == [1, 2, 1, 2, 1]
    assert continuation([7, 7], 1, 3) == [7, 7, 7]


def naive_ngram_match(text: list[int], max_size: int, drafted: tuple[int, ...] = ()) -> tuple[int, int]:
    """The longest matching n-gram and the position after its last earlier occurrence in the text, by scanning it."""
    whole = [*text, *drafted]
    for size in range(min(max_size, len(whole)), 0, -1):
        for end in range(len(text) - 1, size - 1, -1):
            if text[end - size : end] == whole[len(whole) - size :]:
                return size, end
    return 0, 0


@given(TEXTS, st.integers(1, 5), st.integers(0, 40))
def test_the_ngram_index_finds_what_a_scan_finds(text: list[int], max_size: int, given_at_once: int) -> None:
    index = NgramIndex(max_size, text[:given_at_once])
    for length in range(given_at_once, len(text)):
        index.extend(text[length : length + 1])
        assert index.match_after()[:2] == naive_ngram_match(text[: length + 1], max_size)
    assert index.tokens == text
    assert index.match_after()[:2] == naive_ngram_match(text, max_size)


def naive_suffix_match(text: list[int], drafted: tuple[int, ...] = ()) -> tuple[int, int]:
    """Length of the longest suffix that occurs before in the text, and the position after its last occurrence."""
    whole = [*text, *drafted]
    last = len(text) if drafted else len(text) - 1
    for length in range(len(whole) - 1, 0, -1):
        for end in range(last, length - 1, -1):
            if text[end - length : end] == whole[len(whole) - length :]:
                return length, end
    return 0, 0


@given(TEXTS)
def test_the_suffix_automaton_finds_what_a_search_finds(text: list[int]) -> None:
    automaton = SuffixAutomaton()
    for length, token in enumerate(text, start=1):
        automaton.extend([token])
        match_length, match_end = naive_suffix_match(text[:length])
        assert automaton.match_length == match_length
        if match_length:
            assert automaton.match_end == match_end
    assert automaton.tokens == text


@given(TEXTS, st.lists(st.integers(0, 2), max_size=6), st.integers(1, 5))
def test_matches_after_drafted_tokens(text: list[int], drafted: list[int], max_size: int) -> None:
    """They are looked for in the text, which stays as it is."""
    automaton, index = SuffixAutomaton(text), NgramIndex(max_size, text)
    length, end = naive_suffix_match(text, tuple(drafted))
    match = automaton.match_after(drafted)
    assert match.length == length
    assert not length or match.end == end
    assert index.match_after(drafted)[:2] == naive_ngram_match(text, max_size, tuple(drafted))
    assert automaton.tokens == index.tokens == text
    assert automaton.match_after(())[:2] == (automaton.match_length, automaton.match_end)


def test_the_suffix_automaton_follows_one_token_repeated_for_long() -> None:
    automaton = SuffixAutomaton([5] * 300)
    assert automaton.match_length == 299
    assert automaton.match_end == 299
    automaton.extend([6, 5, 5])
    assert automaton.match_length == 2
    assert automaton.tokens[automaton.match_end - 2 : automaton.match_end] == [5, 5]


def test_a_longer_match_makes_a_longer_draft() -> None:
    text = [*range(20), 50, *range(20)]
    for known, factor, longest, wanted in (
        (1, 2.0, 32, 2),
        (3, 2.0, 32, 6),
        (3, 2.0, 5, 5),
        (4, 0.5, 32, 2),
        (1, 0.5, 32, 1),
    ):
        draft = begin(make("suffix", max_spec_factor=factor, max_draft_length=longest), text[: 21 + known]).plan()
        assert draft.token_ids == tuple(range(known, known + wanted))
    assert begin(make("suffix", min_match_length=3), text[:23]).plan() == NoDraft()
    assert begin(make("suffix", min_match_length=3), text[:24]).plan() != NoDraft()


@pytest.mark.parametrize("method", ["suffix", "prompt-lookup"])
def test_copies_are_what_the_references_copy(method: str) -> None:
    model, text = ngram_model(2, 6), [1, 2, 3]
    drafter, drafted, accepted = begin(make(method, **METHODS[method]), text), 0, 0
    for _ in range(25):
        before = list(text)
        draft, stood = play(drafter, model, text, VOCABULARY)
        length, end = naive_suffix_match(before) if method == "suffix" else naive_ngram_match(before, 3)
        if not length:
            assert draft == NoDraft()
            continue
        count = min(32, 3 * length) if method == "suffix" else 5
        extended = list(before)
        for offset in range(count):
            extended.append(extended[end + offset])
        assert draft.token_ids == tuple(extended[len(before) :])
        assert draft.tree.is_chain
        drafted, accepted = drafted + count, accepted + stood
    assert 0 < accepted < drafted


@pytest.mark.parametrize("method", ["suffix", "prompt-lookup"])
def test_a_long_prompt_is_read_in_parts(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a whole, it would stop all other requests; afterwards drafts are those of a prompt that is read at once."""
    read: list[int] = []
    for kind in (NgramIndex, KnownText):

        def noted(text: Any, tokens: Any, extend: Callable[[Any, Any], None] = kind.extend) -> None:
            read.append(len(tokens))
            extend(text, tokens)

        monkeypatch.setattr(kind, "extend", noted)
    model, text = ngram_model(2, 6), [1, 2, 3] * 20
    with monkeypatch.context() as small:
        small.setattr(ngram, "_PART", 8)
        drafter = begin(make(method, **METHODS[method]), text)
        for _ in range(7):
            assert drafter.continue_after(()) == Continuation()
            assert play(drafter, model, text, VOCABULARY)[0] == NoDraft()
        play(drafter, model, text, VOCABULARY)
    assert max(read) == 8
    assert drafter.plan() == begin(make(method, **METHODS[method]), text).plan() != NoDraft()


@pytest.mark.parametrize("method", ["suffix", "prompt-lookup"])
def test_copies_after_drafted_tokens_are_those_of_the_longer_text(method: str) -> None:
    """Where the match is in the text; the drafter drafts afterwards what it would have drafted."""
    text = [1, 2, 3, 4, 5, 6, 7, 9, 8, 1, 2, 3]
    drafter = begin(make(method, **METHODS[method]), text)
    planned = drafter.plan()
    for drafted in ([4], [4, 5], [7, 9], [9]):
        longer = begin(make(method, **METHODS[method]), [*text, *drafted])
        found = drafter.continue_after(drafted)
        assert found == longer.continue_after(())
        assert found.token_ids == longer.plan().token_ids
        assert found.match_length > 0
    assert drafter.continue_after([20]).token_ids == ()
    assert drafter.plan() == planned


def test_recycling_expects_the_likeliest_tokens() -> None:
    """What the first child of every node is in its tree."""
    model, text = ngram_model(1, 8), [1, 2, 3]
    drafter = begin(make("token-recycling", candidates=4, tree_size=20, tree_depth=3), text)
    assert drafter.continue_after(()) == Continuation()
    for _ in range(12):
        play(drafter, model, text, VOCABULARY)
    expected = [text[-1]]
    for _ in range(3):
        expected.append(model((expected[-1],)))
    assert drafter.continue_after(()).token_ids == tuple(expected[1:])
    assert drafter.continue_after(expected[1:2]).token_ids[:2] == tuple(expected[2:])


@given(st.integers(1, 40), st.integers(1, 5), st.integers(1, 5))
def test_the_template_has_the_likeliest_nodes(size: int, candidates: int, depth: int) -> None:
    template = best_template(size, candidates, depth)
    every = [path for length in range(1, depth + 1) for path in itertools.product(range(candidates), repeat=length)]

    def likelihood(path: tuple[int, ...]) -> float:
        product = 1.0
        for rank in path:
            product *= hit_rate(rank)
        return product

    own = [
        tuple(template.ranks[row - 1] for row in template.tree.path(node + 1)[1:]) for node in range(len(template.tree))
    ]
    assert len(set(own)) == len(own) == min(size, len(every))
    assert list(template.tree.depths) == sorted(template.tree.depths), "not level by level"
    best = sorted(map(likelihood, every), reverse=True)[:size]
    assert sorted(map(likelihood, own), reverse=True) == pytest.approx(best)


def test_the_default_template_is_like_the_papers() -> None:
    template = best_template(80, 8, 6)
    assert len(template.tree) == 80
    assert max(template.tree.depths) == 6
    assert template.tree.depths.count(1) == 8


class NaiveRecycling:
    """The matrix as a dict of lists, the tree filled node by node."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.rows: dict[int, list[int]] = {}

    def note(self, token: int, scores: list[float]) -> None:
        order = sorted(range(len(scores)), key=lambda candidate: -scores[candidate])
        self.rows[token] = order[: self.count]

    def tree(self, method: TokenRecycling, pending: int) -> set[tuple[int, ...]]:
        found, template = {-1: (pending,)}, method.template
        for node, (parent, rank) in enumerate(zip(template.tree.parents, template.ranks, strict=True)):
            if parent in found and (row := self.rows.get(found[parent][-1])):
                found[node] = (*found[parent], row[rank])
        return {path[1:] for node, path in found.items() if node >= 0}


def test_recycled_trees_are_those_of_a_dict() -> None:
    model, text, vocabulary = ngram_model(2, 12), [1, 2, 3], 12
    method = make("token-recycling", candidates=3, tree_size=14, tree_depth=4)
    naive, drafter = NaiveRecycling(3), begin(method, text)
    sizes, accepted = set(), 0
    for _ in range(30):
        before = list(text)
        wanted = naive.tree(method, before[-1])
        draft, stood = play(drafter, model, text, vocabulary)
        found = paths(draft) if isinstance(draft, TokenDraft) else []
        assert set(found) == wanted
        assert len(set(found)) == len(found), "two siblings are the same token"
        on_path = [tuple(text[len(before) : len(before) + length]) for length in range(1, stood + 1)]
        # Rejected rows first, then those of the accepted path: later ones overwrite earlier ones.
        for path in [path for path in found if path not in on_path] + [(), *on_path]:
            context = (*before, *path)
            naive.note(context[-1], preferences(context, model(context), vocabulary))
        sizes.add(len(found))
        accepted += stood
    assert accepted > 0
    assert {0, 14} < sizes, "no tree was empty, none partial, or none full"


def test_candidates_without_a_score_are_none() -> None:
    candidates = SuccessorTable(6, 3, torch.device("cpu"))
    scores = torch.full((1, 6), -torch.inf)
    scores[0, 4] = 1.0
    candidates.note(torch.tensor([2]), scores, torch.tensor([0]))
    assert candidates.copy()[2].tolist() == [4, -1, -1]
    level = (torch.tensor([0, 0]), torch.tensor([0, 1]))
    below = (torch.tensor([0, 1]), torch.tensor([0, 0]))
    assert candidates.fill(2, [level, below]) == [4, -1, -1, -1]


def test_the_prompt_fills_the_matrix() -> None:
    model, ids = build("llama"), prompt(17)
    for rows in (0, 5):
        method = make("token-recycling", candidates=3, prompt_rows=rows)
        with torch.inference_mode():
            method.begin(read_text(method.target, ids, method.needs, max_new_tokens=3)[1])
        found = method.candidates.copy()
        with torch.no_grad():
            best = model(torch.tensor([ids])).logits[0].topk(3).indices
        wanted = {token: best[place].tolist() for place, token in enumerate(ids) if place >= 17 - rows}
        assert {token: found[token].tolist() for token in range(VOCABULARY) if found[token, 0] >= 0} == wanted


def test_more_candidates_than_tokens_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build("llama").config, "vocab_size", 5)
    with pytest.raises(InvalidSettingError, match="candidates 8 is more than the 5 tokens of this model; lower it"):
        make("token-recycling")


def learned(count: int = 4) -> Method:
    method: Method = make("token-recycling", candidates=count)
    Engine(build("llama"), method=method).generate(prompt(17), max_new_tokens=12)
    return method


def test_a_matrix_survives_a_file(tmp_path: Any) -> None:
    first = Engine(build("llama"), method=learned())
    first.save_state(tmp_path / "state")
    second = Engine(build("llama"), method="token-recycling", settings={"candidates": 4})
    second.load_state(tmp_path / "state")
    kept, restored = (engine.method.state().tensors["candidates"] for engine in (first, second))
    assert torch.equal(kept, restored)
    assert bool((kept >= 0).any())
    warm = [engine.generate(prompt(17), max_new_tokens=12) for engine in (first, second)]
    assert [record.candidates for record in warm[0].rounds] == [record.candidates for record in warm[1].rounds]
    assert warm[1].rounds[0].drafted > 0


def damage(change: Callable[[torch.Tensor], torch.Tensor | None]) -> LearnedState:
    matrix = change(learned().state().tensors["candidates"].clone())
    return LearnedState(tensors={} if matrix is None else {"candidates": matrix})


def twice(matrix: torch.Tensor) -> torch.Tensor:
    matrix[3] = 7
    return matrix


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda matrix: None, "the state has nothing"),
        (lambda matrix: matrix[:, :3], "set candidates as it was"),
        (lambda matrix: matrix.float(), "set candidates as it was"),
        (lambda matrix: matrix - 1, "damaged"),
        (lambda matrix: matrix + VOCABULARY, "damaged"),
        (twice, "same candidate twice"),
    ],
)
def test_a_state_that_does_not_fit_changes_nothing(
    change: Callable[[torch.Tensor], torch.Tensor | None], message: str
) -> None:
    method = learned()
    before = method.state().tensors["candidates"]
    with pytest.raises(StateError, match=message):
        method.restore(damage(change))
    assert torch.equal(method.state().tensors["candidates"], before)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("name", ["llama", "mistral-window"])
def test_coupled_text_depends_on_the_seed_alone(name: str, method: str) -> None:
    options = {"max_new_tokens": 40, "temperature": 0.6, "seed": 5}
    plain = Engine(build(name), method="autoregressive").generate(prompt(17), **options)
    result = Engine(build(name), method=method, settings=METHODS[method]).generate(prompt(17), **options)
    assert result.token_ids == plain.token_ids
    assert result.drafted > 0
    greedy = Engine(build(name), method=method, settings=METHODS[method]).generate(prompt(17), max_new_tokens=48)
    assert greedy.token_ids == plain_text(name, prompt(17), 48)
    assert greedy.accepted > 0


def test_threads_share_what_is_learned() -> None:
    engine = Engine(build("llama"), method="token-recycling", settings=METHODS["token-recycling"])
    texts: dict[int, tuple[int, ...]] = {}

    def run(length: int) -> None:
        texts[length] = engine.generate(prompt(length), max_new_tokens=24).token_ids

    threads = [threading.Thread(target=run, args=(length,)) for length in (1, 2, 17, 64)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert texts == {length: plain_text("llama", prompt(length), 24) for length in (1, 2, 17, 64)}
    engine.method.restore(engine.method.state())
