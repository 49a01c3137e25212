"""SWIFT's matchness, slowly: one forward for every token of the window."""

import torch

from helpers.models import SUBLAYERS
from selfspec.model.kept import KeptSet
from selfspec.runtimes.target import Target


@torch.inference_mode()
def matchness_from_scratch(model: Target, token_ids: list[int], kept: KeptSet, window: int) -> float:
    """Every token of the window on its own: the target reads what is before the window, the candidate the rest."""
    matches, start = 0, len(token_ids) - window - 1
    for position in range(start, len(token_ids) - 1):
        sequence = model.new_sequence(start, capacity=position + 1, last_length=position + 1)
        ids = torch.tensor(token_ids[: position + 1])
        if start:
            model.run(model.embed(ids[:start]), range(SUBLAYERS), model.lay_out(sequence, start))
            sequence.cache.commit(range(start))
        step = model.lay_out(sequence, position + 1 - start)
        hidden_states = model.run(model.embed(ids[start:]), kept.sublayers, step).hidden_states
        matches += int(model.logits(hidden_states)[-1].argmax()) == token_ids[position + 1]
    return matches / window
