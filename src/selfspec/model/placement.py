"""Where a model's weights are: on one device, or on several, as the hooks of a ``device_map`` arrange it."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from selfspec.errors import UnsupportedModelError
from selfspec.model.ranks import is_sharded

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_NAMED = 3
"""Most names that an error lists."""


@dataclass(frozen=True)
class Placement:
    """Where the modules of a model run.

    Attributes:
        home: the device of the embedding, on which rows enter and leave.
        devices: all devices on which modules run.
        is_whole: all weights are ordinary tensors on one device. Else transformers' modules run, whose hooks move
            weights and rows.
    """

    home: torch.device
    devices: frozenset[torch.device]
    is_whole: bool

    def like(self, weight: torch.Tensor) -> torch.Tensor:
        """A tensor with a weight's dtype, on the device where rows enter: the weight itself, if all is there."""
        return weight if self.is_whole else torch.empty(0, dtype=weight.dtype, device=self.home)


def placement_of(model: "PreTrainedModel") -> Placement:
    """Where a model's weights are.

    Raises:
        UnsupportedModelError: some are on disk, or on several devices between which nothing moves the rows.
    """
    _refuse_disk(model)
    devices = frozenset(device_of(module) for module in model.modules() if _weights(module))
    hooked = any(_hook_of(module) is not None for module in model.modules())
    if len(devices) > 1 and not hooked:
        raise UnsupportedModelError(
            f"the model is spread over {', '.join(sorted(map(str, devices)))} without hooks that move the rows; load "
            "it with a device_map, or put it on one device"
        )
    home = device_of(model.get_input_embeddings() if hooked else model)
    weights = [weight for module in model.modules() for weight in _weights(module).values()]
    offloaded = hooked and any(weight.is_meta for weight in weights)
    return Placement(home, devices, len(devices) == 1 and not offloaded and not any(map(is_sharded, weights)))


def device_of(module: nn.Module) -> torch.device:
    """The device on which a module runs: where its first hook moves its inputs, else where its weights are."""
    hook = next(filter(None, map(_hook_of, module.modules())), None)
    if hook is None:
        return next(module.parameters()).device
    device = hook.execution_device
    return torch.device("cuda", device) if isinstance(device, int) else torch.device(device)


def kept_weight(module: nn.Module, name: str) -> torch.Tensor:
    """A module's own weight, where its hook keeps it while it does not run."""
    weight: torch.Tensor = vars(module)["_parameters"][name]
    hook = _hook_of(module)
    return hook.weights_map[name] if weight.is_meta and hook is not None and hook.offload else weight


def _weights(module: nn.Module) -> dict[str, torch.Tensor]:
    """A module's own weights, by name."""
    return {name: weight for name, weight in vars(module)["_parameters"].items() if weight is not None}


def _hook_of(module: nn.Module) -> Any:
    """The hook of accelerate that moves a module's inputs; ``None`` without one."""
    hook = getattr(module, "_hf_hook", None)
    hooks = getattr(hook, "hooks", [hook])
    return next((each for each in hooks if getattr(each, "execution_device", None) is not None), None)


def _refuse_disk(model: "PreTrainedModel") -> None:
    """Refuses parts on disk, which every forward would read again."""
    places: dict[str, Any] = getattr(model, "hf_device_map", None) or {}
    names = [name for name, place in places.items() if place == "disk"] or sorted(_on_disk(model))
    if names:
        more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
        raise UnsupportedModelError(
            f"{', '.join(names[:_NAMED])}{more} of this model are on disk, which every forward would read again; give "
            "device_map more memory (max_memory), more devices, or load the model in fewer bits"
        )


def _on_disk(model: nn.Module) -> Iterator[str]:
    """The modules whose hook reads their weights from files."""
    for name, module in model.named_modules():
        hook = _hook_of(module)
        if hook is not None and hook.offload:
            loader = getattr(hook.weights_map, "dataset", hook.weights_map)
            in_memory, prefix = getattr(loader, "state_dict", loader), getattr(hook.weights_map, "prefix", "")
            if any(f"{prefix}{weight}" not in in_memory for weight in _weights(module)):
                yield name
