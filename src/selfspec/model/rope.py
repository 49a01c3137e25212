"""Rotary position embeddings of a target, without touching the model's own module."""

import copy
from typing import Any

import torch
from torch import nn

from selfspec.errors import ContextLengthError

Rotation = Any
"""What an attention module takes as ``position_embeddings``: a pair of cosine and sine."""

Turn = tuple[torch.Tensor, torch.Tensor]
"""Cosine and sine, the sine negative in the first half: ``x * cosine + swap_halves(x) * sine`` rotates ``x``."""

_FIXED_TYPES = frozenset({"default", "linear", "llama3", "yarn"})
"""Rope types whose rotation of a position never changes, so that it can be looked up."""

_TABLE_STEP = 256


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
        types = getattr(rotary, "rope_type", None)
        self._is_fixed = set(types.values() if isinstance(types, dict) else [types]) <= _FIXED_TYPES
        self._table: dict[str | None, Turn] = {}
        self._reserved = 0

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

    def reserve(self, hidden_states: torch.Tensor, length: int) -> None:
        """Looks the rotations of ``length`` positions up ahead, where they are fixed, so that rounds only slice them.

        Args:
            hidden_states: any tensor with the model's dtype and device.
            length: number of positions, from 0 on.
        """
        if length <= self._reserved or not self._is_fixed:
            return
        # Requests of much the same length share a table. A longer one replaces it at once, for other threads too.
        positions = torch.arange(-(-length // _TABLE_STEP) * _TABLE_STEP, device=hidden_states.device)
        self._table = self._turns(hidden_states, positions, long=False)
        self._reserved = len(positions)

    def turns(
        self, hidden_states: torch.Tensor, positions: torch.Tensor, first: int | None, *, long: bool
    ) -> dict[str | None, Turn]:
        """Rotations of the given positions, for the fused attention.

        Args:
            hidden_states: any tensor with the model's dtype and device.
            positions: long ``[rows]``.
            first: the first of them if they are consecutive, else ``None``.
            long: take the long frequencies.

        Returns:
            By layer type the pair of cosine and signed sine, ``[rows, 1, dim]``.
        """
        if not self._is_fixed:
            return self._turns(hidden_states, positions, long=long)
        table, rows = self._table, positions.shape[0]
        if first is None:
            return {kind: (cosine[positions], sine[positions]) for kind, (cosine, sine) in table.items()}
        return {
            kind: (cosine.narrow(0, first, rows), sine.narrow(0, first, rows)) for kind, (cosine, sine) in table.items()
        }

    def _turns(self, hidden_states: torch.Tensor, positions: torch.Tensor, *, long: bool) -> dict[str | None, Turn]:
        rotations = self.rotations(hidden_states, positions, long=long)
        return {kind: (cosine[0, :, None], _signed(sine[0, :, None])) for kind, (cosine, sine) in rotations.items()}

    def _rotate(self, hidden_states: torch.Tensor, positions: torch.Tensor, long: bool, *layer_type: str) -> Rotation:
        if not long:
            return self._short(hidden_states, positions[None], *layer_type)
        assert self._long is not None
        assert self._switch_length is not None
        # The module picks its frequencies by the largest position of the call: one past the switch forces the choice.
        sentinel = positions.new_tensor([self._switch_length])
        cosine, sine = self._long(hidden_states, torch.cat([positions, sentinel])[None], *layer_type)
        return cosine[:, :-1], sine[:, :-1]


def _signed(sine: torch.Tensor) -> torch.Tensor:
    first, second = sine.chunk(2, dim=-1)
    return torch.cat([-first, second], dim=-1)
