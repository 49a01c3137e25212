"""What of a draft is accepted: the draft's shape, and pure functions of its tokens and the target's.

Its tokens are compared with the target's own choices (``accept_matching``), or go through rejection sampling on the
device of the probabilities (``accept_rejection``).
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import zip_longest

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
    def chain(length: int, siblings: int = 0) -> "TokenTree":
        """The tree of ``length`` nodes in which every token continues the one before it, and siblings of the first.

        It is cached.
        """
        return TokenTree((*range(ROOT, length - 1), *[ROOT] * siblings))

    def __len__(self) -> int:
        return len(self.parents)

    @cached_property
    def is_chain(self) -> bool:
        """Whether no node has a sibling."""
        return self.chained == len(self.parents)

    @cached_property
    def chained(self) -> int:
        """Nodes of the chain that it begins with."""
        return next((node for node, parent in enumerate(self.parents) if parent != node - 1), len(self.parents))

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


@dataclass(frozen=True, eq=False)
class DraftedTree:
    """The draft of one round.

    Attributes:
        tree: of ``n`` tokens.
        token_ids: long ``[n]``, one per node.
        scores: float ``[r, vocab]``, the draft's processed scores: the children of verification row ``i`` were chosen
            from row ``i``. Probabilities in ``accept_rejection``. ``None`` if the rule does not need them, or if the
            draft is deterministic (prompt lookup).
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


def accept_rejection(drafted: DraftedTree, target_probs: torch.Tensor, uniforms: torch.Tensor) -> Verdict:
    """Speculative sampling: the committed tokens follow the target's distribution exactly.

    Leviathan et al. 2023, Algorithm 1; for siblings, rejection without replacement (SWIFT, section 3.3). Siblings are
    tried in order. ``x`` is accepted with probability ``min(1, p(x) / q(x))``. After a rejection ``p`` becomes
    ``max(0, p - q)``, renormalised, and ``x`` is removed from ``q``, which is renormalised. If all siblings are
    rejected, the next token is drawn from ``p``. Exact if siblings were drawn from ``q`` without replacement, in order.

    Without probabilities the draft is deterministic (prompt lookup, top-k candidates): ``q`` is one-hot at each draft
    token, so ``x`` is accepted with probability ``p(x)``, and a rejection removes ``x`` from ``p``.

    Whether a token is part of the draft must not depend on the token itself. A draft may stop after any token, but
    dropping a drawn token because of its own low probability biases the result.

    Args:
        drafted: the draft of ``n`` tokens, on the device of the probabilities; its ``scores`` are the distributions
            that the nodes were drawn from, or ``None`` (see above).
        target_probs: ``[n + 1, vocab]``, the target's distribution after each verification row.
        uniforms: float64 ``[n + 1]``, independent and uniform in [0, 1); entry ``i`` decides the trial of node ``i``,
            the last one draws the next token.

    Returns:
        The accepted path and the next token, which never has probability zero under the target.
    """
    # On a CPU reading a number costs nothing, so a walk that reads only the rows it needs is faster.
    accept = walk_tree if transfer.is_on_host(target_probs) else decide_tree
    return accept(drafted, target_probs, uniforms)


def decide_tree(drafted: DraftedTree, target_probs: torch.Tensor, uniforms: torch.Tensor) -> Verdict:
    """Decides all trials of a tree and draws from all its rows, so that the host reads once, at the end.

    A trial depends only on which siblings come before it. So all first siblings are decided together, then all second
    ones. Used on accelerators; arguments and result are those of ``accept_rejection``.
    """
    tree, draft_tokens, device = drafted.tree, drafted.token_ids, target_probs.device
    left = target_probs.to(torch.float64, copy=True)
    drafts = None
    if tree and drafted.scores is not None:
        origins = [row if nodes else 0 for row, nodes in enumerate(tree.children)]
        drafts = drafted.scores[transfer.send(origins, device)].double()
    target_hits = torch.zeros(len(tree), dtype=torch.float64, device=device)
    draft_hits = torch.ones_like(target_hits)
    for nodes_of_rank in _ranks(tree):
        nodes = transfer.send(nodes_of_rank, device)
        rows = transfer.send([tree.parents[node] + 1 for node in nodes_of_rank], device)
        tokens, target = draft_tokens[nodes], left[rows]
        draft = None if drafts is None else drafts[rows]
        target_hits.index_copy_(0, nodes, _at(target, tokens))
        left.index_copy_(0, rows, _residual(target, draft, tokens))
        if drafts is not None and draft is not None:
            draft_hits.index_copy_(0, nodes, _at(draft, tokens))
            drafts.index_copy_(0, rows, _without(draft, tokens))
    draws = _draw(left, uniforms[len(tree) :])

    def interpret(tokens: list[int], draws: list[int], stands: list[bool]) -> Acceptance:
        rows = [0]
        while (node := next((node for node in tree.children[rows[-1]] if stands[node]), None)) is not None:
            rows.append(node + 1)
        return Acceptance(tuple(rows), (*_path(tokens, rows), draws[rows[-1]]))

    return Verdict((draft_tokens, draws, uniforms[: len(tree)] * draft_hits < target_hits), interpret)


