"""Gives a model on ``meta`` the weights that a checkpoint stores, of which some keep their few bits."""

from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from selfspec.loading.without_weights import put
from selfspec.runtimes.formats import TILE, PackedFormat
from selfspec.runtimes.packed import LowBitEmbedding, LowBitExperts, LowBitLinear, PackedWeights

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True, eq=False)
class StoredWeight:
    """A parameter of a model, or a buffer, as a checkpoint stores it.

    Attributes:
        names: of the tensors that it is read from.
        values: the numbers in a dtype, ``[outputs, inputs]``; those of experts as the model has them.
        form: the format that keeps its numbers; ``None`` where it becomes numbers of a dtype.
        pack: lays it out for the kernels, in that format.
    """

    names: tuple[str, ...]
    values: Callable[[torch.dtype], torch.Tensor]
    form: PackedFormat | None = None
    pack: Callable[[], PackedWeights] | None = None

    def bytes(self, shape: torch.Size, dtype: torch.dtype) -> int:
        """What the parameter takes in a model of a dtype."""
        if self.form is None:
            return shape.numel() * dtype.itemsize
        if len(shape) == 2:
            return self.form.bytes(*shape)
        return -(-shape.numel() // (TILE * self.form.unit)) * self.form.unit_bytes


def fill(model: "PreTrainedModel", weights: Mapping[str, StoredWeight], dtype: torch.dtype) -> None:
    """Reads all parameters, and the buffers that checkpoints have, by their names."""
    outer: Any = model
    modules, embedding, head = dict(model.named_modules()), outer.get_input_embeddings(), outer.get_output_embeddings()
    is_tied = head is not None and head.weight is embedding.weight
    layers: dict[str, dict[str, LowBitLinear]] = defaultdict(dict)
    biases = {_bias_of(name) for name, weight in weights.items() if weight.pack is not None}
    for name, weight in weights.items():
        path, _, kind = name.rpartition(".")
        if weight.pack is not None:
            bias = weights.get(_bias_of(name))
            own_bias = None if bias is None else bias.values(dtype).flatten()
            layers[path][kind] = LowBitLinear(weight.pack(), own_bias, dtype)
        elif name not in biases:
            put(modules[path], kind, weight.values(torch.float32 if kind in modules[path]._buffers else dtype))
    for path, kinds in layers.items():
        module, (parent, _, last) = modules[path], path.rpartition(".")
        made: nn.Module = kinds["weight"] if "weight" in kinds else LowBitExperts(module, *kinds.values())
        if isinstance(module, nn.Embedding):
            made = LowBitEmbedding(kinds["weight"], dtype, scale=getattr(module, "scalar_embed_scale", None))
            if module is embedding and is_tied:
                outer.set_output_embeddings(kinds["weight"].eval())
        setattr(modules[parent], last, made.eval())
    head = outer.get_output_embeddings()
    if isinstance(head, nn.Linear) and head.weight.is_meta:  # it is tied
        head.weight = embedding.weight


def _bias_of(name: str) -> str:
    """The bias beside a weight: ``bias`` beside ``weight``, ``down_proj_bias`` beside ``down_proj``."""
    path, _, kind = name.rpartition(".")
    return f"{path}.bias" if kind == "weight" else f"{name}_bias"
