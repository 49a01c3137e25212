"""Acceptance: against a readable oracle number by number, and by the distribution of what is committed.

The distribution tests play one round on a toy target over four tokens, fill the output up to three tokens with the
target's own draws, and compare all 64 sequences with the analytic probabilities (chi-squared). That each test could
fail is shown by wrong rules that do.
"""

import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import product

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from selfspec.sampling.acceptance import (
    ROOT,
    Acceptance,
    DraftedTree,
    TokenTree,
    Verdict,
    accept_matching,
    accept_rejection,
    decide_tree,
    walk_tree,
)

VOCAB = 4
LENGTH = 3
DRAWS = 5_000
"""Enough to see a wrong rule."""
NOTHING = torch.empty(0, dtype=torch.long)
CHAIN = TokenTree.chain(2)
TREE = TokenTree((ROOT, 0, ROOT, ROOT, 0))
"""Three siblings below the root, two below the first of them; the extended path comes first."""

Probs = list[float]


# The oracle: plain lists, one number at a time.


def pick(weights: Sequence[float], uniform: float) -> int:
    goal = uniform * sum(weights)
    for token, weight in enumerate(weights):
        goal -= weight
        if goal < 0:
            return token
    return max(token for token, weight in enumerate(weights) if weight > 0)


def normalised(weights: Probs) -> Probs:
    total = sum(weights)
    return [weight / total for weight in weights] if total > 0 else weights


def oracle(
    tree: TokenTree,
    tokens: Sequence[int],
    target: Sequence[Probs],
    uniforms: Sequence[float],
    draft: Sequence[Probs] | None = None,
    wrong: str = "",
) -> Acceptance:
    """Rejection sampling as it stands in the papers; ``wrong`` names a mistake to make."""
    rows, committed = [0], []
    while True:
        p = list(target[rows[-1]])
        siblings = tree.children[rows[-1]]
        q = list(draft[rows[-1]]) if draft is not None and siblings else None
        for node in siblings:
            token = tokens[node]
            if uniforms[node] * (1.0 if q is None else q[token]) < p[token]:
                rows.append(node + 1)
                committed.append(token)
                break
            one_hot = [float(other == token) for other in range(VOCAB)]
            left = [max(0.0, a - b) for a, b in zip(p, one_hot if q is None else q, strict=True)]
            if wrong == "correction from the target":
                left = p
            p = p if sum(left) == 0 else left if wrong == "residual not renormalised" else normalised(left)
            if q is not None and wrong != "siblings with replacement":
                q = normalised([0.0 if other == token else weight for other, weight in enumerate(q)])
        else:
            if not siblings and wrong == "bonus from the draft" and draft is not None:
                p = draft[-1]
            return Acceptance(tuple(rows), (*committed, pick(p, uniforms[-1])))


# A toy target and draft: a distribution for every context of up to two tokens, some tokens filtered.


@cache
def table(seed: int, zero: int) -> dict[tuple[int, ...], Probs]:
    rng = np.random.default_rng(seed)
    contexts = [context for length in range(LENGTH) for context in product(range(VOCAB), repeat=length)]
    probs = {context: rng.dirichlet(np.full(VOCAB, 2.0)) for context in contexts}
    for context in contexts[::2]:
        probs[context][zero] = 0.0
    return {context: (weights / weights.sum()).tolist() for context, weights in probs.items()}


TARGET, DRAFT = table(1, zero=2), table(2, zero=1)


@dataclass(frozen=True)
class Case:
    """One draft with everything the rule is given, as lists and as tensors."""

    tree: TokenTree
    tokens: tuple[int, ...]
    target: list[Probs]
    draft: list[Probs] | None
    tensors: tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]


@cache
def case(tree: TokenTree, tokens: tuple[int, ...], one_hot: bool) -> Case:
    contexts = [tuple(tokens[row - 1] for row in tree.path(row)[1:]) for row in range(len(tree) + 1)]
    target = [TARGET[context] for context in contexts]
    # The draft's last row is the one it would have drawn the bonus from.
    draft = None if one_hot else [DRAFT[tokens[:depth]] for depth in range(3)]
    as_tensor = None if draft is None else torch.tensor(draft, dtype=torch.float64)
    return Case(tree, tokens, target, draft, (torch.tensor(tokens), torch.tensor(target).double(), as_tensor))


