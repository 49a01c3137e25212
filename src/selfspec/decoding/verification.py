"""The target's one forward over a draft, starting where the draft's states stop being the target's own."""

from collections.abc import Collection
from typing import Any

import torch

from selfspec.decoding.draft import Proposal
from selfspec.decoding.fused_selection import Rider
from selfspec.decoding.request import Request
from selfspec.runtimes.target import StackOutput, Target


def verify(
    target: Target,
    request: Request,
    proposal: Proposal,
    capture: Collection[int] = (),
    rider: Rider[Any] | None = None,
) -> StackOutput:
    """Runs the full model over the pending token and the draft.

    Row 0 is the pending token, row ``i + 1`` node ``i`` of the draft's tree. Rows whose states the draft has computed
    already enter at sublayer ``s``; the others catch up first (``methods.md``, section 1, shared prefix).

    Args:
        target: the model.
        request: the request; the rows' keys and values go behind its committed slots.
        proposal: the draft.
        capture: sublayers whose hidden states to return.
        rider: a selection whose rows go along.

    Returns:
        ``h[2L]`` of every row, ``[n + 1, hidden]``, and the captured states.
    """
    tree, state = proposal.tree, request.state
    through = None if rider is None else rider.through
    token_ids = torch.cat([request.pending, proposal.token_ids])
    rows = len(token_ids)
    visible = None if tree.is_chain else tree.visibility(target.device)
    depths = None if tree.is_chain else tree.depths
    everything = target.begin(state, rows, depths=depths, visible=visible)
    if not proposal.shared_states:
        return target.run(target.embed(token_ids), range(target.sublayer_count), everything, capture, through=through)

    shared_prefix = proposal.shared_prefix
    known = len(proposal.shared_states[shared_prefix])
    late = target.begin(
        state,
        rows - known,
        start=state.cache.length + known,
        prefix=state.cache.length if visible is not None else None,
        depths=None if depths is None else depths[known:],
        visible=None if visible is None else visible[known:],
    )
    late_ids, shared = token_ids[known:], proposal.shared_states
    caught_up = target.run(target.embed(late_ids), range(shared_prefix), late, shared.keys(), through=through)
    states = {index: torch.cat([drafted, caught_up.captured[index]]) for index, drafted in shared.items()}
    above = {index for index in capture if index > shared_prefix}
    rest = range(shared_prefix, target.sublayer_count)
    output = target.run(states[shared_prefix], rest, everything, above, through=through)
    below = {index: states[index] for index in capture if index <= shared_prefix}
    return StackOutput(output.hidden_states, {**below, **output.captured})
