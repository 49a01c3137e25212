"""Drafters at work on a model that is a plain function, so that their drafts can be compared with slow references."""

import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from selfspec.decoding.draft import Draft, Proposal, TokenDraft
from selfspec.decoding.drafter import Drafter, Feedback, Prefill
from selfspec.methods.base import Method
from selfspec.runtimes import runner
from selfspec.sampling.acceptance import TokenTree, accept_matching

Model = Callable[[tuple[int, ...]], int]
"""The next token of a text."""

FINDERS = ("prompt-lookup", "suffix", "token-recycling")
"""They draft without layers: on a random model they are right by luck or where it repeats itself, not in every run."""


def ngram_model(order: int, vocabulary: int, seed: int = 0) -> Model:
    """A model whose next token is a random but fixed function of the last ``order`` tokens."""
    return lambda text: zlib.crc32(repr((seed, text[-order:])).encode()) % vocabulary


@contextmanager
def counted_forwards() -> Iterator[list[int]]:
    """The rows of each forward that drafts from Python."""
    rows: list[int] = []
    advance = runner._advance

    def counted(model: Any, drafts: Sequence[Any], most: int | None = None) -> None:
        rows.extend(len(each.step.hidden_states) for each in drafts)
        advance(model, drafts, most)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runner, "_advance", counted)
        yield rows


def begin(method: Method, text: Sequence[int]) -> Drafter:
    """A drafter on a text whose last token is the pending one."""
    probe: Any = None
    return method.begin(Prefill(tuple(text[:-1]), text[-1], probe))


def play(drafter: Drafter, model: Model, text: list[int], vocabulary: int, room: int = 1000) -> tuple[Draft, int]:
    """Plays a round and commits it to ``text``.

    Args:
        drafter: drafts.
        model: verifies.
        text: the text so far, the pending token last.
        vocabulary: number of token ids.
        room: drafted tokens deeper than this are cut, as at the end of an output.

    Returns:
        The draft, and how many of its tokens were accepted.
    """
    draft = drafter.plan()
    tokens, tree = cut(draft, room)
    rows = [tuple(text) + tuple(tokens[row - 1] for row in tree.path(row)[1:]) for row in range(len(tree) + 1)]
    choices = [model(row) for row in rows]
    acceptance = accept_matching(tree, tokens, choices)
    scores = torch.zeros(len(rows), vocabulary)
    for row, context in enumerate(rows):
        scores[row] = torch.tensor(preferences(context, choices[row], vocabulary))
    drafter.learn(Feedback(draft, Proposal(torch.tensor(tokens, dtype=torch.long), tree), acceptance, lambda: scores))
    text += acceptance.token_ids
    return draft, len(acceptance.rows) - 1


def preferences(context: tuple[int, ...], choice: int, vocabulary: int) -> list[float]:
    """Scores of all tokens: the choice is the best, the others have an order of their own after each token."""
    return [
        2.0 if token == choice else (token * 7 + context[-1]) % vocabulary / vocabulary for token in range(vocabulary)
    ]


def cut(draft: Draft, room: int) -> tuple[list[int], TokenTree]:
    """A draft without the nodes that are too deep."""
    if not isinstance(draft, TokenDraft):
        return [], TokenTree(())
    kept = [node for node in range(len(draft.tree)) if draft.tree.depths[node + 1] <= room]
    place = {node: index for index, node in enumerate(kept)} | {-1: -1}
    tree = TokenTree(tuple(place[draft.tree.parents[node]] for node in kept))
    return [draft.token_ids[node] for node in kept], tree


def paths(draft: TokenDraft) -> list[tuple[int, ...]]:
    """For each node the tokens from the root down to it."""
    return [tuple(draft.token_ids[row - 1] for row in draft.tree.path(node + 1)[1:]) for node in range(len(draft.tree))]