def draw_tokens(tree: TokenTree, source: random.Random) -> tuple[int, ...]:
    """Drafts as the draft model does: siblings one after another without replacement, the first one is extended."""
    tokens = [0] * len(tree)
    context: tuple[int, ...] = ()
    for row in (0, 1):
        weights = list(DRAFT[context])
        for node in tree.children[row]:
            tokens[node] = source.choices(range(VOCAB), weights)[0]
            weights[tokens[node]] = 0.0
        context = (tokens[0],)
    return tuple(tokens)


Rule = Callable[[Case, Sequence[float]], Acceptance]


def the_rule(drafted: Case, uniforms: Sequence[float]) -> Acceptance:
    tokens, target, draft = drafted.tensors
    numbers = torch.tensor(uniforms, dtype=torch.float64)
    return accept_rejection(DraftedTree(drafted.tree, tokens, draft), target, numbers).read()


def wrong_rule(wrong: str) -> Rule:
    return lambda drafted, uniforms: oracle(
        drafted.tree, drafted.tokens, drafted.target, uniforms, drafted.draft, wrong
    )


def pvalue(rule: Rule, tree: TokenTree, one_hot: bool, draws: int) -> float:
    """Chi-squared p-value of the committed sequences; 0 if one of them is impossible under the target."""
    source = random.Random(7)
    fixed = (0, 3) if tree == CHAIN else (0, 3, 1, 3, 0)
    counts: Counter[tuple[int, ...]] = Counter()
    with torch.inference_mode():
        for _ in range(draws):
            drafted = case(tree, fixed if one_hot else draw_tokens(tree, source), one_hot)
            output = rule(drafted, [source.random() for _ in range(len(tree) + 1)]).token_ids
            while len(output) < LENGTH:
                output = (*output, source.choices(range(VOCAB), TARGET[output])[0])
            counts[output] += 1
    expected = {
        (a, b, c): draws * TARGET[()][a] * TARGET[a,][b] * TARGET[a, b][c]
        for a, b, c in product(range(VOCAB), repeat=3)
    }
    if any(expected[sequence] == 0 for sequence in counts):
        return 0.0
    common = [sequence for sequence, mean in expected.items() if mean >= 10]
    observed = [counts[sequence] for sequence in common]
    means = [expected[sequence] for sequence in common]
    rest = (draws - sum(observed), draws - sum(means))
    if rest[1] >= 5:
        observed.append(rest[0])
        means.append(rest[1])
    scale = sum(observed) / sum(means)
    return float(stats.chisquare(observed, [mean * scale for mean in means]).pvalue)


@pytest.mark.parametrize(
    ("tree", "one_hot", "draws"),
    [
        (TREE, False, DRAWS),
        (TREE, True, DRAWS),
        (CHAIN, False, DRAWS),
        pytest.param(TREE, False, 4 * DRAWS, marks=pytest.mark.slow),
    ],
)
def test_the_output_follows_the_target(tree: TokenTree, one_hot: bool, draws: int) -> None:
    """A one-hot chain is left to the oracle and to the chains below."""
    assert pvalue(the_rule, tree, one_hot, draws) > 0.01


@pytest.mark.parametrize(
    ("wrong", "tree", "one_hot"),
    [
        ("bonus from the draft", CHAIN, False),
        ("bonus from the draft", TREE, False),
        ("correction from the target", CHAIN, False),
        ("correction from the target", CHAIN, True),
        ("correction from the target", TREE, False),
        ("correction from the target", TREE, True),
        ("residual not renormalised", TREE, False),
        ("residual not renormalised", TREE, True),
        ("siblings with replacement", TREE, False),
    ],
)
def test_the_test_has_power(wrong: str, tree: TokenTree, one_hot: bool) -> None:
    assert pvalue(wrong_rule(wrong), tree, one_hot, DRAWS) < 1e-6


# Number by number.


@st.composite
def distributions(draw: st.DrawFn) -> Probs:
    weights = draw(st.lists(st.integers(0, 5), min_size=VOCAB, max_size=VOCAB).filter(any))
    return [weight / sum(weights) for weight in weights]


