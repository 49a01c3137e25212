"""The target's one forward over the drafts of all sequences, from where their states stop being the target's own."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch

from selfspec.decoding.context import Context
from selfspec.decoding.fused_selection import FusedRun, FusedSelection
from selfspec.decoding.proposal import Proposal
from selfspec.model.forward import Forward
from selfspec.runtimes.chain import ChainRows
from selfspec.runtimes.logits import Logits
from selfspec.runtimes.target import Target


@dataclass(frozen=True)
class Verified:
    """What the verification of a draft gave.

    Attributes:
        logits: of its rows.
        captured: by sublayer the watched states, ``[n + 1, hidden]``.
    """

    logits: Logits
    captured: Mapping[int, torch.Tensor] = field(default_factory=dict)


def verify_chains(target: Target, contexts: Sequence[Context], proposals: Sequence[Proposal]) -> list[Verified] | None:
    """Runs the full model as ``verify`` does, where all drafts are chains without shared states and all runs natively.

    Args:
        target: the model.
        contexts: of each sequence.
        proposals: of each sequence, the draft.

    Returns:
        For each sequence the logits of its rows; ``None`` if ``verify`` has to be called.
    """
    counts = [1 + len(proposal.tree) for proposal in proposals]
    chains = all(proposal.tree.is_chain and not proposal.shared_states for proposal in proposals)
    if not chains or not target.takes_chains(max(counts)):
        return None
    rows = [
        ChainRows(context.state, (context.pending_id, *proposal.host_ids), context.drawing)
        for context, proposal in zip(contexts, proposals, strict=True)
    ]
    return [Verified(logits) for logits in target.verify_chains(rows).split(counts)]


def verify(
    target: Target,
    contexts: Sequence[Context],
    proposals: Sequence[Proposal],
    watched: Sequence[Collection[int]],
    selections: Iterable[FusedSelection[Any]] = (),
) -> list[Verified]:
    """Runs the full model over the pending tokens and the drafts.

    Row 0 of a sequence is its pending token, row ``i + 1`` node ``i`` of its draft's tree. Rows whose states the draft
    has computed already enter at sublayer ``s``, the shared prefix; the others run the sublayers before it.

    Args:
        target: the model.
        contexts: of each sequence; the rows' keys and values go to the slots after the committed ones.
        proposals: of each sequence, the draft.
        watched: of each sequence, sublayers whose hidden states to return.
        selections: of some of these sequences, whose rows go along.

    Returns:
        For each sequence the logits of its rows and the watched states.
    """
    run = FusedRun(target, selections)
    parts = [_Part(target, *each) for each in zip(contexts, proposals, watched, strict=True)]
    last, logits = target.sublayer_count, None
    borders = sorted({0, last, *(part.shared_prefix for part in parts)})
    for first, end in pairwise(borders):
        for part in parts:
            part.enter(first)
        capture = {index for part in parts for index in part.wanted(first, end)}
        forward = parts[0].forward if len(parts) == 1 else Forward.join([part.forward for part in parts])
        states = parts[0].states if len(parts) == 1 else torch.cat([part.states for part in parts])
        # A draft with all sublayers has computed its rows to the end, which are added there.
        scored = end == last and all(part.shared_prefix < last for part in parts)
        output = run(states, range(first, end), forward, capture, logits=scored)
        logits = output.logits
        if len(parts) == 1:
            parts[0].take(output.hidden_states, output.captured)
            continue
        counts = [len(part.states) for part in parts]
        captured = {index: torch.split(rows, counts) for index, rows in output.captured.items()}
        for place, (part, states) in enumerate(zip(parts, torch.split(output.hidden_states, counts), strict=True)):
            part.take(states, {index: captured[index][place] for index in part.wanted(first, end)})
    for part in parts:
        part.enter(last)
    counts = [len(part.states) for part in parts]
    if logits is None:
        logits = Logits(target.logits(torch.cat([part.states for part in parts]), max(counts)))
    each = zip(parts, logits.split(counts), strict=True)
    return [Verified(own, part.captured) for part, own in each]


class _Part:
    """The rows of one sequence on their way through the sublayers."""

    def __init__(self, target: Target, context: Context, proposal: Proposal, watched: Collection[int]) -> None:
        tree, length = proposal.tree, context.cache.length
        token_ids = torch.cat([context.pending, proposal.token_ids]) if len(tree) else context.pending
        visible = None if tree.is_chain else tree.visibility(target.device)
        depths = None if tree.is_chain else tree.depths
        self._whole = target.lay_out(
            context.state, len(token_ids), depths=depths, visible=visible, drawing=context.drawing
        )
        self._shared = proposal.shared_states
        self._watched = frozenset(watched)
        self.shared_prefix = proposal.shared_prefix if self._shared else 0
        self.captured: dict[int, torch.Tensor] = {}
        if not self._shared:
            self.forward, self.states = self._whole, target.embed(token_ids)
            return
        known = len(self._shared[self.shared_prefix])
        self.states = target.embed(token_ids[known:])
        self.forward = target.lay_out(
            context.state,
            len(token_ids) - known,
            start=length + known,
            prefix=None if visible is None else length,
            depths=None if depths is None else depths[known:],
            visible=None if visible is None else visible[known:],
        )

    def wanted(self, first: int, end: int) -> set[int]:
        """Sublayers of ``first`` to ``end`` whose states to capture; the first was the last of the range before."""
        wanted = self._watched | (self._shared.keys() if first < self.shared_prefix else frozenset())
        return {index for index in wanted if first < index <= end or index == first == 0}

    def take(self, states: torch.Tensor, captured: dict[int, torch.Tensor]) -> None:
        """Takes what a range of sublayers gave."""
        self.states = states
        self.captured.update(captured)

    def enter(self, sublayer: int) -> None:
        """Adds the rows that the draft has computed, where this sublayer is the end of the shared prefix."""
        if not self._shared or sublayer != self.shared_prefix:
            return
        states = {index: torch.cat([rows, self.captured[index]]) for index, rows in self._shared.items()}
        self.forward, self.states = self._whole, states[sublayer]
        self.captured = {index: states[index] for index in self._watched & states.keys()}
