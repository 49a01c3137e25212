"""Replays early exit at any fixed layer and draft length on a text, from one forward over the text.

While the drafted tokens are right, the first ``E`` layers of a draft compute the target's own states; after the first
wrong token the round ends. So the draft tokens of layer ``E`` that matter are its shadow tokens on the target's text,
and the rounds of ``layerskip`` follow from where these agree with the text.
"""

from collections.abc import Sequence

import torch

from selfspec.methods.api import Needs
from selfspec.methods.dynamic_exit import shadow_tokens
from selfspec.runtimes.shadow_head import ShadowHead
from selfspec_lab.measuring import Target
from selfspec_lab.replay import Played
from selfspec_lab.testing import read_text

_LOGITS_BYTES = 1 << 26


def shadow_matches(target: Target, prompt_ids: Sequence[int], output_ids: Sequence[int]) -> list[list[bool]]:
    """Where each exit layer would have drafted the target's token.

    Args:
        target: the model.
        prompt_ids: the prompt.
        output_ids: the target's greedy output, at least two tokens.

    Returns:
        ``[L - 1][tokens - 1]``: for each exit layer from 1, for each output token after the first.
    """
    boundaries = range(2, target.sublayer_count + 1, 2)
    needs = Needs(prompt_rows=len(output_ids) - 1, prompt_states=frozenset(boundaries))
    states = read_text(target, [*prompt_ids, *output_ids[:-1]], needs)[1].hidden_states
    with torch.inference_mode():
        tokens, _ = shadow_tokens(ShadowHead(target, _LOGITS_BYTES), [states[boundary] for boundary in boundaries])
    written = torch.tensor(output_ids[1:], device=tokens.device)
    matches: list[list[bool]] = (tokens[:-1] == written).tolist()
    return matches


def replay_rounds(matches: Sequence[bool], draft_length: int) -> list[tuple[int, int]]:
    """The rounds of drafts of fixed length by one exit layer.

    Args:
        matches: the row of ``shadow_matches`` for the layer.
        draft_length: ``γ``; the last rounds draft at most the tokens that are left, minus one.

    Returns:
        Drafted and accepted tokens of each round.
    """
    rounds, written = [], 0
    while written < len(matches):
        drafted = min(draft_length, len(matches) - written - 1)
        accepted = 0
        while accepted < drafted and matches[written + accepted]:
            accepted += 1
        rounds.append((drafted, accepted))
        written += accepted + 1
    return rounds


def static_rounds(matches: Sequence[Sequence[bool]], exit_layer: int, draft_length: int, layers: int) -> list[Played]:
    """The rounds of a static choice on one output, from its ``shadow_matches``, to replay with a cost model."""
    share = exit_layer / layers
    return [
        Played(share, share, drafted, drafted + 1, accepted + 1)
        for drafted, accepted in replay_rounds(matches[exit_layer - 1], draft_length)
    ]
