"""A multi-token-prediction head of a family's own layer, for a tiny random model."""

from collections.abc import Collection
from typing import Any

import torch
from transformers import PreTrainedModel

from selfspec.errors import UnsupportedModelError

_OF_STATE = 0.05
"""How much of the hidden state the projection adds to the token's embedding."""


class TinyHead:
    """The tensors of a head that is often right, as checkpoints name them.

    Args:
        model: from ``tiny_model``, whose first layer does most of what it does; it, or the first that attends, is the
            head's layer.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        config: Any = model.config
        types = list(getattr(config, "layer_types", None) or ())
        attends = [index for index, kind in enumerate(types) if kind in ("full_attention", "sliding_attention")]
        layer, state = f"model.layers.{attends[0] if attends else 0}.", model.state_dict()
        norm = state.get("model.norm.weight")
        self._tensors: dict[str, torch.Tensor] = {
            name.replace(layer, "mtp.layers.0."): each for name, each in state.items() if name.startswith(layer)
        }
        if norm is not None:
            eye = torch.eye(len(norm))
            one = torch.full_like(norm, 1.0 if norm.abs().max() <= 3 else 0.0)  # some norms multiply by one more
            self._tensors |= {
                "mtp.fc.weight": torch.cat([eye, _OF_STATE * eye], dim=1),
                "mtp.pre_fc_norm_embedding.weight": one,
                "mtp.pre_fc_norm_hidden.weight": one,
                "mtp.norm.weight": norm,
            }

    @property
    def names(self) -> Collection[str]:
        """Of all tensors."""
        return self._tensors.keys()

    def check(self, name: str, shape: tuple[int, ...]) -> str:
        """Refuses a tensor that is missing or of another shape."""
        if name not in self._tensors or self._tensors[name].shape != shape:
            raise UnsupportedModelError(f"the model has no {name} of the shape {shape}")
        return name

    def read(self, name: str) -> torch.Tensor:
        """A copy of a tensor."""
        return self._tensors[name].clone()
