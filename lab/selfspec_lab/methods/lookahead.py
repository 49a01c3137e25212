"""Lookahead decoding: n-grams from Jacobi iterations in a two-dimensional window, verified in the same forward."""

import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from selfspec.errors import StateError
from selfspec.methods.api import (
    Draft,
    Drafter,
    Feedback,
    LearnedState,
    Method,
    MethodSettings,
    Needs,
    NoDraft,
    Prefill,
    Proposal,
    Target,
    TokenDraft,
    TokenTree,
    setting,
)
from selfspec.sampling.acceptance import ROOT
from selfspec_lab.methods.jacobi import Guess, random_guesses


@dataclass(frozen=True)
class LookaheadSettings(MethodSettings):
    """Settings of ``lookahead``. The paper's values are for 7B models on an A100; slower devices need smaller ones."""

    window_size: int = setting(15, "W, columns of the window (paper: 15 at 7B, 7 at 34B)", minimum=1, maximum=128)
    ngram_size: int = setting(5, "N, tokens of an n-gram; the window has N - 1 levels", minimum=2, maximum=16)
    guess_set_size: int = setting(15, "G, most n-grams to verify in a round (paper: as W)", minimum=0, maximum=128)
    pool_from_prompt: bool = setting(False, "add the n-grams of the prompt to the pool")
    keep_pool: bool = setting(False, "keep the n-grams for later requests; a state can then be saved")


class NgramPool:
    """The last ``capacity`` n-grams of each first token. Thread-safe."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._tails: dict[int, dict[tuple[int, ...], None]] = {}
        self._lock = threading.Lock()

    def add(self, ngrams: Iterable[Sequence[int]]) -> None:
        """Adds n-grams, the newest last. One that is in the pool already becomes the newest."""
        with self._lock:
            for first, *rest in ngrams:
                tails, tail = self._tails.setdefault(first, {}), tuple(rest)
                tails.pop(tail, None)
                tails[tail] = None
                if len(tails) > self._capacity:
                    del tails[next(iter(tails))]

    def find(self, first: int) -> list[tuple[int, ...]]:
        """The other tokens of the n-grams that begin with a token, the newest first."""
        with self._lock:
            return list(self._tails.get(first, ()))[::-1]

    def ngrams(self) -> list[list[int]]:
        """All n-grams, in an order from which ``add`` makes the same pool."""
        with self._lock:
            return [[first, *tail] for first, tails in self._tails.items() for tail in tails]

    def replace(self, ngrams: Iterable[Sequence[int]]) -> None:
        """Replaces all n-grams by those of another pool."""
        fresh = NgramPool(self._capacity)
        fresh.add(ngrams)
        with self._lock:
            self._tails = fresh._tails


class TreeBuilder:
    """Builds a token tree in which no node has two children of the same token."""

    def __init__(self) -> None:
        self._node_of: dict[tuple[int, int], int] = {}

    def child(self, parent: int, token: int) -> int:
        """The child of a node with a token, added if there is none."""
        return self._node_of.setdefault((parent, token), len(self._node_of))

    def draft(self) -> Draft:
        """The tree with its tokens; ``NoDraft`` for an empty tree."""
        if not self._node_of:
            return NoDraft()
        parents, tokens = zip(*self._node_of, strict=True)
        return TokenDraft(tokens, TokenTree(parents))


class Lookahead(Method):
    """Two branches in one forward (Fu et al. 2024, Algorithm 2).

    The *lookahead branch* is a window of ``N - 1`` levels by ``W`` columns, the Jacobi iterates of the last rounds.
    Level 0 begins with the pending token; column ``i`` of level ``l`` is ``i + l`` positions after it. A token attends
    to level 0 up to its own column, and to its column in the levels between. So level 0 is a chain, each other token
    continues the token of its column in the level above, and the paper's attention mask is that of a token tree. The
    last level predicts the next one; each column with its prediction becomes an n-gram of the pool, and level 0 is
    dropped.

    The *verification branch* is the ``G`` newest n-grams of the pool that begin with the pending token.

    Known differences from the authors' code: tokens of the two branches with the same prefix are one node; the window's
    own tokens can be accepted too; after a round that commits several tokens the window moves forward by as many, and
    its new columns are random tokens of the prompt, as at the start.
    """

    name = "lookahead"
    summary = "n-grams from Jacobi iterations, verified in the same forward"
    source = "lookahead decoding (Fu et al. 2024)"
    Settings = LookaheadSettings
    settings: LookaheadSettings
    learns = True

    def __init__(self, target: Target, settings: LookaheadSettings) -> None:
        super().__init__(target, settings)
        self._pool = NgramPool(settings.guess_set_size)

    @property
    def needs(self) -> Needs:
        """Cache slots for all rows of both branches but the longest path, which has at least the window's length."""
        columns, levels = self.settings.window_size, self.settings.ngram_size - 1
        rows = columns * levels - 1 + self.settings.guess_set_size * levels
        return Needs(sibling_rows=rows - (columns + levels - 2))

    def begin(self, prefill: Prefill) -> Drafter:
        """Starts on a request."""
        settings = self.settings
        pool = self._pool if settings.keep_pool else NgramPool(settings.guess_set_size)
        if settings.pool_from_prompt:
            text, size = (*prefill.prompt_ids, prefill.first_token), settings.ngram_size
            pool.add(text[start : start + size] for start in range(len(text) - size + 1))
        window = Window(settings.window_size, settings.ngram_size - 1, random_guesses(prefill.prompt_ids))
        return LookaheadDrafter(prefill.first_token, window, pool)

    def state(self) -> LearnedState:
        """The n-grams of all requests so far."""
        if not self.settings.keep_pool:
            raise StateError("lookahead forgets its n-grams after each request; set keep_pool to keep and save them")
        return LearnedState({"ngrams": self._pool.ngrams()})

    def restore(self, state: LearnedState) -> None:
        """Loads n-grams that were saved with the same ``ngram_size``."""
        self.state()
        ngrams = state.values.get("ngrams")
        if not isinstance(ngrams, list) or not all(self._is_ngram(ngram) for ngram in ngrams):
            raise StateError(
                f"this state has no list of n-grams of {self.settings.ngram_size} tokens; "
                "set ngram_size as it was, or start without it"
            )
        self._pool.replace(ngrams)

    def _is_ngram(self, value: Any) -> bool:
        tokens = value if isinstance(value, list) and len(value) == self.settings.ngram_size else [None]
        return all(type(token) is int and 0 <= token < self.target.vocab_size for token in tokens)