def walk_tree(drafted: DraftedTree, target_probs: torch.Tensor, uniforms: torch.Tensor) -> Verdict:
    """Walks down the tree row by row, each time to the first sibling that is accepted.

    Used on a CPU; arguments and result are those of ``accept_rejection``.
    """
    tree, draft_tokens, draft_probs = drafted.tree, drafted.token_ids, drafted.scores
    tokens, trials = transfer.read(draft_tokens, uniforms)
    rows = [0]
    while True:
        left = target_probs[rows[-1]]
        siblings = tree.children[rows[-1]]
        draft = draft_probs[rows[-1]] if siblings and draft_probs is not None else None
        for node in siblings:
            hits = transfer.read(left[tokens[node]], *(() if draft is None else (draft[tokens[node]],)))
            if trials[node] * (1.0 if draft is None else hits[1]) < hits[0]:
                rows.append(node + 1)
                break
            draft = None if draft is None else draft.double()
            left = _residual(left.double(), draft, draft_tokens[node])
            draft = None if draft is None else _without(draft, draft_tokens[node])
        else:
            drawn = _draw(left.double(), uniforms[len(tree) :])
            return Verdict((drawn,), lambda drawn: Acceptance(tuple(rows), (*_path(tokens, rows), drawn)))


def _path(tokens: list[int], rows: list[int]) -> list[int]:
    """The draft tokens of the verification rows below the root."""
    return [tokens[row - 1] for row in rows[1:]]


def _ranks(tree: TokenTree) -> Iterator[list[int]]:
    """The nodes by their index among their siblings: all first ones, then all second ones, and so on."""
    for nodes in zip_longest(*tree.children):
        yield [node for node in nodes if node is not None]


def _at(probs: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """The probability of one token in each row: ``[r, vocab]`` and ``[r]`` to ``[r]``."""
    return probs.gather(-1, tokens[:, None]).squeeze(-1)


def _residual(target: torch.Tensor, draft: torch.Tensor | None, token: torch.Tensor) -> torch.Tensor:
    """The target's residual distribution ``[..., vocab]`` after ``token`` ``[...]`` was rejected."""
    left = _without(target, token) if draft is None else (target - draft).clamp_(min=0)
    total = left.sum(-1, keepdim=True)
    # The residual is zero where p and q are equal up to rounding. A rejection is then due to rounding too: use p.
    return torch.where(total > 0, left / total, target)


def _without(probs: torch.Tensor, token: torch.Tensor) -> torch.Tensor:
    """``probs`` ``[..., vocab]`` without ``token`` ``[...]``, renormalised; zeros if no other token is possible."""
    left = probs.scatter(-1, token[..., None], 0.0)
    return left / left.sum(-1, keepdim=True).clamp_(min=torch.finfo(left.dtype).tiny)


def _draw(probs: torch.Tensor, uniform: torch.Tensor) -> torch.Tensor:
    """Inverse-CDF draws from float64 ``[..., vocab]`` (any scale) with ``uniform`` ``[1]``: tokens, long ``[...]``."""
    cumulative = probs.cumsum(-1)
    total = cumulative[..., -1:]
    # Strictly below the total: the product may be rounded up to it.
    goal = torch.minimum(uniform * total, total.nextafter(torch.zeros_like(total)))
    # A parallel prefix sum may increase at an entry that is zero; such a token is excluded.
    possible = probs > 0
    reached = (cumulative > goal).logical_and_(possible)
    return possible.byte().add_(reached).argmax(-1)  # the first one reached
