"""Experts of a checkpoint in MXFP4, as those of gpt-oss: floats of four bits with a power of two for each 32 inputs."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from selfspec.errors import ModelLoadError
from selfspec.model.safetensors_files import SafetensorsFiles
from selfspec.runtimes.formats import GGUF_FORMATS
from selfspec.runtimes.mixtures import EXPERT_WEIGHTS
from selfspec.runtimes.packed import LowBitExperts, LowBitLinear, PackedWeights

FORM = GGUF_FORMATS["MXFP4"]

_BLOCKS, _SCALES = "blocks", "scales"
_NO_NUMBER = 255
"""The exponent of blocks whose values are no numbers."""
_POSITIVE = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_VALUES = torch.tensor([*_POSITIVE, *(-value for value in _POSITIVE)])
"""By code."""


@dataclass(frozen=True, eq=False)
class StoredExperts:
    """All experts of one layer in a checkpoint.

    Attributes:
        files: the checkpoint.
        name: of their module.
        module: transformers' experts, whose weights are ``[experts, inputs, outputs]``.
    """

    files: SafetensorsFiles
    name: str
    module: Any

    @property
    def names(self) -> tuple[str, ...]:
        """The tensors that hold the weights."""
        return tuple(f"{self.name}.{weight}_{kind}" for weight in EXPERT_WEIGHTS for kind in (_BLOCKS, _SCALES))

    def bytes(self, itemsize: int | None) -> int:
        """What the weights take: as they are, or as numbers of ``itemsize`` bytes."""
        shapes = [self._shape(weight) for weight in EXPERT_WEIGHTS]
        if itemsize is None:
            return sum(FORM.bytes(experts * outputs, inputs) for experts, outputs, inputs in shapes)
        return sum(experts * outputs * inputs * itemsize for experts, outputs, inputs in shapes)

    def check(self) -> None:
        """Refuses tensors that are missing, or of another shape."""
        for weight in EXPERT_WEIGHTS:
            if (inputs := self._shape(weight)[2]) % FORM.unit:
                raise ModelLoadError(
                    f"the {inputs} inputs of {self.name}.{weight} are not whole blocks of {FORM.unit}, as MXFP4 needs; "
                    "take another checkpoint"
                )
        for weight in EXPERT_WEIGHTS:
            experts, outputs, inputs = self._shape(weight)
            blocks, scales = (f"{self.name}.{weight}_{kind}" for kind in (_BLOCKS, _SCALES))
            self.files.check(blocks, (experts, outputs, inputs // FORM.unit, FORM.unit // 2), "U8")
            self.files.check(scales, (experts, outputs, inputs // FORM.unit), "U8")

    def pack(self, dtype: torch.dtype, biases: Mapping[str, torch.Tensor]) -> LowBitExperts:
        """The experts with the weights as they are, for rows of a dtype; the biases are by their tensors' names."""
        layers = []
        for weight in EXPERT_WEIGHTS:
            bias = biases.get(f"{self.name}.{weight}_bias")
            blocks, scales = self._read(weight)
            packed = PackedWeights.of_mxfp4(blocks.flatten(0, 1), scales.flatten(0, 1))
            layers.append(LowBitLinear(packed, None if bias is None else bias.flatten(), dtype))
        return LowBitExperts(self.module, *layers)

    def values(self, weight: str, dtype: torch.dtype) -> torch.Tensor:
        """The numbers of one of ``EXPERT_WEIGHTS``, ``[experts, inputs, outputs]``."""
        parameter = torch.empty(getattr(self.module, weight).shape, dtype=dtype)
        for made, blocks, scales in zip(parameter, *self._read(weight), strict=True):
            codes = torch.stack([blocks & 15, blocks >> 4], -1).flatten(-2).int()
            made.copy_(torch.ldexp(_VALUES[codes], scales[..., None].int() - 127).flatten(1).T)
        return parameter

    def _read(self, weight: str) -> tuple[torch.Tensor, torch.Tensor]:
        blocks, scales = (self.files.read(f"{self.name}.{weight}_{kind}") for kind in (_BLOCKS, _SCALES))
        if int(scales.max()) == _NO_NUMBER:
            raise ModelLoadError(f"{self.name}.{weight} has blocks that are no numbers; download the checkpoint again")
        return blocks, scales

    def _shape(self, weight: str) -> tuple[int, int, int]:
        """Experts, outputs and inputs."""
        experts, inputs, outputs = getattr(self.module, weight).shape
        return experts, outputs, inputs


def find_experts(files: SafetensorsFiles, modules: Mapping[str, nn.Module]) -> dict[str, StoredExperts]:
    """The experts of a model that a checkpoint has in MXFP4, by the names of their modules."""
    found = {}
    for name, module in modules.items():
        if any(f"{name}.{weight}_{_BLOCKS}" in files.names for weight in EXPERT_WEIGHTS):
            found[name] = StoredExperts(files, name, module)
            found[name].check()
    return found
