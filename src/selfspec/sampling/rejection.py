"""Acceptance by rejection sampling, computed on the device of the probabilities."""

from collections.abc import Iterator
from itertools import zip_longest

import torch

from selfspec.model import transfer
from selfspec.sampling.acceptance import Acceptance, Drafted, Verdict
from selfspec.sampling.tree import TokenTree


def accept_rejection(drafted: Drafted, target_probs: torch.Tensor, uniforms: torch.Tensor) -> Verdict:
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


def decide_tree(drafted: Drafted, target_probs: torch.Tensor, uniforms: torch.Tensor) -> Verdict:
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


def walk_tree(drafted: Drafted, target_probs: torch.Tensor, uniforms: torch.Tensor) -> Verdict:
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
