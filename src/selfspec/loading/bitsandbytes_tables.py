"""Weights of bitsandbytes at 4 bits (NF4, FP4): codes of a table of 16 numbers, with a scale for a block."""

import json
from dataclasses import dataclass
from typing import Any

import torch

from selfspec.errors import ModelLoadError
from selfspec.model.safetensors_files import SafetensorsFiles

_KINDS = ("nf4", "fp4")


@dataclass(frozen=True, eq=False)
class Table:
    """The weights of a linear layer, ``[outputs, inputs]``. Blocks run over the rows one after the other.

    Attributes:
        files: the checkpoint.
        name: of the weight.
        shape: of the layer.
        names: the tensors that hold the weights.
        blocks: weights of a block, and scales of a block of scales that are themselves codes; else 0.
        added: to such scales.
    """

    files: SafetensorsFiles
    name: str
    shape: tuple[int, int]
    names: tuple[str, ...]
    blocks: tuple[int, int]
    added: float

    def read(self, dtype: torch.dtype) -> torch.Tensor:
        """The values in a dtype."""
        bytes_, table = (self.files.read(each) for each in (self.name, f"{self.name}.quant_map"))
        scales = self._read_scales()
        if not (scales.isfinite().all() and table.isfinite().all()):
            raise ModelLoadError(f"scales of {self.name} are no finite numbers; the checkpoint is damaged")
        made = torch.empty(self.shape[0] * self.shape[1], dtype=dtype)
        pairs = torch.stack([table.repeat_interleave(16), table.repeat(16)], dim=1)  # by byte; the high bits are first
        size, at_once = self.blocks[0], 1 << 16
        for first in range(0, len(scales), at_once):
            last = min(len(made), (first + at_once) * size)
            values = pairs[bytes_.view(-1)[first * size // 2 : (last + 1) // 2].long()].view(-1)
            own = scales[first : first + at_once].repeat_interleave(size)[: last - first * size]
            made[first * size : last] = values[: len(own)] * own
        return made.view(self.shape)

    def _read_scales(self) -> torch.Tensor:
        scales = self.files.read(f"{self.name}.absmax")
        if not self.blocks[1]:
            return scales
        outer, table = (self.files.read(f"{self.name}.nested_{each}") for each in ("absmax", "quant_map"))
        own = outer.repeat_interleave(self.blocks[1])[: len(scales)]
        return table[scales.long()] * own + self.added


def find_table(files: SafetensorsFiles, name: str, shape: tuple[int, int]) -> Table | None:
    """The weights of a linear layer; ``None`` where they are not stored as codes of a table."""
    weight = f"{name}.weight"
    states = [f"{weight}.quant_state.bitsandbytes__{kind}" for kind in _KINDS]
    state = next((each for each in states if each in files.names), None)
    if state is None:
        return None
    size, nested, added = _read_state(files, state, shape)
    count = shape[0] * shape[1]
    blocks, names = -(-count // size), [weight, state]
    names.append(files.check(weight, ((count + 1) // 2, 1), "U8"))
    names.append(files.check(f"{weight}.quant_map", (16,), "F32"))
    names.append(files.check(f"{weight}.absmax", (blocks,), "U8" if nested else "F32"))
    if nested:
        names.append(files.check(f"{weight}.nested_absmax", (-(-blocks // nested),), "F32"))
        names.append(files.check(f"{weight}.nested_quant_map", (256,), "F32"))
    return Table(files, weight, shape, tuple(names), (size, nested), added)


def _read_state(files: SafetensorsFiles, name: str, shape: tuple[int, int]) -> tuple[int, int, float]:
    """Weights of a block, scales of a block, what is added to these."""
    try:
        state: Any = json.loads(bytes(files.read(name).flatten().tolist()))
        size, nested = int(state["blocksize"]), int(state.get("nested_blocksize") or 0)
        added, own = float(state.get("nested_offset") or 0), tuple(state["shape"])
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ModelLoadError(f"{name} cannot be read; the checkpoint is damaged") from error
    if own != shape or size < 2 or size % 2 or nested < 0:
        raise ModelLoadError(
            f"{name} describes {list(own)} weights in blocks of {size}, but its layer has {list(shape)}; "
            "the checkpoint is damaged"
        )
    return size, nested, added
