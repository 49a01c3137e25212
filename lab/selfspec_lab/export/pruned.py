"""A kept set as an ordinary checkpoint: the model without some of its layers.

Kept sets are of sublayers, and an ordinary checkpoint has whole layers. A layer of which both sublayers are skipped is
left out. Of a layer of which one is skipped, that one stays with weights that are all zero, so that it adds exactly
nothing to the residual stream: the checkpoint computes what a draft with this kept set computes, and a skipped half
takes the time and the memory of one that runs. A set of whole layers has no such halves (``whole.whole_layers``).
"""

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from selfspec.errors import InvalidParameterError, UnsupportedModelError
from selfspec.model.families import FAMILIES, find_family
from selfspec.model.kept import KeptSet

_BY_LAYER = ("layer_types", "no_rope_layers", "mlp_layer_types")
"""Config attributes with one entry a layer."""

_INDICES = ("mlp_only_layers",)
"""Config attributes that list layers."""

_LEADING = ("first_k_dense_replace",)
"""Config attributes that count layers from the first one."""

_LAYERS = "model.layers."
_PLACES = frozenset(("layer_idx", "training"))


def kept_layers(kept: KeptSet) -> tuple[int, ...]:
    """The layers of which at least one sublayer is kept, ascending."""
    return tuple(sorted({sublayer // 2 for sublayer in kept.sublayers}))


def zeroed_halves(kept: KeptSet) -> tuple[int, ...]:
    """The skipped sublayers of these layers, ascending."""
    layers = set(kept_layers(kept))
    return tuple(sublayer for sublayer in kept.skipped if sublayer // 2 in layers)


def check_prunable(config: PreTrainedConfig) -> None:
    """Checks that a family's layers can be left out one by one, before weights are read.

    Raises:
        UnsupportedModelError: its config describes the layers by a pattern, or it has no row in the table of families.
    """
    if find_family(config) is None:
        raise UnsupportedModelError(
            f"the depth of a '{config.model_type}' model cannot be pruned: which modules its layers are made of, or "
            f"in which pattern, is not known; families whose depth can be: {', '.join(FAMILIES)}"
        )


@torch.no_grad()
def prune(model: PreTrainedModel, kept: KeptSet) -> PreTrainedModel:
    """The model with the layers of a kept set alone; the weights are shared with it.

    Args:
        model: of a family with a row in the table, unquantised, in eval mode.
        kept: the sublayers that draft.

    Returns:
        A model of the same class with fewer layers, in eval mode, on the same device. Its logits are those of the
        model's own sublayers of the kept set, one after the other.

    Raises:
        InvalidParameterError: the kept set skips nothing, or no layer is left.
        UnsupportedModelError: a layer would be another one in a checkpoint of this depth.
    """
    check_prunable(model.config)
    layers = kept_layers(kept)
    if not kept.skipped or not layers:
        what = "nothing" if layers else "everything"
        raise InvalidParameterError(
            f"the kept set skips {what}, so there is no draft to export; tune it on other texts"
        )
    source: Any = model
    config = pruned_config(model.config, layers)
    make: Any = AutoModelForCausalLM.from_config
    with torch.device("meta"):
        pruned = make(config, dtype=model.dtype, attn_implementation=source.config._attn_implementation)
    for new, old in enumerate(layers):
        _check_same(pruned.model.layers[new], source.model.layers[old], old, config.model_type)
    pruned.load_state_dict(_weights(source, kept), assign=True)
    pruned.tie_weights()
    _restore_buffers(pruned, source, config)
    pruned.generation_config = copy.deepcopy(source.generation_config)
    made: PreTrainedModel = pruned.eval()
    return made


def pruned_config(config: PreTrainedConfig, layers: Sequence[int]) -> Any:
    """A copy of a config for some of its layers, with what it says of single layers."""
    pruned: Any = copy.deepcopy(config)
    for name in _BY_LAYER:
        entries = getattr(config, name, None)
        if entries is not None:
            setattr(pruned, name, [entries[layer] for layer in layers])
    for name in _INDICES:
        if getattr(config, name, None):
            setattr(pruned, name, [new for new, layer in enumerate(layers) if layer in getattr(config, name)])
    for name in _LEADING:
        if isinstance(getattr(config, name, None), int):
            setattr(pruned, name, sum(layer < getattr(config, name) for layer in layers))
    pruned.num_hidden_layers = len(layers)
    return pruned


def _weights(source: Any, kept: KeptSet) -> dict[str, torch.Tensor]:
    """All weights and persistent buffers by their names in the pruned model; those of skipped halves are zero."""
    places = {layer: place for place, layer in enumerate(kept_layers(kept))}
    zeroed = _zeroed_names(source, kept)
    found = {}
    for name, tensor in source.state_dict().items():
        renamed = _renamed(name, places)
        if renamed is not None:
            found[renamed] = torch.zeros_like(tensor) if name in zeroed else _own_memory(tensor)
    return found


def _zeroed_names(source: Any, kept: KeptSet) -> set[str]:
    """Names of the parameters that skipped halves consist of, the norms after them included."""
    family = find_family(source.config)
    assert family is not None
    found = set()
    for sublayer in zeroed_halves(kept):
        branch = (family.attention, family.mlp)[sublayer % 2]
        layer, prefix = source.model.layers[sublayer // 2], f"{_LAYERS}{sublayer // 2}."
        found |= {f"{prefix}{branch.module}.{name}" for name, _ in getattr(layer, branch.module).named_parameters()}
        if branch.norm_after is not None:
            found.add(f"{prefix}{branch.norm_after}.bias")
    return found


def _renamed(name: str, places: dict[int, int]) -> str | None:
    """The name of a tensor in the pruned model; ``None`` if its layer is left out."""
    if not name.startswith(_LAYERS):
        return name
    layer, rest = name.removeprefix(_LAYERS).split(".", 1)
    return None if int(layer) not in places else f"{_LAYERS}{places[int(layer)]}.{rest}"


def _own_memory(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor; a copy of one that is part of fused weights, which a file could not hold by itself."""
    whole = tensor.untyped_storage().nbytes() == tensor.nbytes and tensor.is_contiguous()
    return tensor if whole else tensor.clone()


def _restore_buffers(pruned: Any, source: Any, config: Any) -> None:
    """Fills what no state has: rope frequencies, scales of embeddings. They do not depend on the depth."""
    pruned.model.rotary_emb = type(source.model.rotary_emb)(config).to(source.device)
    for name, buffer in list(pruned.named_buffers()):
        if buffer.device.type == "meta":
            owner, _, leaf = name.rpartition(".")
            pruned.get_submodule(owner)._buffers[leaf] = source.get_buffer(name).clone()


def _check_same(new: nn.Module, old: nn.Module, layer: int, model_type: str) -> None:
    """Refuses a layer that the pruned config makes of other modules, or with other settings, than the model's own."""
    made, expected = _traits(new), _traits(old)
    different = sorted(name for name in made.keys() | expected.keys() if made.get(name) != expected.get(name))
    if different:
        raise UnsupportedModelError(
            f"the depth of this '{model_type}' model cannot be pruned: its config sets '{different[0]}' by the place "
            f"of a layer, so layer {layer} would become another one"
        )


def _traits(layer: nn.Module) -> dict[str, object]:
    """What a layer is made of: the classes of its modules, their plain attributes and the shapes of the weights."""
    found: dict[str, object] = {name: tuple(weight.shape) for name, weight in layer.named_parameters()}
    for name, module in layer.named_modules():
        found[f"{name}()"] = type(module).__name__
        for key, value in vars(module).items():
            if key[0] != "_" and key not in _PLACES and (value is None or isinstance(value, (bool, int, float, str))):
                found[f"{name}.{key}".removeprefix(".")] = value
    return found
