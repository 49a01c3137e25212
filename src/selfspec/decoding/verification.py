"""The target's one forward over a draft, starting where the draft's states stop being the target's own."""

from collections.abc import Collection

import torch

from selfspec.decoding.draft import Proposal
from selfspec.decoding.request import Request
from selfspec.target.stack import StackOutput, Target


def verify(target: Target, request: Request, proposal: Proposal, capture: Collection[int] = ()) -> StackOutput:
    """Runs the full model over the pending token and the draft.

    Row 0 is the pending token, row ``i + 1`` node ``i`` of the draft's tree. Rows whose states the draft has computed
    already enter at sublayer ``s``; the others catch up first (``methods.md``, section 1, shared prefix).

    Args:
        target: the model.
        request: the request; the rows' keys and values go behind its committed slots.
        proposal: the draft.
        capture: sublayers whose hidden states to return.

    Returns:
        ``h[2L]`` of every row, ``[n + 1, hidden]``, and the captured states.
    """
    tree, state = proposal.tree, request.state
    token_ids = torch.cat([request.pending, proposal.token_ids])
    rows = len(token_ids)
    visible = None if tree.is_chain else tree.visibility(target.device)
    depths = None if tree.is_chain else tree.depths
    everything = target.begin(state, rows, depths=depths, visible=visible)
    if not proposal.shared_states:
        return target.run(target.embed(token_ids), range(target.sublayer_count), everything, capture)

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
    caught_up = target.run(target.embed(token_ids[known:]), range(shared_prefix), late, proposal.shared_states.keys())
    states = {index: torch.cat([shared, caught_up.captured[index]]) for index, shared in proposal.shared_states.items()}
    above = {index for index in capture if index > shared_prefix}
    output = target.run(states[shared_prefix], range(shared_prefix, target.sublayer_count), everything, above)
    below = {index: states[index] for index in capture if index <= shared_prefix}
    return StackOutput(output.hidden_states, {**below, **output.captured})
