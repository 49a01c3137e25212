"""Rotary position embeddings of a target, without touching the model's own module."""

import copy
from typing import Any

import torch
from torch import nn

from selfspec.errors import ContextLengthError

Rotation = Any
"""What an attention module takes as ``position_embeddings``: a pair of cosine and sine."""


class Rope:
    """Computes the rotations of positions with a private copy of the model's rotary module.

    transformers' dynamic rope types rewrite the module's frequencies during a forward. The copy keeps the model
    unchanged, and a second copy, for long sequences only, keeps concurrent requests of different length apart.

    Args:
        rotary: the model's rotary embedding module.
        layer_types: the layer types that have a rope of their own, or empty where one rope serves all layers.
        switch_length: longest sequence that takes the short frequencies (``longrope``), or ``None``.
    """

    def __init__(self, rotary: nn.Module, layer_types: tuple[str, ...], switch_length: int | None) -> None:
        self._short = copy.deepcopy(rotary)
        self._long = copy.deepcopy(rotary) if switch_length is not None else None
        self._layer_types = layer_types
        self._switch_length = switch_length

    def is_long(self, prompt_length: int, last_length: int) -> bool:
        """Whether a request takes the long frequencies.

        Args:
            prompt_length: tokens of the prompt.
            last_length: tokens that have gone through the model at the end.

        Raises:
            ContextLengthError: the request would pass the switch half-way, where every key would have to be recomputed.
        """
        if self._switch_length is None or last_length <= self._switch_length:
            return False
        if prompt_length <= self._switch_length:
            raise ContextLengthError(
                f"a prompt of {prompt_length} tokens growing to {last_length} crosses this model's rope switch at "
                f"{self._switch_length} tokens; ask for at most {self._switch_length - prompt_length + 1} new tokens"
            )
        return True

    def rotations(
        self, hidden_states: torch.Tensor, positions: torch.Tensor, *, long: bool
    ) -> dict[str | None, Rotation]:
        """Rotations of the given positions.

        Args:
            hidden_states: any tensor with the model's dtype and device.
            positions: long ``[rows]``.
            long: take the long frequencies.

        Returns:
            By layer type (``None`` where one rope serves all layers) the pair of cosine and sine, ``[1, rows, dim]``.
        """
        if not self._layer_types:
            return {None: self._rotate(hidden_states, positions, long)}
        return {kind: self._rotate(hidden_states, positions, long, kind) for kind in self._layer_types}

    def _rotate(self, hidden_states: torch.Tensor, positions: torch.Tensor, long: bool, *layer_type: str) -> Rotation:
        if not long:
            return self._short(hidden_states, positions[None], *layer_type)
        assert self._long is not None
        assert self._switch_length is not None
        # The module picks its frequencies by the largest position of the call: one past the switch forces the choice.
        sentinel = positions.new_tensor([self._switch_length])
        cosine, sine = self._long(hidden_states, torch.cat([positions, sentinel])[None], *layer_type)
        return cosine[:, :-1], sine[:, :-1]
