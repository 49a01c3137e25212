"""A sublayer of the target: one residual branch, run by transformers' own module. The oracle of the fused blocks."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from selfspec.model.cache import KeyValueCache
from selfspec.model.families import Branch
from selfspec.model.masks import Layout
from selfspec.model.rope import Rope, Rotation, Turn


@dataclass
class SequenceState:
    """The state of one request inside the target: its cache and which rope frequencies it takes."""

    cache: KeyValueCache
    long_rope: bool = False


@dataclass
class Step:
    """One forward in progress: the layout of its rows, with rope and masks computed once for all sublayers.

    Attributes:
        sequence: the request.
        layout: where its rows stand and what they see.
        rope: gives the rotations of their positions.
        like: any tensor with the model's dtype and device.
        first_position: position of the first row where the rows' positions are consecutive, else ``None``.
    """

    sequence: SequenceState
    layout: Layout
    rope: Rope
    like: torch.Tensor
    first_position: int | None = None
    _rotations: dict[str | None, Rotation] = field(default_factory=dict)
    _turns: dict[str | None, Turn] = field(default_factory=dict)

    def rotation(self, kind: str | None) -> Rotation:
        """What transformers' attention takes as ``position_embeddings``, for a layer type."""
        if not self._rotations:
            long = self.sequence.long_rope
            self._rotations = self.rope.rotations(self.like, self.layout.positions, long=long)
        return self._rotations[kind]

    def turn(self, kind: str | None) -> Turn:
        """Cosine and signed sine, ``[rows, 1, dim]`` each, as the fused attention takes them, for a layer type."""
        return (self._turns or self.turns())[kind]

    def turns(self) -> dict[str | None, Turn]:
        """What ``turn`` gives, by layer type."""
        if not self._turns:
            self._turns = self.rope.turns(
                self.like, self.layout.positions, self.first_position, long=self.sequence.long_rope
            )
        return self._turns

    def joined(self, other: "Step") -> "Step":
        """This forward and another of the same sequence as one, whose rows do not see each other's.

        Args:
            other: its slots follow on this one's.
        """
        return Step(self.sequence, self.layout.joined(other.layout), self.rope, self.like)


class _CacheWriter:
    """What transformers' attention gets as ``past_key_values``: writes the rows of a step, returns what they see."""

    def __init__(self, step: Step, window: int | None) -> None:
        self._cache = step.sequence.cache
        self._start = step.layout.start
        self._first = step.layout.first_slot(window)
        self._slots = step.layout.end - self._first

    def update(
        self, keys: torch.Tensor, values: torch.Tensor, layer_idx: int, *_: Any, **__: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        self._cache.write(layer_idx, self._start, keys, values)
        return self._cache.seen(layer_idx, self._first, self._slots)


class Sublayer:
    """One residual branch of a decoder layer: its norms, its module, its multiplier."""

    def __init__(self, layer: nn.Module, branch: Branch, multiplier: float) -> None:
        self.module: nn.Module = getattr(layer, branch.module)
        self.norm_before: nn.Module | None = getattr(layer, branch.norm_before) if branch.norm_before else None
        self.norm_after: nn.Module | None = getattr(layer, branch.norm_after) if branch.norm_after else None
        self.multiplier = multiplier

    @property
    def modules(self) -> list[nn.Module]:
        """The modules that make up the branch."""
        return [module for module in (self.norm_before, self.module, self.norm_after) if module is not None]

    def parameters(self) -> Iterable[nn.Parameter]:
        """The weights that one run of this branch reads."""
        for module in self.modules:
            yield from module.parameters()

    def is_current(self) -> bool:
        """Whether it still computes what the model's modules would."""
        return True

    def __call__(self, hidden_states: torch.Tensor, step: Step) -> torch.Tensor:
        """Runs the branch and adds it to the residual stream, ``[rows, hidden]`` in and out."""
        return hidden_states + self._branch(hidden_states, step)

    def _branch(self, hidden_states: torch.Tensor, step: Step) -> torch.Tensor:
        branch = hidden_states[None]
        if self.norm_before is not None:
            branch = self.norm_before(branch)
        branch = self._run(branch, step)
        if self.norm_after is not None:
            branch = self.norm_after(branch)
        if self.multiplier != 1.0:
            branch = branch * self.multiplier
        return branch[0]

    def _run(self, hidden_states: torch.Tensor, step: Step) -> torch.Tensor:
        output: torch.Tensor | tuple[torch.Tensor, ...] = self.module(hidden_states)
        return output[0] if isinstance(output, tuple) else output


class AttentionSublayer(Sublayer):
    """An attention branch: it reads and writes the cache."""

    def __init__(
        self, layer: nn.Module, branch: Branch, multiplier: float, *, window: int | None, rope: str | None, eager: bool
    ) -> None:
        super().__init__(layer, branch, multiplier)
        self.window = window
        self.rope = rope
        self.eager = eager

    def _run(self, hidden_states: torch.Tensor, step: Step) -> torch.Tensor:
        mask = step.layout.mask(self.window, hidden_states.dtype, additive=self.eager, causal_kernel=not self.eager)
        output: torch.Tensor = self.module(
            hidden_states=hidden_states,
            position_embeddings=step.rotation(self.rope),
            attention_mask=mask,
            past_key_values=_CacheWriter(step, self.window),
        )[0]
        return output
