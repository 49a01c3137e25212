"""The cache that transformers' own layers write to: slots of a ``KeyValueCache``, as rows of a forward see them."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from transformers import Cache, DynamicCache, cache_utils
from transformers.cache_utils import (
    CacheLayerMixin,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionAndSlidingWindowAttentionLayer,
    LinearAttentionLayer,
)

from selfspec.errors import UnsupportedModelError
from selfspec.model.forward import Rows


@dataclass(frozen=True)
class LayerSlots:
    """What a layer keeps of each token.

    Attributes:
        place: index of its keys and values in the cache; ``None`` if it keeps none.
        window: positions that it sees at most, itself included; ``None`` for all.
        chunk: positions of a chunk, in which alone a token sees others, if the layer has chunks.
        states: number of states that the layer carries from token to token, as recurrent layers do.
        source: the layer whose keys and values it reads, if it has none of its own.
    """

    place: int | None
    window: int | None = None
    chunk: int | None = None
    states: int = 0
    source: int | None = None

    def mask(self, rows: Rows, dtype: torch.dtype, *, additive: bool) -> torch.Tensor | None:
        """The mask of rows that are not consecutive tokens after the prefix: ``[1, 1, rows, slots]``."""
        if self.chunk is None:
            return rows.mask(self.window, dtype, additive=additive, causal_kernel=False)
        chunks = rows.slot_positions[rows.first_slot(self.window) :] // self.chunk
        visible = rows.visibility(self.window) & (chunks == rows.positions[:, None] // self.chunk)
        if not additive:
            return visible[None, None]
        return torch.zeros_like(visible, dtype=dtype).masked_fill_(~visible, torch.finfo(dtype).min)[None, None]


class _NoCacheLayer:
    """What a layer has in transformers' cache that keeps nothing, in versions whose cache ends before it."""


_LayerOfNothing: Any = getattr(cache_utils, "DummyLayer", _NoCacheLayer)

_KNOWN = (
    _LayerOfNothing,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionLayer,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionAndSlidingWindowAttentionLayer,
)


def find_layers_of_cache(config: Any, count: int) -> list[LayerSlots]:
    """What each layer keeps, as transformers' ``generate`` sets it up.

    Raises:
        UnsupportedModelError: a layer keeps something else than keys and values.
    """
    layers: list[Any] = list(DynamicCache(config=config).layers) or [DynamicLayer() for _ in range(count)]  # type: ignore[no-untyped-call]
    layers += [_LayerOfNothing() for _ in range(count - len(layers))]
    types = getattr(config, "layer_types", None) or [None] * count
    found: list[LayerSlots] = []
    places = 0
    for index, layer in enumerate(layers):
        if type(layer) not in _KNOWN:
            raise UnsupportedModelError(
                f"layer {index} of this '{config.model_type}' model keeps something else than keys, values and states "
                f"({type(layer).__name__}), which cannot be rolled back"
            )
        keeps_keys = isinstance(layer, DynamicLayer)
        window = layer.sliding_window if isinstance(layer, DynamicSlidingWindowLayer) else None
        chunk = window if types[index] == "chunked_attention" else None
        states = layer.number_of_states if isinstance(layer, LinearAttentionLayer) else 0
        found.append(LayerSlots(places if keeps_keys else None, window, chunk, states))
        places += keeps_keys
    for index, source in _sources(config, types).items():
        found[index] = replace(found[index], window=found[source].window, source=source)
    return found


def _sources(config: Any, types: Sequence[str | None]) -> dict[int, int]:
    """By layer without keys and values of its own, the layer whose it reads: the last of its type that has some."""
    shared = getattr(config, "num_kv_shared_layers", None) or 0
    modes = getattr(config, "kv_sharing_modes", None) or ["store"] * (len(types) - shared) + ["reuse"] * shared
    return {
        index: max(layer for layer in range(index) if types[layer] == types[index] and modes[layer] == "store")
        for index, mode in enumerate(modes)
        if mode == "reuse"
    }