@st.composite
def rounds(draw: st.DrawFn, chain: bool = False) -> tuple[TokenTree, list[int], list[Probs], list[float], list[Probs]]:
    size = draw(st.integers(0, 5))
    tree = TokenTree.chain(size) if chain else TokenTree(tuple(draw(st.integers(ROOT, n - 1)) for n in range(size)))
    tokens = draw(st.lists(st.integers(0, VOCAB - 1), min_size=size, max_size=size))
    target, draft = (draw(st.lists(distributions(), min_size=size + 1, max_size=size + 1)) for _ in range(2))
    # Multiples of 1/997 stay clear of the thresholds, which are ratios of small integers.
    uniforms = [draw(st.integers(1, 996)) / 997 for _ in range(size + 1)]
    return tree, tokens, target, uniforms, draft


def run(function: Callable[..., Verdict], drafted: tuple, one_hot: bool) -> Acceptance:
    tree, tokens, target, uniforms, draft = drafted
    probs = None if one_hot else torch.tensor(draft, dtype=torch.float64)
    numbers = torch.tensor(uniforms, dtype=torch.float64)
    target_probs = torch.tensor(target, dtype=torch.float64)
    return function(DraftedTree(tree, torch.tensor(tokens, dtype=torch.long), probs), target_probs, numbers).read()


@pytest.mark.parametrize("function", [accept_rejection, decide_tree, walk_tree])
@given(drafted=rounds(), one_hot=st.booleans())
def test_the_rule_is_the_oracle(function: Callable[..., Verdict], drafted: tuple, one_hot: bool) -> None:
    """In every form: the one that a CPU takes, and the one that reads no trial before the end."""
    tree, tokens, target, uniforms, draft = drafted
    expected = oracle(tree, tokens, target, uniforms, None if one_hot else draft)
    assert run(function, drafted, one_hot) == expected


@given(rounds(chain=True), st.booleans())
def test_both_forms_accept_a_chain_alike(drafted: tuple, one_hot: bool) -> None:
    assert run(decide_tree, drafted, one_hot) == run(walk_tree, drafted, one_hot)


def step_by_step(
    tokens: torch.Tensor,
    target_probs: torch.Tensor,
    uniforms: torch.Tensor,
    draft_probs: torch.Tensor | None,
) -> Acceptance:
    """A chain with the host looking at every trial, and the draw over the support alone."""
    left, committed = target_probs[0].double(), []
    for node, token in enumerate(tokens.tolist()):
        draft = None if draft_probs is None else draft_probs[node].double()
        if float(uniforms[node]) * (1.0 if draft is None else float(draft[token])) < float(left[token]):
            committed.append(token)
            left = target_probs[node + 1].double()
            continue
        residual = left.clone() if draft is None else (left - draft).clamp(min=0)
        if draft is None:
            residual[token] = 0
            residual = residual / residual.sum()
        left = residual / residual.sum() if residual.sum() > 0 else left
        break
    support = left.nonzero().squeeze(-1)
    cumulative = left[support].cumsum(-1)
    index = torch.searchsorted(cumulative, uniforms[-1:] * cumulative[-1], right=True).clamp(max=len(support) - 1)
    return Acceptance(tuple(range(len(committed) + 1)), (*committed, int(support[index])))


@pytest.mark.parametrize("one_hot", [False, True])
@pytest.mark.parametrize("vocabulary", [50, 5003])
def test_a_chain_decided_at_once_commits_the_very_same_tokens(vocabulary: int, one_hot: bool) -> None:
    """Bit for bit the arithmetic of the form that looks: whatever the vocabulary, the filter and the random numbers."""
    generator = torch.Generator().manual_seed(vocabulary)
    lengths: Counter[tuple[int, int]] = Counter()
    for length in range(7):
        for _ in range(40):
            target_scores = 2 * torch.randn(length + 1, vocabulary, generator=generator)
            draft_scores = target_scores[:length] + 0.7 * torch.randn(length, vocabulary, generator=generator)
            for scores in (target_scores, draft_scores):
                scores.masked_fill_(torch.rand(scores.shape, generator=generator) < 0.4, -torch.inf)
            target_probs, draft_probs = target_scores.softmax(-1), draft_scores.softmax(-1)
            source = target_probs[:length] if one_hot else draft_probs
            drawn = torch.multinomial(source, 1, generator=generator)[:, 0] if length else NOTHING
            uniforms = torch.rand(length + 1, dtype=torch.float64, generator=generator)
            if one_hot:
                uniforms[:length] *= target_probs[range(length), drawn] * 1.3
            given_probs = None if one_hot else draft_probs
            expected = step_by_step(drawn, target_probs, uniforms, given_probs)
            chain = DraftedTree(TokenTree.chain(length), drawn, given_probs)
            assert accept_rejection(chain, target_probs, uniforms).read() == expected
            assert decide_tree(chain, target_probs, uniforms).read() == expected
            lengths[length, len(expected.rows) - 1] += 1
    assert min(lengths[3, accepted] for accepted in range(4)) > 0, "some of every outcome"


