"""Seconds of the parts of a forward: attention by context, MLP, head and embedding."""

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from itertools import accumulate
from typing import Any

import torch

from selfspec.model.cache import KeyValueCache
from selfspec.model.forward import SequenceState
from selfspec.model.kept import KeptSet
from selfspec.runtimes.accelerators import device_name
from selfspec.runtimes.precision import Precision
from selfspec.runtimes.target import Target
from selfspec.timing import interleaved_samples

LONGEST_CONTEXT = 4096
"""Longest context at which attention is measured, in tokens; beyond it the fitted line is extrapolated."""

_REPEATS = 7
_BUFFERS = 2


@dataclass(frozen=True)
class LatencyProfile:
    """Seconds that one row takes in each part of the model.

    Attention reads the whole context and takes ``a · n + b`` (``attention_per_token`` and ``attention_base`` of one
    branch); everything else does not depend on it (KnapSpec, section 3.1). Attention and MLP are means over the layers,
    so that layers with a sliding window count as they are. ``head`` includes the final norm, ``embedding`` the layout
    of the forward.
    """

    device: str
    dtype: str
    layers: int
    attention_per_token: float
    attention_base: float
    mlp: float
    head: float
    embedding: float

    def __post_init__(self) -> None:
        """Raises ``ValueError`` for a field that is of the wrong type, not finite or negative, or a branch of 0 s."""
        for name in ("device", "dtype"):
            if not isinstance(getattr(self, name), str):
                raise ValueError(f"{name} must be text, not {getattr(self, name)!r}")
        if isinstance(self.layers, bool) or not isinstance(self.layers, int) or self.layers < 1:
            raise ValueError(f"layers must be a whole number of at least 1, not {self.layers!r}")
        for name in ("attention_per_token", "attention_base", "mlp", "head", "embedding"):
            seconds = getattr(self, name)
            if isinstance(seconds, bool) or not isinstance(seconds, (int, float)) or not 0 <= seconds < math.inf:
                raise ValueError(f"{name} must be seconds, not {seconds!r}")
        if self.attention_base == 0 or self.mlp == 0:
            raise ValueError("attention_base and mlp must be above 0")

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "LatencyProfile":
        """A profile from the result of ``to_dict``; raises ``ValueError`` if it is damaged."""
        names = {field.name for field in fields(cls)}
        if not isinstance(values, Mapping) or set(values) != names:
            raise ValueError(f"a latency profile has the fields {', '.join(sorted(names))}")
        return cls(**values)

    def to_dict(self) -> dict[str, Any]:
        """Its fields, as JSON types."""
        return asdict(self)

    def fits(self, target: Target) -> bool:
        """Whether it was measured with this number of layers, in this dtype and on this kind of device."""
        here = (device_name(target.device), _dtype_name(target), target.layer_count)
        return (self.device, self.dtype, self.layers) == here

    @property
    def outside(self) -> float:
        """Seconds of every forward outside of its sublayers: layout, embedding, final norm, LM head."""
        return self.head + self.embedding

    def attention(self, context: int) -> float:
        """Seconds of one attention branch with ``context`` tokens in the cache."""
        return self.attention_per_token * context + self.attention_base

    def draft_step(self, kept: KeptSet, context: int, *, with_head: bool = True) -> float:
        """Seconds of drafting one token; ``with_head`` includes the time outside of the sublayers."""
        attention = sum(index % 2 == 0 for index in kept.sublayers)
        branches = attention * self.attention(context) + (len(kept.sublayers) - attention) * self.mlp
        return branches + (self.outside if with_head else 0.0)

    def target_step(self, context: int, *, with_head: bool = True) -> float:
        """Seconds of one forward of the whole target over one token; see ``draft_step``."""
        return self.draft_step(KeptSet.full(2 * self.layers), context, with_head=with_head)


@dataclass(frozen=True)
class PartSeconds:
    """Measured seconds of the parts of one forward, from which a ``LatencyProfile`` is fitted.

    Those of one attention branch, the mean over the layers, are at each of the contexts, which ascend.
    """

    contexts: tuple[int, ...]
    attention: tuple[float, ...]
    mlp: float
    head: float
    embedding: float

    @property
    def attention_line(self) -> tuple[float, float]:
        """``a`` and ``b`` of ``a · n + b``, by least squares.

        Attention never gets cheaper with more context. A time above that of a longer context is noise, and is lowered
        to it, so that a disturbed measurement at a short context does not flatten the line.
        """
        never_falling = [*accumulate(reversed(self.attention), min)][::-1]
        return _fit_line(self.contexts, never_falling)


