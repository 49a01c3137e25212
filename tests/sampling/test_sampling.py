"""The three choosing rules, drafting and accepting together on a toy model."""

from collections import Counter
from itertools import permutations
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats
from transformers import InfNanRemoveLogitsProcessor

from selfspec.sampling.acceptance import ROOT, DraftedTree, TokenTree
from selfspec.sampling.processors import build_processors
from selfspec.sampling.rules import (
    Coupled,
    Greedy,
    Rule,
    Speculative,
    best,
    gumbel_noise,
    next_best,
    possible,
    rule_of,
    seeded_generator,
)
from selfspec.types import SamplingParams

NOTHING = torch.empty(0, dtype=torch.long)
VOCAB = 6
TREE = TokenTree((ROOT, 0, ROOT, ROOT, 0))


def rules(seed: int = 3) -> list[Rule]:
    return [Greedy(), Coupled(seed), Speculative(seeded_generator(seed, "cpu"))]


def plain(rule: Rule, scores: torch.Tensor, position: int) -> int:
    return rule.accept(DraftedTree(TokenTree(()), NOTHING), scores[None], (position,)).read().next_token


def candidates(rule: Rule, scores: torch.Tensor, position: int, count: int) -> torch.Tensor:
    """What a draft verifies at one position, at most ``count`` tokens."""
    preferences = rule.preferences(scores, position)
    first = best(preferences)
    others = min(count, int(possible(preferences))) - 1
    return torch.cat([first, next_best(preferences, first, others)]) if others > 0 else first


def some_scores(seed: int, rows: int = 1) -> torch.Tensor:
    """Scores with some tokens filtered."""
    generator = torch.Generator().manual_seed(seed)
    scores = torch.randn(rows, VOCAB, generator=generator)
    scores[:, seed % VOCAB] = -torch.inf
    return scores


@given(st.lists(st.sampled_from([-torch.inf, 0.0, 1.0, 2.0]), min_size=1, max_size=40), st.integers(1, 12))
def test_greedy_candidates(values: list[float], count: int) -> None:
    """With ties everywhere the first candidate is still argmax's, and the others are a best set."""
    scores = torch.tensor(values)
    if not scores.isfinite().any():
        return
    tokens = candidates(Greedy(), scores, 0, count).tolist()
    finite = sorted((value for value in values if value > -torch.inf), reverse=True)
    assert tokens[0] == int(scores.argmax()) == plain(Greedy(), scores, 0)
    assert [values[token] for token in tokens] == finite[:count]
    assert len(set(tokens)) == len(tokens)


@pytest.mark.parametrize("rule", rules(), ids=lambda rule: type(rule).__name__)
def test_filtered_tokens_are_never_drafted(rule: Rule) -> None:
    scores = torch.tensor([-torch.inf, 1.0, -torch.inf, -3.0, -torch.inf])
    for position in range(50):
        assert set(candidates(rule, scores, position, 4).tolist()) == {1, 3}
        assert candidates(rule, scores, position, 1).tolist()[0] in {1, 3}
        assert plain(rule, scores, position) in {1, 3}


@given(st.integers(-(1 << 70), 1 << 70), st.integers(0, 1000))
def test_coupled_choices_depend_on_seed_and_position_alone(seed: int, position: int) -> None:
    scores = some_scores(position)[0]
    expected = int((scores + gumbel_noise(seed, torch.tensor([position]), VOCAB)).argmax())
    rule = Coupled(seed)
    assert plain(rule, scores, position) == expected
    assert candidates(rule, scores, position, 1).tolist() == [expected]
    assert candidates(rule, scores, position, 3).tolist()[0] == expected


@pytest.mark.parametrize("rule", [Greedy(), Coupled(5)], ids=["greedy", "coupled"])
@given(seed=st.integers(0, 10_000), tokens=st.lists(st.integers(0, VOCAB - 1), min_size=5, max_size=5))
def test_matching_rules_commit_what_plain_decoding_would(rule: Rule, seed: int, tokens: list[int]) -> None:
    """The committed tokens are the plain choices after each accepted row, whatever was drafted."""
    scores = some_scores(seed, rows=6)
    positions = [100 + depth for depth in TREE.depths]
    result = rule.accept(DraftedTree(TREE, torch.tensor(tokens)), scores, positions).read()
    assert result.token_ids == tuple(plain(rule, scores[row], positions[row]) for row in result.rows)


def test_coupled_drafts_are_accepted_where_draft_and_target_agree() -> None:
    rule, scores = Coupled(1), some_scores(4, rows=4)
    tokens = torch.cat([candidates(rule, scores[row], 10 + row, 1) for row in range(3)])
    assert rule.accept(DraftedTree(TokenTree.chain(3), tokens), scores, range(10, 14)).read().rows == (0, 1, 2, 3)


def test_speculative_draws_are_seeded() -> None:
    scores = some_scores(0, rows=1)[0]
    runs = [[plain(Speculative(seeded_generator(seed, "cpu")), scores, 0) for seed in range(-20, 20)] for _ in range(2)]
    assert runs[0] == runs[1]
    assert len(set(runs[0])) > 1
    seeded_generator(1 << 300, "cpu")


