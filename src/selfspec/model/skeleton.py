"""A model's own forward around its decoder layers: embeddings, what layers are called with, and the logits.

The skeleton is a copy of the modules on the way to the layers. Everything else, all weights included, is the model's
own, so that nothing is held twice and no attribute of the model is set.
"""

import contextlib
import copy
import inspect
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from selfspec.errors import UnsupportedModelError
from selfspec.model.forward import Rows
from selfspec.model.slots import SharedKeys, Slots, find_layers_of_cache
from selfspec.model.sublayers import cache_name

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_MASKS = ("attention_mask", "causal_mask")
_BIASES = ("alibi", "position_bias")
_SHARED = "shared_kv_states"


def substitute(module: Any, parts: Mapping[str, nn.Module | Callable[..., Any]]) -> Any:
    """A module that shares everything with another but some submodules, by path, or the ``forward`` of these."""
    clone = object.__new__(type(module))
    clone.__dict__.update(module.__dict__, _modules=dict(module.__dict__["_modules"]))
    below: dict[str, dict[str, Any]] = {}
    for path, own_part in parts.items():
        name, _, rest = path.partition(".")
        below.setdefault(name, {})[rest] = own_part
    for name, own in below.items():
        part = own.get("")
        if isinstance(part, nn.Module):
            clone._modules[name] = part
            continue
        child = substitute(clone._modules[name], {path: each for path, each in own.items() if path})
        if part is not None:
            child.__dict__["forward"] = part
        clone._modules[name] = child
    return clone


