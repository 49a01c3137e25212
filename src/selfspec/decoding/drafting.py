"""How a draft comes about: from a kept set of sublayers, from given tokens, or not at all."""

from collections.abc import Collection

from selfspec.decoding.draft import Draft, LayerDraft, Proposal, TokenDraft
from selfspec.decoding.layer_drafting import LayerDrafting
from selfspec.decoding.request import Request
from selfspec.model import transfer
from selfspec.runtimes.target import Target
from selfspec.sampling.tree import ROOT, TokenTree


def propose(target: Target, request: Request, draft: Draft, capture: Collection[int]) -> Proposal:
    """Carries a draft out.

    Args:
        target: the model.
        request: the request, whose pending token the draft continues.
        draft: what drafts.
        capture: sublayers whose hidden states the method will want of this round.

    Returns:
        The tokens to verify, never more than the request may still commit.
    """
    if isinstance(draft, LayerDraft) and (limit := min(draft.limit, request.draft_limit)) > 0:
        return LayerDrafting(target, request, draft, capture).run(limit)
    if isinstance(draft, TokenDraft):
        return _given_tokens(request, draft)
    return empty_proposal(request)


def empty_proposal(request: Request) -> Proposal:
    """No draft at all: the round becomes one step of plain decoding."""
    return Proposal(request.pending[:0], TokenTree(()))


def _given_tokens(request: Request, draft: TokenDraft) -> Proposal:
    """Tokens found elsewhere, without those too deep to be committed, and no more than the cache has slots for."""
    deepest = request.draft_limit
    depths = draft.tree.depths[1:]
    kept = [node for node, depth in enumerate(depths) if depth <= deepest][: deepest + request.sibling_room]
    index_of = {ROOT: ROOT} | {node: index for index, node in enumerate(kept)}
    tokens = [draft.token_ids[node] for node in kept]
    tree = TokenTree(tuple(index_of[draft.tree.parents[node]] for node in kept))
    return Proposal(transfer.send(tokens, request.pending.device), tree)
