"""Acceptance of draft tokens: pure functions, no model in them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from selfspec.model import transfer
from selfspec.sampling.tree import TokenTree


@dataclass(frozen=True, eq=False)
class Drafted:
    """The draft of one round.

    Attributes:
        tree: of ``n`` tokens.
        token_ids: long ``[n]``, one per node.
        scores: float ``[r, vocab]``, the draft's processed scores: the children of verification row ``i`` were chosen
            from row ``i``. Probabilities in ``rejection``. ``None`` if the rule does not need them, or if the draft is
            deterministic (prompt lookup).
    """

    tree: TokenTree
    token_ids: torch.Tensor
    scores: torch.Tensor | None = None


@dataclass(frozen=True)
class Acceptance:
    """The outcome of one round.

    Attributes:
        rows: verification rows of the accepted path, from the root (row 0, always part of it). Node ``i`` of the tree
            is row ``i + 1``, so ``len(rows) - 1`` draft tokens are accepted.
        token_ids: the tokens to commit, as many as rows: the accepted draft tokens, followed by the next token.
    """

    rows: tuple[int, ...]
    token_ids: tuple[int, ...]

    def __post_init__(self) -> None:
        assert len(self.rows) == len(self.token_ids)

    @property
    def next_token(self) -> int:
        """The token after the last accepted one: the correction of a rejected draft token, or the bonus token."""
        return self.token_ids[-1]


@dataclass(frozen=True)
class Verdict:
    """The outcome of one round, still on the device.

    ``interpret`` computes it from the values of ``numbers``, one list (``Tensor.tolist``) for each tensor.
    """

    numbers: tuple[torch.Tensor, ...]
    interpret: Callable[..., Acceptance]

    def read(self) -> Acceptance:
        """Reads the outcome, synchronising with the device once."""
        return self.interpret(*transfer.read(*self.numbers))


def accept_matching(tree: TokenTree, draft_tokens: Sequence[int], target_tokens: Sequence[int]) -> Acceptance:
    """Accepts the longest draft path on which every token is the target's own choice.

    Lossless because every committed token is a choice of the target: an argmax (greedy) or a draw that depends only on
    seed and position (coupled). The draft only determines how many of these choices one forward yields.

    Args:
        tree: the draft of ``n`` tokens.
        draft_tokens: ``[n]`` token ids, one per node.
        target_tokens: ``[n + 1]`` token ids; entry ``row`` is what the target chooses after verification row ``row``.

    Returns:
        The longest path from the root whose tokens are all the target's choices, and the target's choice after it.
    """
    rows = [0]
    while True:
        choice = target_tokens[rows[-1]]
        matching = next((node for node in tree.children[rows[-1]] if draft_tokens[node] == choice), None)
        if matching is None:
            return Acceptance(tuple(rows), tuple(target_tokens[row] for row in rows))
        rows.append(matching + 1)