def measure_latencies(
    target: Target,
    contexts: Sequence[int] | None = None,
    repeats: int = _REPEATS,
    precision: Precision | None = None,
) -> LatencyProfile:
    """Measures a profile of one row at a precision (``None`` for the target's own); see ``measure_parts``."""
    return latency_profile(target, measure_parts(target, contexts, repeats, precision=precision))


def latency_profile(target: Target, parts: PartSeconds) -> LatencyProfile:
    """The profile from the result of ``measure_parts`` for one row."""
    slope, base = parts.attention_line
    return LatencyProfile(
        device=device_name(target.device),
        dtype=_dtype_name(target),
        layers=target.layer_count,
        attention_per_token=slope,
        attention_base=base,
        mlp=parts.mlp,
        head=parts.head,
        embedding=parts.embedding,
    )


@torch.inference_mode()
def measure_parts(
    target: Target,
    contexts: Sequence[int] | None = None,
    repeats: int = _REPEATS,
    rows: int = 1,
    precision: Precision | None = None,
) -> PartSeconds:
    """Measures the parts of a forward on a scratch sequence.

    All layers' attention branches run one after another, and so do all MLPs. So each weight is read once in a pass, as
    in decoding, and no branch finds its weights in a processor's cache. Passes over the parts are interleaved and
    warmed up, and the minimum of each counts: other load on the machine makes a part slower, never faster, and can
    affect the same part repeatedly, which would move a median. By default there are four contexts up to the model's
    limit.
    """
    running = target if precision is None else target.at(precision)
    contexts = sorted(set(contexts if contexts is not None else _contexts(target, rows)))
    sequence = _scratch_sequence(target, slots=contexts[-1] + rows)
    tokens = torch.zeros(rows, dtype=torch.long, device=target.device)
    attention, mlp = range(0, target.sublayer_count, 2), range(1, target.sublayer_count, 2)
    steps = [target.lay_out(sequence, rows, start=context) for context in contexts]
    embedded = target.embed(tokens, steps[0])
    for step in steps[1:] if target.decoder.reads_tokens else ():
        target.embed(tokens, step)

    def lay_out() -> None:
        target.embed(tokens, target.lay_out(sequence, rows, start=0))

    passes: list[Callable[[], object]] = [
        lay_out,
        lambda: running.logits(embedded),
        lambda: running.run(embedded, mlp, steps[0]),
        *(lambda step=step: running.run(embedded, attention, step) for step in steps),
    ]
    samples = interleaved_samples(dict(enumerate(passes)), target.device, repeats=repeats, clock=target.ranks.clock)
    embedding, head, mlps, *attentions = map(min, samples.values())
    layers = target.layer_count
    return PartSeconds(
        tuple(contexts), tuple(seconds / layers for seconds in attentions), mlps / layers, head, embedding
    )


def _dtype_name(target: Target) -> str:
    return str(target.dtype).removeprefix("torch.")


def _contexts(target: Target, rows: int) -> list[int]:
    longest = max(1, min(LONGEST_CONTEXT, target.context_limit) - rows)
    return [max(1, longest // 16), max(1, longest // 4), max(1, longest // 2), longest]


def _scratch_sequence(target: Target, slots: int) -> SequenceState:
    return SequenceState(SharedCache(target.new_sequence(1, 1, 1).cache, slots))


class SharedCache(KeyValueCache):
    """A cache whose layers share a few buffers, so that a long one takes little memory.

    It holds ones: fresh zeros may all be one page of memory, which is read faster than a real context.
    """

    def __init__(self, like: KeyValueCache, slots: int) -> None:
        super().__init__(
            _BUFFERS,
            like.keys[0].shape[1],
            slots,
            like.head_dim,
            dtype=like.dtype,
            device=like.device,
            packed=like.packed,
            has_values=like.has_values,
        )
        for pair in self._pairs:
            pair.copy_(self.stored(torch.ones(like.head_dim, dtype=like.dtype, device=like.device)))
        self._hold([self._pairs[layer % _BUFFERS] for layer in range(len(like.keys))])


def _fit_line(contexts: Sequence[int], seconds: Sequence[float]) -> tuple[float, float]:
    """Least squares: slope and intercept, neither of them negative."""
    mean_context, mean_seconds = statistics.fmean(contexts), statistics.fmean(seconds)
    spread = sum((context - mean_context) ** 2 for context in contexts)
    products = ((context - mean_context) * second for context, second in zip(contexts, seconds, strict=True))
    slope = max(0.0, sum(products) / spread) if spread else 0.0
    return slope, max(mean_seconds - slope * mean_context, 1e-9)
