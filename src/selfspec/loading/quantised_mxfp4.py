"""Experts of a checkpoint in MXFP4, as those of gpt-oss: floats of four bits with a power of two for each 32 inputs."""

from collections.abc import Iterator
from typing import Any

import torch

from selfspec.errors import ModelLoadError
from selfspec.loading.filling import StoredWeight
from selfspec.model.safetensors_files import SafetensorsFiles
from selfspec.runtimes.formats import GGUF_FORMATS
from selfspec.runtimes.mixtures import EXPERT_WEIGHTS
from selfspec.runtimes.packed import PackedWeights

_FORM = GGUF_FORMATS["MXFP4"]
_NO_NUMBER = 255
"""The exponent of blocks whose values are no numbers."""
_POSITIVE = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_VALUES = torch.tensor([*_POSITIVE, *(-value for value in _POSITIVE)])
"""By code."""


def find_experts(files: SafetensorsFiles, path: str, module: Any) -> Iterator[tuple[str, StoredWeight]]:
    """The weights of experts that a checkpoint has in MXFP4, by name; none if it does not, or ``module`` has no such.

    Those of transformers are ``[experts, inputs, outputs]``.
    """
    names = [f"{path}.{weight}" for weight in EXPERT_WEIGHTS]
    if not any(f"{name}_blocks" in files.names for name in names):
        return
    shapes = [tuple(getattr(module, weight).shape) for weight in EXPERT_WEIGHTS]
    for name, (_, inputs, _) in zip(names, shapes, strict=True):
        if inputs % _FORM.unit:
            raise ModelLoadError(
                f"the {inputs} inputs of {name} are not whole blocks of {_FORM.unit}, as MXFP4 needs; take another "
                "checkpoint"
            )
    for name, shape in zip(names, shapes, strict=True):
        yield name, _find(files, name, shape)


def _find(files: SafetensorsFiles, name: str, shape: tuple[int, int, int]) -> StoredWeight:
    experts, inputs, outputs = shape
    units = experts, outputs, inputs // _FORM.unit
    tensors = files.check(f"{name}_blocks", (*units, _FORM.unit // 2), "U8"), files.check(f"{name}_scales", units, "U8")

    def read() -> list[torch.Tensor]:
        blocks, scales = map(files.read, tensors)
        if int(scales.max()) == _NO_NUMBER:
            raise ModelLoadError(f"{name} has blocks that are no numbers; download the checkpoint again")
        return [blocks, scales]

    def values(dtype: torch.dtype) -> torch.Tensor:
        parameter = torch.empty(shape, dtype=dtype)
        for made, blocks, scales in zip(parameter, *read(), strict=True):
            codes = torch.stack([blocks & 15, blocks >> 4], -1).flatten(-2).int()
            made.copy_(torch.ldexp(_VALUES[codes], scales[..., None].int() - 127).flatten(1).T)
        return parameter

    return StoredWeight(
        tensors, values, _FORM, lambda: PackedWeights.of_mxfp4(*(each.flatten(0, 1) for each in read()))
    )
