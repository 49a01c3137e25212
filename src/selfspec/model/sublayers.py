"""A sublayer of the target: one residual branch, run by transformers' own module."""

import inspect
from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from selfspec.model.families import Branch, Family
from selfspec.model.forward import Forward, Rows
from selfspec.model.rope import Rotation


class Sublayer(ABC):
    """A part of a decoder layer that runs or is skipped: it changes the residual stream.

    Args:
        layer: the decoder layer.
    """

    def __init__(self, layer: nn.Module) -> None:
        self.layer = layer

    @property
    @abstractmethod
    def modules(self) -> list[nn.Module]:
        """The modules that it runs."""

    def parameters(self) -> Iterable[nn.Parameter]:
        """The weights that one run of it reads."""
        for module in self.modules:
            yield from module.parameters()

    def is_current(self) -> bool:
        """Whether it still computes what the model's modules would."""
        return True

    @abstractmethod
    def __call__(self, hidden_states: torch.Tensor, forward: Forward) -> torch.Tensor:
        """The residual stream after it, ``[rows, hidden]``, of that before it."""


class BranchSublayer(Sublayer):
    """One residual branch of a decoder layer: its norms, its module, its multiplier.

    Args:
        layer: the decoder layer.
        spec: names the layer's modules that make up the branch.
        multiplier: scales the branch before it is added to the residual stream.
    """

    def __init__(self, layer: nn.Module, spec: Branch, multiplier: float) -> None:
        super().__init__(layer)
        self.spec = spec
        self.multiplier = multiplier
        self.module: nn.Module = getattr(layer, spec.module)
        self.norm_before, self.norm_after = (_norm(layer, name) for name in (spec.norm_before, spec.norm_after))

    @property
    def modules(self) -> list[nn.Module]:
        """The modules that make up the branch."""
        return [module for module in (self.norm_before, self.module, self.norm_after) if module is not None]

    def __call__(self, hidden_states: torch.Tensor, forward: Forward) -> torch.Tensor:
        """Runs the branch on ``[rows, hidden]`` and adds it to the residual stream."""
        branch = self._branch(hidden_states, forward)
        return hidden_states.to(branch.device) + branch  # hooks of a device_map move what enters the branch

    def _branch(self, hidden_states: torch.Tensor, forward: Forward) -> torch.Tensor:
        """What is added to the residual stream, ``[rows, hidden]``."""
        branch = hidden_states[None]
        if self.norm_before is not None:
            branch = self.norm_before(branch)
        branch = self._run(branch, forward)
        if self.norm_after is not None:
            branch = self.norm_after(branch)
        if self.multiplier != 1.0:
            branch = branch * self.multiplier
        return branch[0]

    def _run(self, hidden_states: torch.Tensor, forward: Forward) -> torch.Tensor:
        """The module's output, ``[1, rows, hidden]``."""
        output: torch.Tensor | tuple[torch.Tensor, ...] = self.module(hidden_states)
        return output[0] if isinstance(output, tuple) else output


def _norm(layer: nn.Module, name: str | None) -> nn.Module | None:
    """A norm of a layer; ``None`` where a config leaves it out."""
    norm: nn.Module | None = getattr(layer, name) if name else None
    return None if type(norm) is nn.Identity else norm


class AttentionSublayer(BranchSublayer):
    """An attention branch: it reads and writes the cache.

    ``window`` has the positions of its sliding window, if any, ``rope`` the layer type of its rope (``None`` if one
    serves all layers); with ``eager`` the module computes attention itself, and takes additive masks.
    """

    def __init__(
        self, layer: nn.Module, family: Family, multiplier: float, *, window: int | None, rope: str | None, eager: bool
    ) -> None:
        super().__init__(layer, family.attention, multiplier)
        self.window, self.rope, self.eager = window, rope, eager
        self.complex_angles = family.complex_angles
        self._writer = _LatentWriter if family.latent else _CacheWriter
        self._cache_name = cache_name(type(self.module))

    def _run(self, hidden_states: torch.Tensor, forward: Forward) -> torch.Tensor:
        """Runs the module once for the rows of each sequence."""
        cosine, sine = forward.rotation(self.rope)

        def run(own: slice, rows: Rows) -> torch.Tensor:
            return self._run_module(hidden_states[:, own], (cosine[:, own], sine[:, own]), rows)

        return forward.by_part(run, dim=1)

    def _run_module(self, hidden_states: torch.Tensor, rotation: Rotation, rows: Rows) -> torch.Tensor:
        output: torch.Tensor = self.module(
            hidden_states=hidden_states,
            position_embeddings=torch.complex(*rotation) if self.complex_angles else rotation,
            attention_mask=rows.mask(
                self.window, hidden_states.dtype, additive=self.eager, causal_kernel=not self.eager
            ),
            **{self._cache_name: self._writer(rows, self.window)},
        )[0]
        return output


def cache_name(module: type[nn.Module]) -> str:
    """What a module of transformers calls its cache: ``cache`` since 5.24."""
    takes = inspect.signature(module.forward).parameters
    return next((name for name in ("cache", "cache_params") if name in takes), "past_key_values")


class _CacheWriter:
    """What transformers' attention gets as its cache: writes the rows, returns the slots that they see."""

    def __init__(self, rows: Rows, window: int | None) -> None:
        self._cache = rows.sequence.cache
        self._start = rows.start
        self._first = rows.first_slot(window)
        self._slots = rows.end - self._first

    def update(
        self, keys: torch.Tensor, values: torch.Tensor, layer_idx: int, *_: Any, **__: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        self._cache.write(layer_idx, self._start, keys, values)
        seen = self._cache.seen(layer_idx, self._first, self._slots)
        return seen[0].to(keys.device), seen[1].to(keys.device)


class _LatentWriter(_CacheWriter):
    """The same for latents and the rotated entries of keys, which are side by side in a row of the cache."""

    def update(
        self, keys: torch.Tensor, values: torch.Tensor, layer_idx: int, *_: Any, **__: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        rows = torch.cat([keys, values], -1)
        self._cache.write(layer_idx, self._start, rows, rows[:0])
        seen = self._cache.seen(layer_idx, self._first, self._slots)[0].to(keys.device)
        return seen[..., : keys.shape[-1]], seen[..., keys.shape[-1] :]
