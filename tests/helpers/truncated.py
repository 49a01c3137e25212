"""A model's first layers as models of their own: what an early exit predicts, computed without selfspec."""

import copy
import functools

import torch
from transformers import PreTrainedModel

from helpers.models import LAYERS, build


@functools.cache
def truncated(name: str, layers: int) -> PreTrainedModel:
    """A model of its own: the first layers of a variant, its final norm and its head."""
    with torch.inference_mode(False):
        model = copy.deepcopy(build(name))
    model.model.layers = model.model.layers[:layers]
    model.config.num_hidden_layers = layers
    return model


def predictions(name: str, token_ids: list[int]) -> list[list[tuple[int, float]]]:
    """For every exit layer (the model itself last) and position the greedy token and its probability."""
    return [predictions_of(name, layers, token_ids) for layers in range(1, LAYERS + 1)]


@torch.no_grad()
def predictions_of(name: str, layers: int, token_ids: list[int]) -> list[tuple[int, float]]:
    """The same for one exit layer."""
    best = truncated(name, layers)(torch.tensor([token_ids])).logits[0].float().softmax(-1).max(-1)
    return list(zip(best.indices.tolist(), best.values.tolist(), strict=True))
