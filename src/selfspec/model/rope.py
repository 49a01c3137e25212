"""Rotary position embeddings of a target, without touching the model's own module."""

import copy
import threading
from typing import Any

import torch
from torch import nn

from selfspec.errors import ContextLengthError

Rotation = Any
"""Cosine and sine, ``[1, rows, dim]`` each: transformers' ``position_embeddings``."""

CosSin = tuple[torch.Tensor, torch.Tensor]
"""Cosine and signed sine, ``[rows, 1, dim]`` each, in the order of a head's entries. The sine is negative for the first
of two entries that rotate against each other, so that ``x * cosine + swap(x) * sine`` rotates ``x``."""

_FIXED_TYPES = frozenset({"default", "linear", "llama3", "yarn", "ntk_alpha"})
"""Rope types whose rotation of a position never changes, so that a table can hold it."""

_TABLE_STEP = 256


class Rope:
    """Computes the rotations of positions with a private copy of the model's rotary module.

    transformers' dynamic rope types rewrite the module's frequencies during a forward. With a copy the model stays
    unchanged. A second copy serves long sequences only, so that concurrent requests of different length do not
    interfere.

    Args:
        rotary: the model's rotary embedding module.
        layer_types: the layer types that have a rope of their own, or empty where one rope serves all layers.
        switch_length: longest sequence that takes the short frequencies (``longrope``), or ``None``.
        neighbours: neighbouring entries of a head rotate against each other, not its halves.
        once: the module gives each angle once, not for both entries that it rotates.

    Attributes:
        is_fixed: the rotation of a position never changes, so that it is read from a table.
        is_stateless: it depends on nothing but the position and on whether the frequencies are the long ones.
        tables: if fixed, the rotations of all reserved positions by layer type: cosine and signed sine, ``[positions,
            1, dim]`` each.
    """

    def __init__(
        self,
        rotary: nn.Module,
        layer_types: tuple[str, ...],
        switch_length: int | None,
        *,
        neighbours: bool = False,
        once: bool = False,
    ) -> None:
        self._repeats = 2 if once else 1
        self._order = _as_neighbours if neighbours else lambda halves: halves
        self._short = copy.deepcopy(rotary)
        self._long = copy.deepcopy(rotary) if switch_length is not None else None
        self._layer_types = layer_types
        self._switch_length = switch_length
        types = getattr(rotary, "rope_type", None)
        self.is_fixed = set(types.values() if isinstance(types, dict) else [types]) <= _FIXED_TYPES
        self.is_stateless = self.is_fixed or switch_length is not None
        self.tables: dict[str | None, CosSin] = {}
        self._reserved = 0
        self._reserving = threading.Lock()

    def is_long(self, prompt_length: int, last_length: int) -> bool:
        """Whether a request uses the long frequencies, given the length of its prompt and its length at the end.

        Raises:
            ContextLengthError: the request would cross the switch, which would need every key to be recomputed.
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
        """Rotations of positions, long ``[rows]``, with the dtype and device of ``hidden_states``.

        Returns:
            Cosine and sine, ``[1, rows, dim]`` each, by layer type (``None`` if one rope serves all layers).
        """
        if not self._layer_types:
            return {None: self._rotate(hidden_states, positions, long)}
        return {kind: self._rotate(hidden_states, positions, long, kind) for kind in self._layer_types}

    def reserve(self, hidden_states: torch.Tensor, length: int) -> None:
        """Computes the table for positions below ``length``, if rotations are fixed, so that forwards only slice it."""
        if length <= self._reserved or not self.is_fixed:
            return
        # Requests of similar length share a table. A longer one replaces it in one assignment, since threads share it.
        with self._reserving:
            if length <= self._reserved:
                return
            positions = torch.arange(-(-length // _TABLE_STEP) * _TABLE_STEP, device=hidden_states.device)
            self.tables = self.turns(hidden_states, positions, long=False)
            self._reserved = len(positions)

    def turns(self, hidden_states: torch.Tensor, positions: torch.Tensor, *, long: bool) -> dict[str | None, CosSin]:
        """As ``rotations``, for the fused attention: cosine and signed sine, ``[rows, 1, dim]`` each, by layer type."""
        rotations = self.rotations(hidden_states, positions, long=long)
        return {
            kind: (self._order(self._both(cosine)), self._order(_signed(self._both(sine))))
            for kind, (cosine, sine) in rotations.items()
        }

    def _both(self, values: torch.Tensor) -> torch.Tensor:
        """Values ``[1, rows, ...]`` for both halves of what is rotated, ``[rows, 1, dim]``."""
        return values[0, :, None].repeat(1, 1, self._repeats) if self._repeats > 1 else values[0, :, None]

    def _rotate(self, hidden_states: torch.Tensor, positions: torch.Tensor, long: bool, *layer_type: str) -> Rotation:
        if not long:
            return _pair(self._short(hidden_states, positions[None], *layer_type))
        assert self._long is not None
        assert self._switch_length is not None
        # The module picks its frequencies by the largest position of the call: one past the switch forces the choice.
        sentinel = positions.new_tensor([self._switch_length])
        cosine, sine = self._long(hidden_states, torch.cat([positions, sentinel])[None], *layer_type)
        return cosine[:, :-1], sine[:, :-1]


class OwnRope(Rope):
    """The rope of a model whose own forward rotates.

    Args:
        is_stateless: equal positions are always rotated alike.
    """

    def __init__(self, *, is_stateless: bool) -> None:
        super().__init__(nn.Identity(), (), None)
        self.is_stateless = is_stateless


def _pair(rotation: Rotation | torch.Tensor) -> Rotation:
    """Cosine and sine of what a rotary module gives: these, or complex numbers."""
    return (rotation.real, rotation.imag) if isinstance(rotation, torch.Tensor) else rotation


def _as_neighbours(halves: torch.Tensor) -> torch.Tensor:
    """Entries of two halves in turns."""
    return torch.stack(halves.chunk(2, dim=-1), dim=-1).flatten(-2)


def _signed(sine: torch.Tensor) -> torch.Tensor:
    first, second = sine.chunk(2, dim=-1)
    return torch.cat([-first, second], dim=-1)
