"""The tensors of a multi-token-prediction head in a GGUF file, by the names that checkpoints have for them.

llama.cpp has such a head as one more block, with a projection and norms beside its layer (``nextn``).
"""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch

from selfspec.loading.gguf_file import GgufFile
from selfspec.loading.gguf_header import GgufTensor
from selfspec.loading.gguf_own import BY_MODEL_TYPE
from selfspec.loading.gguf_settings import damaged
from selfspec.loading.gguf_tensors import Source, find_next_layer, subtract_one

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_OWN = {
    "eh_proj": "nextn.eh_proj",
    "enorm": "nextn.enorm",
    "hnorm": "nextn.hnorm",
    "shared_head.norm": "nextn.shared_head_norm",
}
"""What a head has beside its layer, by its names in checkpoints."""


@dataclass(frozen=True, eq=False)
class GgufHead:
    """The tensors of a head. The file is open only while one of them is read.

    Attributes:
        path: of the file.
        sources: where the values of each are, by name.
        shapes: of the values, by name.
        values: gives those of a tensor of the file.
    """

    path: Path
    sources: Mapping[str, Source]
    shapes: Mapping[str, tuple[int, ...]]
    values: Callable[[GgufTensor], npt.NDArray[np.float32]]

    @classmethod
    def find(
        cls, file: GgufFile, model: "PreTrainedModel", values: Callable[[GgufTensor], npt.NDArray[np.float32]]
    ) -> "GgufHead | None":
        """The first head in the file of a model; ``None`` where there is none, or where it is like no layer."""
        family = BY_MODEL_TYPE[model.config.model_type]
        layers = int(model.config.num_hidden_layers)
        block, prefix = f"blk.{layers}.", f"model.layers.{layers}."
        if family.own_heads or f"{block}nextn.eh_proj.weight" not in file.tensors:
            return None
        sources, shapes = find_next_layer(file.tensors, model)
        for name, tensor in _OWN.items():
            if (full := f"{block}{tensor}.weight") not in file.tensors:
                full = "output_norm.weight" if name == "shared_head.norm" else full
            if full not in file.tensors:
                raise damaged(f"the tensor {full} of the multi-token-prediction head is missing")
            change = subtract_one if family.norms_plus_one and name.endswith("norm") else None
            sources[f"{prefix}{name}.weight"] = Source((full,), change=change)
            shapes[f"{prefix}{name}.weight"] = file.tensors[full].shape
        return cls(file.path, sources, shapes, values)

    @property
    def names(self) -> Collection[str]:
        """Of all tensors."""
        return self.sources.keys()

    def check(self, name: str, shape: tuple[int, ...]) -> str:
        """Refuses a tensor of another shape; returns its name."""
        if self.shapes[name] != shape:
            raise damaged(
                f"{name} is {list(self.shapes[name])} in '{self.path}', but the multi-token-prediction head needs "
                f"{list(shape)}"
            )
        return name

    def read(self, name: str) -> torch.Tensor:
        """The values of a tensor, float32."""
        with GgufFile.open(self.path) as file:
            found = self.sources[name].read(lambda tensor: self.values(file.tensors[tensor]))
            return torch.from_numpy(found.copy()).view(self.shapes[name])
