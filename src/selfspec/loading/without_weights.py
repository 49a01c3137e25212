"""Models without weights, which are then filled tensor by tensor."""

from typing import TYPE_CHECKING, Any

import torch
import transformers
from transformers import PreTrainedConfig

from selfspec.errors import UnsupportedModelError, first_line

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def build_on_meta(config: PreTrainedConfig) -> "PreTrainedModel":
    """A model whose parameters are on the device ``meta``, in eval mode.

    Buffers, as of rope, have their values, but for those that checkpoints hold.

    Raises:
        UnsupportedModelError: transformers cannot build a model of this config.
    """
    try:
        with torch.device("meta"):
            model: Any = transformers.AutoModelForCausalLM.from_config(config)  # type: ignore[no-untyped-call]
        modules = list(model.modules())
        for module in modules:
            module._buffers = {name: _unknown(buffer) for name, buffer in module._buffers.items()}
        for module in modules:
            if module._buffers or isinstance(module, transformers.PreTrainedModel):
                model._init_weights(module)  # as transformers itself does after it has loaded weights
    except Exception as error:  # torch and transformers have many errors for sizes that do not fit
        raise UnsupportedModelError(
            f"transformers cannot build the {config.model_type} model that the file describes: {first_line(error)}"
        ) from error
    stored = model.state_dict().keys()
    for name, buffer in model.named_buffers():
        if name not in stored and buffer.isnan().any():
            raise UnsupportedModelError(
                f"transformers gives no value to the buffer {name} of a {config.model_type} model"
            )
    built: PreTrainedModel = model.eval()
    return built


def _unknown(buffer: torch.Tensor | None) -> torch.Tensor | None:
    return None if buffer is None else torch.full_like(buffer, torch.nan, device="cpu")
