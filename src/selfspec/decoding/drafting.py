"""How a draft comes about: from a kept set of sublayers, from given tokens, or not at all."""

from collections.abc import Collection

import torch

from selfspec.decoding.draft import Draft, LayerDraft, Proposal, TokenDraft
from selfspec.decoding.request import Request
from selfspec.decoding.tree import ROOT, TokenTree
from selfspec.target.stack import Target


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
        return _LayerDrafting(target, request, draft, capture).run(limit)
    if isinstance(draft, TokenDraft):
        return _given_tokens(request, draft)
    return empty_proposal(request)


def empty_proposal(request: Request) -> Proposal:
    """No draft at all: the round becomes one step of plain decoding."""
    return Proposal(request.pending[:0], TokenTree(()))


class _LayerDrafting:
    """One draft in progress: a path extended token by token, with sibling candidates beside it."""

    def __init__(self, target: Target, request: Request, draft: LayerDraft, capture: Collection[int]) -> None:
        self.target = target
        self.request = request
        self.draft = draft
        self.shared_prefix = draft.kept.shared_prefix
        self.capture = {self.shared_prefix} | {index for index in capture if index < self.shared_prefix}
        self.candidates: list[torch.Tensor] = []
        self.scores: list[torch.Tensor] = []
        self.confidences: list[float] = []
        self.states: dict[int, list[torch.Tensor]] = {index: [] for index in self.capture}

    def run(self, limit: int) -> Proposal:
        current = self.request.pending
        for step in range(limit):
            logits = self._forward(current, step)
            candidates, stop = self._choose(logits, step)
            self.candidates.append(candidates)
            current = candidates[:1]
            if stop:
                break
            self.request.note_draft(step, current)
        return self._proposal()

    def _forward(self, token: torch.Tensor, step: int) -> torch.Tensor:
        """One draft step: ``[1]`` token to ``[1, vocab]`` logits; keys and values go behind the committed slots."""
        start = self.request.state.cache.length + step
        forward = self.target.begin(self.request.state, 1, start=start)
        capture = self.capture if self.shared_prefix else ()
        output = self.target.run(self.target.embed(token), self.draft.kept.sublayers, forward, capture)
        for index, hidden_states in output.captured.items():
            self.states[index].append(hidden_states)
        return self.target.logits(output.hidden_states)

    def _choose(self, logits: torch.Tensor, step: int) -> tuple[torch.Tensor, bool]:
        """The candidates at this position, best first, and whether the draft ends here."""
        request, draft = self.request, self.draft
        scores = request.processor(logits, lambda _: request.path_context(step))
        if request.rule.needs_draft_probs:
            # Whatever a draft computes, its probabilities have to be numbers for the acceptance to be exact.
            scores = scores.nan_to_num(nan=0.0, neginf=-torch.inf)
            self.scores.append(scores)
        width, stop = 1, False
        if draft.stop is not None or draft.widths is not None:
            confidence = float(torch.softmax(logits[0].float(), dim=-1).amax())
            self.confidences.append(confidence)
            stop = draft.stop is not None and draft.stop.stops(confidence)
            width = 1 if draft.widths is None else max(1, draft.widths(confidence))
        return request.rule.candidates(scores[0], request.length + step, width), stop

    def _proposal(self) -> Proposal:
        path_length = len(self.candidates)
        parents = list(range(ROOT, path_length - 1))
        tokens = [candidates[:1] for candidates in self.candidates]
        room = self.request.sibling_room
        for position, candidates in enumerate(self.candidates):
            siblings = candidates[1 : 1 + room]
            parents += [position - 1] * len(siblings)
            tokens.append(siblings)
            room -= len(siblings)
        return Proposal(
            token_ids=torch.cat(tokens),
            tree=TokenTree(tuple(parents)),
            scores=torch.cat(self.scores) if self.scores else None,
            confidences=tuple(self.confidences),
            shared_prefix=self.shared_prefix,
            shared_states={index: torch.cat(rows) for index, rows in self.states.items() if rows},
        )


def _given_tokens(request: Request, draft: TokenDraft) -> Proposal:
    """Tokens found elsewhere, without those too deep to be committed, and no more than the cache has slots for."""
    deepest = request.draft_limit
    depths = draft.tree.depths[1:]
    kept = [node for node, depth in enumerate(depths) if depth <= deepest][: deepest + request.sibling_room]
    index_of = {ROOT: ROOT} | {node: index for index, node in enumerate(kept)}
    tokens = [draft.token_ids[node] for node in kept]
    tree = TokenTree(tuple(index_of[draft.tree.parents[node]] for node in kept))
    return Proposal(torch.tensor(tokens, dtype=torch.long, device=request.pending.device), tree)
