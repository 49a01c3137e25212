"""What early exit at any fixed layer and draft length would have done on a text, from one reading of it.

The first ``E`` layers of a draft compute the target's own states while the tokens drafted so far are right, and behind
the first wrong one the round ends. So the draft tokens of layer ``E`` that count are its shadow tokens on the target's
text, and the rounds of ``layerskip`` follow from where those agree with it.
"""

from collections.abc import Iterable, Sequence

import torch

from selfspec.methods.base import Needs
from selfspec.methods.dynamic_exit import shadow_tokens
from selfspec.runtimes.shadow_head import ShadowHead
from selfspec.runtimes.target import Target
from selfspec.types import Generation
from selfspec_lab.experiments.prefilled import prefill_text

_LOGITS_BYTES = 1 << 26


def shadow_matches(target: Target, prompt_ids: Sequence[int], output_ids: Sequence[int]) -> list[list[bool]]:
    """Where each exit layer would have drafted the token that the target wrote.

    Args:
        target: the model.
        prompt_ids: the prompt.
        output_ids: the target's greedy output, at least two tokens.

    Returns:
        For each exit layer from 1 to ``L - 1``, for each token of the output but the first.
    """
    boundaries = range(2, target.sublayer_count + 1, 2)
    needs = Needs(prompt_rows=len(output_ids) - 1, prompt_states=frozenset(boundaries))
    states = prefill_text(target, [*prompt_ids, *output_ids[:-1]], needs).hidden_states
    with torch.inference_mode():
        tokens, _ = shadow_tokens(ShadowHead(target, _LOGITS_BYTES), [states[boundary] for boundary in boundaries])
    written = torch.tensor(output_ids[1:], device=tokens.device)
    matches: list[list[bool]] = (tokens[:-1] == written).tolist()
    return matches


def replay_rounds(matches: Sequence[bool], draft_length: int) -> list[tuple[int, int]]:
    """The rounds of drafts of fixed length by one exit layer.

    Args:
        matches: from ``shadow_matches``, those of the layer.
        draft_length: ``γ``; the last rounds draft no more than what is left to write behind them.

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


def tokens_per_loaded_layer(rounds: Iterable[tuple[int, int, int]], layer_count: int) -> float:
    """DEL's eTPL of one output (appendix B.4): tokens ÷ layers loaded for them, ``1 / L`` in plain decoding.

    Args:
        rounds: of each the layers that drafted, the draft tokens and the tokens committed; at least one.
        layer_count: ``L``, which every verification loads.
    """
    tokens = layers = 0
    for exit_layer, drafted, committed in rounds:
        tokens += committed
        layers += exit_layer * drafted + layer_count
    return tokens / layers


def replayed_tokens_per_layer(
    matches: Sequence[Sequence[bool]], exit_layer: int, draft_length: int, layer_count: int
) -> float:
    """Tokens per loaded layer of a static choice on one output, from its ``shadow_matches``."""
    rounds = replay_rounds(matches[exit_layer - 1], draft_length)
    return tokens_per_loaded_layer([(exit_layer, drafted, accepted + 1) for drafted, accepted in rounds], layer_count)


def generated_tokens_per_layer(generation: Generation, layer_count: int) -> float:
    """Tokens per loaded layer of an output that an early-exit method wrote, of at least two tokens."""
    return tokens_per_loaded_layer(
        [
            (len(record.kept.sublayers) // 2 if record.kept else 0, record.drafted, len(record.token_ids))
            for record in generation.rounds
        ],
        layer_count,
    )
