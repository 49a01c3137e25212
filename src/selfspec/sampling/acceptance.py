"""Acceptance: which drafted tokens stand, and which token follows them. Pure functions, no model in them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from selfspec.model import transfer
from selfspec.sampling.tree import TokenTree


@dataclass(frozen=True)
class Acceptance:
    """The outcome of one round.

    Attributes:
        rows: verification rows from the root (row 0, always there) down the accepted path. Node ``i`` of the tree is
            row ``i + 1``, so ``len(rows) - 1`` draft tokens are accepted.
        token_ids: the tokens to commit, as many as rows: the accepted draft tokens and the next token behind them.
    """

    rows: tuple[int, ...]
    token_ids: tuple[int, ...]

    def __post_init__(self) -> None:
        assert len(self.rows) == len(self.token_ids)

    @property
    def next_token(self) -> int:
        """The token after the last accepted one: the correction of a rejected draft, or the bonus."""
        return self.token_ids[-1]


@dataclass(frozen=True)
class Verdict:
    """The outcome of one round as the device knows it; the host has not read it yet.

    Attributes:
        numbers: all that the host has to read.
        interpret: what follows from it; takes a list (``Tensor.tolist``) for each of the numbers.
    """

    numbers: tuple[torch.Tensor, ...]
    interpret: Callable[..., Acceptance]

    def read(self) -> Acceptance:
        """The outcome, with one wait for the device."""
        return self.interpret(*transfer.read(*self.numbers))

    def read_if(self, condition: torch.Tensor) -> Acceptance | None:
        """The outcome if a condition holds, which is read in the same wait.

        Args:
            condition: bool ``[]``, on the device.
        """
        *numbers, holds = transfer.read(*self.numbers, condition)
        return self.interpret(*numbers) if holds else None


def accept_matching(tree: TokenTree, draft_tokens: Sequence[int], target_tokens: Sequence[int]) -> Acceptance:
    """Accepts the drafted path that the target would have taken itself.

    Lossless because every committed token is the target's own choice, be it an argmax (greedy) or a draw that depends
    on the position alone (coupled): the draft decides only how many of those choices one forward yields.

    Args:
        tree: the draft of ``n`` tokens.
        draft_tokens: ``[n]`` token ids, one per node.
        target_tokens: ``[n + 1]`` token ids; entry ``row`` is what the target chooses after verification row ``row``.

    Returns:
        The longest path from the root whose tokens are all the target's choices, and its choice after that path.
    """
    rows = [0]
    while True:
        choice = target_tokens[rows[-1]]
        matching = next((node for node in tree.children[rows[-1]] if draft_tokens[node] == choice), None)
        if matching is None:
            return Acceptance(tuple(rows), tuple(target_tokens[row] for row in rows))
        rows.append(matching + 1)
