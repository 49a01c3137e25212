"""Acceptance: which drafted tokens stand, and which token follows them. Pure functions, no model in them."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from selfspec.decoding.tree import TokenTree


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


def accept_rejection(
    tree: TokenTree,
    draft_tokens: torch.Tensor,
    target_probs: torch.Tensor,
    uniforms: torch.Tensor,
    draft_probs: torch.Tensor | None = None,
    draft_rows: Sequence[int] = (),
) -> Acceptance:
    """Speculative sampling: the committed tokens follow the target's distribution exactly.

    Leviathan et al. 2023 (Algorithm 1), and for siblings rejection without replacement (SWIFT, section 3.3): siblings
    are tried in order; ``x`` stands with probability ``min(1, p(x) / q(x))``; on a rejection ``p`` becomes
    ``max(0, p - q)`` renormalised and ``q`` loses ``x`` and is renormalised; with no sibling left the next token is
    drawn from ``p``. Exact if siblings were drawn from ``q`` one after another without replacement, in their order.

    Without ``draft_probs`` the draft is deterministic (prompt lookup, top-k candidates): ``q`` is one-hot at each
    drafted token, so ``x`` stands with probability ``p(x)`` and a rejection takes ``x`` out of ``p``.

    Whether a token is part of the draft must not depend on the token itself: a draft may stop after any token, but a
    drawn token that is dropped for its own low probability makes the result biased.

    Args:
        tree: the draft of ``n`` tokens.
        draft_tokens: long ``[n]``, one token id per node, on the device of the probabilities.
        target_probs: ``[n + 1, vocab]``; row ``row`` is the target's distribution after verification row ``row``.
        uniforms: float64 ``[n + 1]``, independent and uniform in [0, 1), on the same device; entry ``i`` decides the
            trial of node ``i``, the last one draws the next token.
        draft_probs: ``[r, vocab]``, the distributions that the nodes were drawn from, or ``None`` (see above).
        draft_rows: ``[n]``; node ``i`` was drawn from ``draft_probs[draft_rows[i]]``, siblings from the same row.

    Returns:
        The accepted path and the next token, which never has probability zero under the target.
    """
    accept = _accept_chain if tree.is_chain else _accept_tree
    return accept(tree, draft_tokens, target_probs, uniforms, draft_probs, draft_rows)


def _accept_chain(
    tree: TokenTree,
    draft_tokens: torch.Tensor,
    target_probs: torch.Tensor,
    uniforms: torch.Tensor,
    draft_probs: torch.Tensor | None,
    draft_rows: Sequence[int],
) -> Acceptance:
    """All trials of a chain with one transfer to the host; only the row that draws is touched as a whole."""
    length = len(tree)
    steps = torch.arange(length, device=draft_tokens.device)
    target_hit = target_probs[steps, draft_tokens].double()
    if draft_probs is None:
        draft_hit = torch.ones_like(target_hit)
    else:
        origin = torch.tensor(list(draft_rows), dtype=torch.long, device=draft_tokens.device)
        draft_hit = draft_probs[origin, draft_tokens].double()
    # Token ids pass through float64 unharmed, and the host waits once.
    table = torch.stack([draft_tokens.double(), uniforms[:length], target_hit, draft_hit], dim=1).tolist()
    accepted = next((node for node, (_, *trial) in enumerate(table) if not _stands(*trial)), length)
    left = target_probs[accepted].double()
    if accepted < length:
        draft = None if draft_probs is None else draft_probs[draft_rows[accepted]].double()
        left = _residual(left, draft, int(table[accepted][0]))
    committed = [int(token) for token, *_ in table[:accepted]] + [_draw(left, uniforms[length:])]
    return Acceptance(tuple(range(accepted + 1)), tuple(committed))


def _accept_tree(
    tree: TokenTree,
    draft_tokens: torch.Tensor,
    target_probs: torch.Tensor,
    uniforms: torch.Tensor,
    draft_probs: torch.Tensor | None,
    draft_rows: Sequence[int],
) -> Acceptance:
    """Walks from the root to the first sibling that stands, row by row."""
    trials: list[float] = uniforms.tolist()
    tokens: list[int] = draft_tokens.tolist()
    rows = [0]
    while True:
        left = target_probs[rows[-1]].double()
        siblings = tree.children[rows[-1]]
        draft = draft_probs[draft_rows[siblings[0]]].double() if siblings and draft_probs is not None else None
        for node in siblings:
            token = tokens[node]
            draft_hit = 1.0 if draft is None else float(draft[token])
            if _stands(trials[node], float(left[token]), draft_hit):
                rows.append(node + 1)
                break
            left = _residual(left, draft, token)
            draft = None if draft is None else _without(draft, token)
        else:
            committed = [tokens[row - 1] for row in rows[1:]] + [_draw(left, uniforms[len(tree) :])]
            return Acceptance(tuple(rows), tuple(committed))


def _stands(uniform: float, target_hit: float, draft_hit: float) -> bool:
    """Whether a trial with probability ``min(1, p / q)`` succeeds; strict, so that ``p = 0`` fails at ``u = 0`` too."""
    return uniform * draft_hit < target_hit


def _residual(target: torch.Tensor, draft: torch.Tensor | None, token: int) -> torch.Tensor:
    """What is left of the target ``[vocab]`` after ``token`` was rejected, normalised."""
    left = _without(target, token) if draft is None else (target - draft).clamp_(min=0)
    total = left.sum()
    # Nothing is left where p and q are equal up to rounding: a rejection there is itself rounding, and p is right.
    return torch.where(total > 0, left / total, target)


def _without(probs: torch.Tensor, token: int) -> torch.Tensor:
    """``probs`` ``[vocab]`` conditioned on any token but ``token``; zeros if that was the only one."""
    left = probs.clone()
    left[token] = 0
    return left / left.sum().clamp_(min=torch.finfo(left.dtype).tiny)


def _draw(probs: torch.Tensor, uniform: torch.Tensor) -> int:
    """Inverse-CDF draw from float64 ``[vocab]`` (any scale) with ``uniform`` ``[1]``."""
    # A parallel prefix sum may step at an entry that is zero. Summing over the support alone rules such a token out.
    support = probs.nonzero().squeeze(-1)
    cumulative = probs[support].cumsum(-1)
    index = torch.searchsorted(cumulative, uniform * cumulative[-1], right=True).clamp_(max=len(support) - 1)
    return int(support[index])
