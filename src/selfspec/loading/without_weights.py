"""Models without weights, which are then filled tensor by tensor."""

from typing import TYPE_CHECKING, Any

import torch
import transformers
from torch import nn
from transformers import PreTrainedConfig

from selfspec.errors import UnsupportedModelError, explaining

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_MOST_BUFFER_BYTES = 2**30
"""No model has nearly as many. Some have a buffer of all pairs of positions, which a damaged file may choose freely."""


def shapes_of(config: PreTrainedConfig, **options: Any) -> Any:
    """A model of this config on the device ``meta``, buffers too, which allocates nothing."""
    make: Any = transformers.AutoModelForCausalLM.from_config
    with torch.device("meta"):
        return make(config, **options)


def build_on_meta(config: PreTrainedConfig) -> "PreTrainedModel":
    """A model whose parameters are on the device ``meta``, in eval mode.

    Buffers, as of rope, have their values, but for those that checkpoints hold.

    Raises:
        UnsupportedModelError: transformers cannot build a model of this config, or its buffers take too much memory.
    """
    what = f"transformers cannot build the {config.model_type} model that the file describes"
    with explaining(UnsupportedModelError, what):  # torch and transformers have many errors for sizes that do not fit
        model = shapes_of(config)
        _check_buffers(model)
        modules = list(model.modules())
        for module in modules:
            module._buffers = {name: _unknown(buffer) for name, buffer in module._buffers.items()}
        for module in modules:
            if module._buffers or isinstance(module, transformers.PreTrainedModel):
                model._init_weights(module)  # as transformers itself does after it has loaded weights
    stored = model.state_dict().keys()
    for name, buffer in model.named_buffers():
        if name not in stored and buffer.isnan().any():
            raise UnsupportedModelError(
                f"transformers gives no value to the buffer {name} of a {config.model_type} model"
            )
    built: PreTrainedModel = model.eval()
    return built


def stored_values(model: "PreTrainedModel") -> dict[str, torch.Tensor]:
    """The parameters of a model, and the buffers that checkpoints have, by name."""
    kept = model.state_dict().keys()
    buffers = {name: buffer for name, buffer in model.named_buffers() if name in kept}
    return {**dict(model.named_parameters()), **buffers}


def put(module: nn.Module, kind: str, values: torch.Tensor) -> None:
    """Gives a module on ``meta`` a parameter or a buffer."""
    if kind in module._buffers:
        module._buffers[kind] = values
    else:
        setattr(module, kind, nn.Parameter(values, requires_grad=False))


def _check_buffers(model: nn.Module) -> None:
    needed = sum(buffer.nbytes for buffer in model.buffers())
    if needed > _MOST_BUFFER_BYTES:
        raise ValueError(f"its buffers take {needed:,} bytes, and at most {_MOST_BUFFER_BYTES:,} are allowed")


def _unknown(buffer: torch.Tensor | None) -> torch.Tensor | None:
    return None if buffer is None else torch.full_like(buffer, torch.nan, device="cpu")