@given(rounds(), st.booleans(), st.sampled_from([0.0, 1 - 2**-53]))
def test_impossible_tokens_are_never_committed(drafted: tuple, one_hot: bool, extreme: float) -> None:
    """Not even for the most extreme random numbers."""
    tree, tokens, target, uniforms, draft = drafted
    result = run(accept_rejection, (tree, tokens, target, [extreme] * len(uniforms), draft), one_hot)
    assert all(target[row][token] > 0 for row, token in zip(result.rows, result.token_ids, strict=True))


@given(rounds(), st.lists(st.integers(0, VOCAB - 1), min_size=6, max_size=6))
def test_matching_commits_the_targets_choices(drafted: tuple, choices: list[int]) -> None:
    tree, tokens, *_ = drafted
    result = accept_matching(tree, tokens, choices)
    assert list(result.rows) == tree.path(result.rows[-1])
    assert result.token_ids == tuple(choices[row] for row in result.rows)
    assert [tokens[row - 1] for row in result.rows[1:]] == list(result.token_ids[:-1])
    assert all(tokens[node] != result.next_token for node in tree.children[result.rows[-1]]), "could have gone on"


@pytest.mark.parametrize("tree", [CHAIN, TREE], ids=["chain", "tree"])
def test_equal_distributions_accept_everything(tree: TokenTree) -> None:
    probs = torch.full((6, VOCAB), 0.25)
    numbers = torch.full((len(tree) + 1,), 1 - 2**-53, dtype=torch.float64)
    tokens = torch.arange(len(tree)) % VOCAB
    assert accept_rejection(DraftedTree(tree, tokens, probs), probs[: len(tree) + 1], numbers).read().rows == (0, 1, 2)


def test_a_residual_without_mass_falls_back_to_the_target() -> None:
    """p < q by rounding, everywhere: the rejection is rounding too."""
    target = torch.tensor([[0.5, 0.5, 0.0]] * 2, dtype=torch.float64) * (1 - 1e-9)
    draft = torch.tensor([[0.5, 0.5, 0.0]], dtype=torch.float64)
    numbers = torch.tensor([1 - 2**-53, 1 - 2**-53], dtype=torch.float64)
    drafted = DraftedTree(TokenTree.chain(1), torch.tensor([0]), draft)
    assert accept_rejection(drafted, target, numbers).read().token_ids == (1,)


def test_a_token_the_draft_gives_no_probability() -> None:
    """It stands if the target allows it, and never otherwise."""
    draft = torch.tensor([[0.0, 1.0]])
    numbers = torch.tensor([0.5, 0.5], dtype=torch.float64)
    for target, rows in (([0.3, 0.7], (0, 1)), ([0.0, 1.0], (0,))):
        drafted = DraftedTree(TokenTree.chain(1), torch.tensor([0]), draft)
        result = accept_rejection(drafted, torch.tensor([target] * 2), numbers).read()
        assert result.rows == rows


@pytest.mark.parametrize("tree", [CHAIN, TREE], ids=["chain", "tree"])
def test_a_target_that_is_not_a_number_does_not_crash_the_rule(tree: TokenTree) -> None:
    """The loop reports such rows; it needs an answer for the rows before them."""
    target = torch.full((len(tree) + 1, VOCAB), torch.nan)
    numbers = torch.full((len(tree) + 1,), 0.5, dtype=torch.float64)
    drafted = DraftedTree(tree, torch.zeros(len(tree), dtype=torch.long))
    assert accept_rejection(drafted, target, numbers).read().rows == (0,)