def test_speculative_candidates_are_drawn_without_replacement() -> None:
    """Ordered pairs follow q(x) q(y) / (1 - q(x))."""
    probs = [0.5, 0.3, 0.0, 0.15, 0.05]
    rule, scores = Speculative(seeded_generator(0, "cpu")), torch.tensor(probs).log()
    draws = 20_000
    counts = Counter(tuple(candidates(rule, scores, 0, 2).tolist()) for _ in range(draws))
    support = [token for token, prob in enumerate(probs) if prob > 0]
    pairs = list(permutations(support, 2))
    assert set(counts) <= set(pairs)
    without = [draws * probs[x] * probs[y] / (1 - probs[x]) for x, y in pairs]
    assert stats.chisquare([counts[pair] for pair in pairs], without).pvalue > 0.01
    uniform_second = [draws * probs[x] / 3 for x, _ in pairs]
    assert stats.chisquare([counts[pair] for pair in pairs], uniform_second).pvalue < 1e-6


@torch.inference_mode()
def test_speculative_rounds_follow_the_target() -> None:
    """Drafting and accepting together, siblings included; the first token against its analytic distribution."""
    rule = Speculative(seeded_generator(8, "cpu"))
    target, draft = some_scores(1, rows=6), some_scores(2, rows=2)
    draws = 5_000
    counts: Counter[int] = Counter()
    for _ in range(draws):
        top, below = candidates(rule, draft[0], 0, 3), candidates(rule, draft[1], 1, 2)
        tokens = torch.cat([top[:1], below[:1], top[1:], below[1:]])
        # The rows below the root are the same for every token here: the toy model forgets its context.
        result = rule.accept(DraftedTree(TREE, tokens, draft), target, TREE.depths).read()
        counts[result.token_ids[0]] += 1
    probs = target[0].double().softmax(-1)
    support = probs.nonzero().flatten().tolist()
    assert set(counts) <= set(support)
    observed = [counts[token] for token in support]
    assert stats.chisquare(observed, (probs[support] * draws).numpy()).pvalue > 0.01
    claimed = draft[0].double().softmax(-1)[support]
    assert stats.chisquare(observed, (claimed / claimed.sum() * draws).numpy() + 1e-9).pvalue < 1e-6


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 5), st.integers(1, 4)), max_size=30))
def test_coupled_noise_depends_on_the_position_alone(calls: list[tuple[bool, int, int]]) -> None:
    """Whatever was drafted and verified before, and however often."""
    rule, at = Coupled(4), 0
    for drafts, step, count in calls:
        at += step
        scores, positions = some_scores(at, rows=count), range(at, at + count)
        noise = gumbel_noise(4, torch.tensor(positions), VOCAB)
        if drafts:
            assert torch.equal(rule.preferences(scores[0], at), (scores + noise)[0])
        else:
            chain = TokenTree.chain(count - 1)
            verdict = rule.accept(DraftedTree(chain, torch.zeros(count - 1, dtype=torch.long)), scores, positions)
            assert torch.equal(verdict.numbers[-1], (scores + noise).argmax(-1))


def test_noise_is_kept_for_what_may_be_drafted_again_only() -> None:
    rule, scores = Coupled(4), some_scores(1, rows=4)
    for at in range(0, 40, 2):
        for position in range(at, at + 3):
            rule.preferences(scores[0], position)
        rule.accept(DraftedTree(TokenTree.chain(3), torch.zeros(3, dtype=torch.long)), scores, range(at, at + 4))
        assert len(rule._kept) <= 3


@pytest.mark.parametrize(
    ("given", "device", "rule"),
    [
        ({"temperature": 0.0}, "cpu", Greedy),
        ({}, "cpu", Coupled),
        ({"top_p": 0.9, "top_k": 20, "min_p": 0.05}, "cpu", Coupled),
        ({"repetition_penalty": 1.1, "logit_bias": {3: 2.0}}, "cpu", Coupled),
        ({"logits_processors": (InfNanRemoveLogitsProcessor(),)}, "cpu", Speculative),
        ({"repetition_penalty": 1.1, "seed": 5}, "cpu", Coupled),
        ({"acceptance": "speculative"}, "cpu", Speculative),
        ({"acceptance": "speculative", "seed": 5}, "cpu", Speculative),
        ({"seed": 5}, "cuda", Coupled),
    ],
)
def test_the_rule_of_a_request(given: dict[str, Any], device: str, rule: type[Rule]) -> None:
    params = SamplingParams(**({"temperature": 0.7} | given))
    found = rule_of(params, torch.device(device), build_processors(params))
    assert type(found) is rule
    assert not isinstance(found, Coupled) or params.seed in (None, found.seed)


def test_requests_without_a_seed_have_different_ones() -> None:
    params = SamplingParams(temperature=0.7)
    drawn = [rule_of(params, torch.device("cpu"), build_processors(params)) for _ in range(9)]
    assert len({each.seed for each in drawn if isinstance(each, Coupled)}) == 9