def seen(
    rows: Rows, kind: LayerSlots, like_keys: torch.Tensor, like_values: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values of a layer in the slots that rows see, ``[1, heads, slots, size]``; heads and sizes as given."""
    assert kind.place is not None
    pair = rows.sequence.cache.slots_for(kind.place, rows.start, rows.count)
    first = rows.first_slot(kind.window)
    keys, values = (
        slots[None, : like.shape[1], first : rows.end, : like.shape[3]]
        for slots, like in zip(pair, (like_keys, like_values), strict=True)
    )
    return keys, values


class SharedKeys:
    """What layers are given to hand keys and values on to later ones: a later one gets those in the cache.

    So it does not matter in which forward they were written. A draft that skips the layer that has them reads what is
    there of the tokens before it.

    Args:
        cache: what the layer has beside it.
        rows: of the forward.
        kind: of the layer whose keys and values are read; ``None`` if none are.
        likes: keys and values of that layer.
    """

    def __init__(
        self, cache: "Slots", rows: Rows, kind: LayerSlots | None, likes: tuple[torch.Tensor, torch.Tensor] | None
    ) -> None:
        self._cache, self._rows, self._kind, self._likes = cache, rows, kind, likes

    def __getitem__(self, layer_type: str) -> tuple[torch.Tensor, torch.Tensor]:
        assert self._kind is not None, "a layer reads what none hands on to it"
        assert self._likes is not None, "the model was not observed"
        self._cache.uses += 1
        return seen(self._rows, self._kind, *self._likes)

    def __setitem__(self, layer_type: str, states: tuple[torch.Tensor, torch.Tensor]) -> None:
        """Does nothing: they are in the cache."""


class Slots(Cache):
    """What transformers gets as its cache for some rows; ``uses`` counts what layers do with it."""

    def __init__(self, kinds: list[LayerSlots], rows: Rows) -> None:
        super().__init__(layers=[_layer(kind, rows) for kind in kinds])
        self.uses = 0
        self._rows = rows

    def load(self, index: int) -> None:
        """Gives a layer with states those after the slot before the rows."""
        state = self._rows.sequence.cache.states.get(index, self._rows.start - 1)
        layer: Any = self.layers[index]
        if state is None:
            layer.has_previous_state = dict.fromkeys(layer.has_previous_state, False)
        else:
            layer.__dict__.update(_copied(state))

    def save(self, index: int) -> None:
        """Keeps the states after the last of the rows."""
        layer: Any = self.layers[index]
        state = {name: getattr(layer, name) for name in _STATE}
        self._rows.sequence.cache.states.put(index, self._rows.end - 1, state)

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Counts the use."""
        self.uses += 1
        return super().update(key_states, value_states, layer_idx, *args, **kwargs)

    def update_conv_state(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Counts the use."""
        self.uses += 1
        return super().update_conv_state(*args, **kwargs)

    def update_recurrent_state(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Counts the use."""
        self.uses += 1
        return super().update_recurrent_state(*args, **kwargs)


class _Layer(CacheLayerMixin):  # type: ignore[no-untyped-call]
    """Writes the keys and values of the rows, and returns those of the slots that they see."""

    is_compileable = False

    def __init__(self, kind: LayerSlots, rows: Rows) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.is_sliding = kind.window is not None
        self.sliding_window = kind.window
        self._kind, self._rows = kind, rows

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        self.is_initialized = True

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *_: Any, **__: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        assert self._kind.place is not None
        rows = self._rows
        slots = rows.sequence.cache.slots_for(self._kind.place, rows.start, rows.count)
        for own, new in zip(slots, (key_states, value_states), strict=True):
            own[: new.shape[1], rows.start : rows.end, : new.shape[3]] = new[0]
        return seen(rows, self._kind, key_states, value_states)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        first = self._rows.first_slot(self._kind.window)
        return self._rows.start + query_length - first, first

    def get_seq_length(self) -> int:
        return self._rows.start

    def get_max_length(self) -> int:
        return -1 if self._kind.window is None else self._kind.window


class _StatefulLayer(_Layer, LinearAttentionLayer):  # type: ignore[no-untyped-call]
    """Keys and values, and states."""

    def __init__(self, kind: LayerSlots, rows: Rows) -> None:
        LinearAttentionLayer.__init__(self, number_of_states=kind.states)
        _Layer.__init__(self, kind, rows)

    def lazy_initialization(self, *args: Any, **kwargs: Any) -> None:
        if args:
            _Layer.lazy_initialization(self, *args)
        else:
            LinearAttentionLayer.lazy_initialization(self, **kwargs)


_STATE = (
    "conv_states",
    "recurrent_states",
    "is_conv_states_initialized",
    "is_recurrent_states_initialized",
    "has_previous_state",
    "conv_kernel_size",
    "dtype",
    "device",
)
"""What makes up the state of a recurrent layer of transformers' cache."""


def _layer(kind: LayerSlots, rows: Rows) -> Any:
    if kind.states:
        own = _StatefulLayer(kind, rows) if kind.place is not None else LinearAttentionLayer(kind.states)
        own.has_previous_state = dict.fromkeys(own.has_previous_state, rows.start > 0)  # masks depend on it
        return own
    return _LayerOfNothing() if kind.place is None else _Layer(kind, rows)


def _copied(state: dict[str, Any]) -> dict[str, Any]:
    """A state that a layer may change in place."""
    copied: dict[str, Any] = {}
    for name, values in state.items():
        copied[name] = values
        if isinstance(values, dict):
            copied[name] = {
                key: value.clone() if isinstance(value, torch.Tensor) else value for key, value in values.items()
            }
    return copied