@dataclass(frozen=True)
class LayerCall:
    """What a layer is called with. The residual stream is the first argument, or ``hidden_states``."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    @property
    def hidden_states(self) -> torch.Tensor:
        """The residual stream, ``[1, rows, hidden]``."""
        hidden_states: torch.Tensor = self.args[0] if self.args else self.kwargs["hidden_states"]
        return hidden_states

    @property
    def cache(self) -> Slots:
        """What the layer is given to keep keys and values in."""
        for value in (*self.args, *self.kwargs.values()):
            if isinstance(value, Slots):
                return value
        raise UnsupportedModelError("the layers of this model are not given transformers' cache")

    def run(self, layer: nn.Module, hidden_states: torch.Tensor) -> torch.Tensor:
        """Calls a layer with another residual stream; returns the stream after it."""
        if self.args:
            output = layer(hidden_states, *self.args[1:], **self.kwargs)
        else:
            output = layer(**{**self.kwargs, "hidden_states": hidden_states})
        after: torch.Tensor = first_of(output)
        return after

    def changed(self, change: Callable[[str, Any], Any], names: tuple[str, ...]) -> "LayerCall":
        """The call with other values of the arguments; ``names`` are those of the positional ones."""
        args = tuple(change(name, value) for name, value in zip(names, self.args, strict=False))
        return LayerCall(args, {name: change(name, value) for name, value in self.kwargs.items()})


def differ(first: list[LayerCall], second: list[LayerCall]) -> bool:
    """Whether layers are called with something else than the stream that differs, as between texts of one length."""
    for one, other in zip(first, second, strict=True):
        pairs = [*zip(one.args[1:], other.args[1:], strict=True)]
        pairs += [(value, other.kwargs[name]) for name, value in one.kwargs.items() if name != "hidden_states"]
        for mine, its in pairs:
            if isinstance(mine, torch.Tensor) and not torch.equal(mine, its):
                return True
    return False


def first_of(output: Any) -> Any:
    """What a module gives, or the first of several things."""
    return output[0] if isinstance(output, tuple) else output


class _ReachedEndError(Exception):
    """Ends a forward after the last layer has been called."""


class Skeleton:
    """Calls the forward of a causal language model without its decoder layers.

    Args:
        model: in eval mode.

    Attributes:
        layers: the decoder layers.
        kinds: what each layer keeps in a cache.
        cache_name: what the model calls its cache.
        like: a weight of the model's dtype.
        carries: recurrent layers run several rows from the state before them.
        reads_tokens: layers are called with more of the tokens than the residual stream, as per-layer embeddings. Then
            ``calls`` are those of the last ``embed`` of the same rows.
        seen: keys and values of each layer that has some, by its place in the cache, from a forward of the model.
        norms: the modules between the last layer and the head, in order, once a forward has been observed.

    Raises:
        UnsupportedModelError: the layers were not found, or keep something unknown.
    """

    def __init__(self, model: "PreTrainedModel") -> None:
        self.config: Any = model.config.get_text_config(decoder=True)
        path, self.layers = _find_layers(model, int(self.config.num_hidden_layers))
        self.kinds = find_layers_of_cache(self.config, len(self.layers))
        self._takes = inspect.signature(type(model).forward).parameters.keys()
        self.cache_name = cache_name(type(model))
        layer = self.layers[0]  # OLMo's norms have no weights, and layers of few bits have their dtype in a buffer
        self.like = next(each for each in (*layer.parameters(), *layer.buffers()) if each.is_floating_point())
        self._names = [tuple(inspect.signature(type(layer).forward).parameters)[1:] for layer in self.layers]
        self._lock = threading.Lock()
        self._at_layer: Callable[[int, LayerCall], Any] = lambda index, call: None
        parts: dict[str, Any] = {f"{path}.{index}": self._stand_in(index) for index in range(len(self.layers))}
        owner, _, _ = path.rpartition(".")
        for name, child in model.get_submodule(owner).named_children():
            if next(child.parameters(), None) is None and next(child.buffers(), None) is not None:
                # Some ropes rewrite their frequencies while they run.
                parts[f"{owner}.{name}"] = copy.deepcopy(child)
        self._model = substitute(model, parts)
        self._bases = [owner[:end] for end in range(len(owner) + 1) if f"{owner}."[end] == "."]
        self._around = {
            f"{owner}.{name}": child
            for name, child in self._model.get_submodule(owner).named_children()
            if not isinstance(child, nn.ModuleList) and "forward" not in vars(child)
        }
        self.norms: list[nn.Module] = []
        self.carries = self.reads_tokens = False
        self.seen: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._rests: list[tuple[Any, ...] | None] = []
        self._base: tuple[str, Any] = ("", None)
        """The path of the model without its head, and what it gave."""

    def observe(self, token_ids: torch.Tensor, cache: Any) -> tuple[list[torch.Tensor], torch.Tensor]:
        """Runs the whole model once, long ``[rows]``.

        Returns:
            The residual stream before each layer and after the last, ``[1, rows, hidden]`` each, and the logits,
            ``[rows, vocab]``.
        """
        calls: list[LayerCall] = []
        outputs: list[Any] = []

        def run(index: int, call: LayerCall) -> Any:
            calls.append(call)
            outputs.append(self.layers[index](*call.args, **call.kwargs))
            return outputs[-1]

        after: list[tuple[nn.Module, torch.Tensor, torch.Tensor]] = []

        def watched(child: nn.Module) -> Callable[..., Any]:
            def forward(*args: Any, **kwargs: Any) -> Any:
                output = type(child).forward(child, *args, **kwargs)
                if len(calls) == len(self.layers):
                    after.append((child, args[0], output))
                return output

            return forward

        children = {path: watched(child) for path, child in self._around.items()}
        model = substitute(self._model, children)
        for path in reversed(self._bases):
            model = substitute(model, {path: self._kept(path, model.get_submodule(path))})
        with self._lock:
            self._at_layer = run
            output = model(input_ids=token_ids[None], use_cache=True, **{self.cache_name: cache})
        self._rests = [each[1:] if isinstance(each, tuple) else None for each in outputs]
        streams = [call.hidden_states for call in calls] + [first_of(output) for output in outputs[-1:]]
        if len(calls) != len(self.layers):
            raise UnsupportedModelError(f"of the {len(self.layers)} layers of this model {len(calls)} run in a forward")
        self.norms = _in_order(after, streams[-1], self._base[1].last_hidden_state)
        return streams, output.logits[0]

    def embed(self, token_ids: torch.Tensor, rows: Rows) -> torch.Tensor:
        """The residual stream before the first layer: long ``[rows]`` to ``[rows, hidden]``."""
        return self._lay_out(rows, input_ids=token_ids[None])[0].hidden_states[0]

    def calls(self, rows: Rows) -> list[LayerCall]:
        """What each layer is called with for some rows, but for the residual stream."""
        if "calls" not in rows.memo:
            assert not self.reads_tokens, "the tokens of these rows were not embedded"
            states = self.like.new_zeros(1, rows.count, self.config.hidden_size)
            self._lay_out(rows, inputs_embeds=states)
        calls: list[LayerCall] = rows.memo["calls"]
        return calls

    def logits(self, normed: torch.Tensor) -> torch.Tensor:
        """What the model makes of the states after its final norm, ``[rows, hidden]`` to ``[rows, vocab]``."""
        path, observed = self._base
        output = replace(observed, last_hidden_state=normed[None])
        head = substitute(self._model, {path: lambda *_, **__: output})
        logits: torch.Tensor = head(inputs_embeds=normed[None], use_cache=False).logits[0]
        return logits

    def _lay_out(self, rows: Rows, **inputs: Any) -> list[LayerCall]:
        calls: list[LayerCall] = []

        def skip(index: int, call: LayerCall) -> Any:
            calls.append(call)
            if index == len(self.layers) - 1:
                raise _ReachedEndError
            rest = self._rests[index]
            return call.hidden_states if rest is None else (call.hidden_states, *rest)

        options = {"position_ids": rows.positions[None], self.cache_name: Slots(self.kinds, rows), "use_cache": True}
        with self._lock:
            self._at_layer = skip
            with contextlib.suppress(_ReachedEndError):
                self._model(**inputs, **{name: value for name, value in options.items() if name in self._takes})
        calls = [self._with_keys(index, call, rows) for index, call in enumerate(calls)]
        if not rows.is_chain:
            calls = [self._with_mask(index, call, rows) for index, call in enumerate(calls)]
        rows.memo["calls"] = calls
        return calls

    def _with_keys(self, index: int, call: LayerCall, rows: Rows) -> LayerCall:
        """The call with the cache in the place of what layers hand on to later ones."""
        if _SHARED not in call.kwargs:
            return call
        source = self.kinds[index].source
        kind = None if source is None else self.kinds[source]
        likes = None if kind is None or kind.place is None or not self.seen else self.seen[kind.place]
        return replace(call, kwargs={**call.kwargs, _SHARED: SharedKeys(call.cache, rows, kind, likes)})

    def _with_mask(self, index: int, call: LayerCall, rows: Rows) -> LayerCall:
        """The call with the mask of rows that are no chain."""
        eager, like = self.config._attn_implementation == "eager", call.hidden_states

        def change(name: str, value: Any) -> Any:
            if name in _MASKS:
                additive = value.is_floating_point() if isinstance(value, torch.Tensor) else eager
                return self.kinds[index].mask(rows, like.dtype, additive=additive)
            if name in _BIASES and isinstance(value, torch.Tensor):
                return value.index_select(-1, rows.slot_positions + value.shape[-1] - rows.end)
            return value

        return call.changed(change, self._names[index])

    def _kept(self, path: str, base: nn.Module) -> Callable[..., Any]:
        def forward(*args: Any, **kwargs: Any) -> Any:
            output: Any = type(base).forward(base, *args, **kwargs)
            self._base = path, replace(output, **dict.fromkeys({self.cache_name} & vars(output).keys()))
            return output  # the outermost is the last to end

        return forward

    def _stand_in(self, index: int) -> Callable[..., Any]:
        return lambda *args, **kwargs: self._at_layer(index, LayerCall(args, kwargs))


def _find_layers(model: "PreTrainedModel", count: int) -> tuple[str, list[nn.Module]]:
    """The path of the list of decoder layers, the outermost of as many modules as the model has layers."""
    lists = [
        (path, list(module))
        for path, module in model.named_modules()
        if isinstance(module, nn.ModuleList) and len(module) == count and "." in path
    ]
    if not lists:
        raise UnsupportedModelError(
            f"no list of {count} decoder layers was found in {type(model).__name__}; models whose layers are not in "
            "one list are not supported"
        )
    return min(lists, key=lambda found: found[0].count("."))


def _in_order(
    called: list[tuple[nn.Module, torch.Tensor, torch.Tensor]], first: torch.Tensor, last: torch.Tensor
) -> list[nn.Module]:
    """The modules that were called one after the other, from the stream after the layers to what the head gets."""
    found: list[nn.Module] = []
    for module, given, output in called:
        if not torch.equal(given.view_as(first), first):
            break
        found.append(module)
        first = output
    if first.shape != last.shape or not torch.equal(first, last):
        raise UnsupportedModelError("this model computes more than norms between its last layer and its head")
    return found
