"""The token tree: the shape of the draft of one round."""

from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np
import torch

from selfspec.model import transfer

ROOT = -1
"""The parent of nodes that directly follow the pending token."""


@dataclass(frozen=True)
class TokenTree:
    """The shape of a draft of ``n`` tokens after the pending token. The tokens themselves are stored separately.

    Node ``i`` is row ``i + 1`` of the verification; row 0 is the pending token (the tree's root). A chain, the usual
    draft, is the tree in which node ``i`` continues node ``i - 1``.

    Attributes:
        parents: for each node the index of the node that it continues, or ``ROOT``. Parents come before their
            children, and siblings in the order in which they are tried.
    """

    parents: tuple[int, ...]

    def __post_init__(self) -> None:
        for node, parent in enumerate(self.parents):
            if not ROOT <= parent < node:
                raise ValueError(f"node {node} has parent {parent}: a parent must come before its children")

    @staticmethod
    @lru_cache(maxsize=256)
    def chain(length: int) -> "TokenTree":
        """The tree of ``length`` nodes in which every token continues the one before it; cached by length."""
        return TokenTree(tuple(range(ROOT, length - 1)))

    def __len__(self) -> int:
        return len(self.parents)

    @cached_property
    def is_chain(self) -> bool:
        """Whether no node has a sibling."""
        return self.parents == tuple(range(ROOT, len(self.parents) - 1))

    @cached_property
    def children(self) -> tuple[tuple[int, ...], ...]:
        """For each verification row (row 0 is the root) the nodes that continue it, in the order of the trials."""
        rows: list[list[int]] = [[] for _ in range(len(self.parents) + 1)]
        for node, parent in enumerate(self.parents):
            rows[parent + 1].append(node)
        return tuple(tuple(row) for row in rows)

    @cached_property
    def depths(self) -> tuple[int, ...]:
        """For each verification row its distance from the pending token; row 0 has depth 0."""
        depths = [0]
        for parent in self.parents:
            depths.append(depths[parent + 1] + 1)
        return tuple(depths)

    def path(self, row: int) -> list[int]:
        """The verification rows from the root to ``row``, inclusive."""
        rows = [row]
        while row:
            row = self.parents[row - 1] + 1
            rows.append(row)
        return rows[::-1]

    def visibility(self, device: torch.device | str = "cpu") -> torch.Tensor:
        """The attention mask of the tree, bool ``[n + 1, n + 1]`` (query, key): a row sees itself and its ancestors."""
        rows = len(self.parents) + 1
        if self.is_chain:
            return torch.ones(rows, rows, dtype=torch.bool, device=device).tril_()
        visible = np.eye(rows, dtype=bool)  # numpy is many times faster than torch for single rows
        for node, parent in enumerate(self.parents):
            visible[node + 1] |= visible[parent + 1]
        return transfer.send(torch.from_numpy(visible), device)


EMPTY_TREE = TokenTree.chain(0)
"""The tree of autoregressive decoding."""