class Window:
    """The window of the lookahead branch: ``W`` columns by ``N - 1`` levels of tokens.

    Column 0 of level 0 is the position of the pending token and is not used. ``guess`` gives the tokens of new columns.
    """

    def __init__(self, columns: int, levels: int, guess: Guess) -> None:
        self._guess = guess
        self.levels = [[guess() for _ in range(columns)] for _ in range(levels)]

    def plant(self, builder: TreeBuilder) -> list[int]:
        """Adds the window to a tree; returns the nodes of its last level, by column."""
        nodes = [ROOT]
        for token in self.levels[0][1:]:
            nodes.append(builder.child(nodes[-1], token))
        for level in self.levels[1:]:
            nodes = [builder.child(parent, token) for parent, token in zip(nodes, level, strict=True)]
        return nodes

    def ngrams(self, pending: int, predicted: Sequence[int | None]) -> list[list[int]]:
        """The n-grams of the columns that have a prediction, the target's choice after the last level."""
        first = [pending, *self.levels[0][1:]]
        columns = zip(first, *self.levels[1:], predicted, strict=True)
        return [[token for token in column if token is not None] for column in columns if column[-1] is not None]

    def advance(self, predicted: Sequence[int | None], committed: int) -> None:
        """Does one Jacobi iteration and moves the window forward by the committed tokens."""
        newest = [self._guess() if token is None else token for token in predicted]
        # Dropping a level moves the window by one token already: level l + 1 is one position after level l.
        moved = [level[committed - 1 :] for level in (*self.levels[1:], newest)]
        self.levels = [level + [self._guess() for _ in range(len(newest) - len(level))] for level in moved]

    def move(self, committed: int) -> None:
        """Moves the window forward by the committed tokens, without an iteration."""
        columns = len(self.levels[0])
        moved = [level[committed:] for level in self.levels]
        self.levels = [level + [self._guess() for _ in range(columns - len(level))] for level in moved]


class LookaheadDrafter(Drafter):
    """One request."""

    def __init__(self, first_token: int, window: Window, pool: NgramPool) -> None:
        self._pending = first_token
        self.window = window
        self._pool = pool
        self._last_level: list[int] = []

    def plan(self) -> Draft:
        """Drafts the n-grams of the pool and the window."""
        builder = TreeBuilder()
        # The n-grams come first, so that sampling tries them before the window's tokens.
        for tail in self._pool.find(self._pending):
            node = ROOT
            for token in tail:
                node = builder.child(node, token)
        self._last_level = self.window.plant(builder)
        return builder.draft()

    def learn(self, feedback: Feedback) -> None:
        """Adds the window's n-grams to the pool, and moves the window."""
        choices: list[int] = feedback.target_scores.argmax(-1).tolist()
        rows = _verified_rows(feedback.draft, feedback.proposal)
        predicted = [choices[rows[node]] if node in rows else None for node in self._last_level]
        self._pool.add(self.window.ngrams(self._pending, predicted))
        self.window.advance(predicted, len(feedback.acceptance.token_ids))
        self._pending = feedback.acceptance.next_token

    def observe(self, feedback: Feedback) -> None:
        """Moves the window; its tokens were not verified."""
        self.window.move(len(feedback.acceptance.token_ids))
        self._pending = feedback.acceptance.next_token


def _verified_rows(draft: Draft, proposal: Proposal) -> dict[int, int]:
    """The verification row of each drafted node; nodes that were too deep to be committed have none."""
    rows = {ROOT: 0}
    if not isinstance(draft, TokenDraft):
        return rows
    if len(proposal.tree) == len(draft.tree):
        return rows | {node: node + 1 for node in range(len(draft.tree))}
    tokens: list[int] = proposal.token_ids.tolist()
    found = {
        (parent + 1, token): row
        for row, (parent, token) in enumerate(zip(proposal.tree.parents, tokens, strict=False), 1)
    }
    for node, (parent, token) in enumerate(zip(draft.tree.parents, draft.token_ids, strict=True)):
        row = found.get((rows[parent], token)) if parent in rows else None
        if row is not None:
            rows[node] = row
    return rows
