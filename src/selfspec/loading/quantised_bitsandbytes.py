"""How bitsandbytes stores the weights of a linear layer: at 8 bits, or as codes of a table at 4 (NF4, FP4)."""

import json
from typing import Any

import torch

from selfspec.errors import ModelLoadError, UnsupportedModelError
from selfspec.loading.filling import StoredWeight
from selfspec.loading.quantised_weights import Grid, grid_weight, steps
from selfspec.model.safetensors_files import SafetensorsFiles
from selfspec.runtimes.packed_codes import PackedCodes

_AT_ONCE = 1 << 16
"""Blocks that are read together."""

_MOST_WEIGHTS = 1 << 16
"""Of a block; bitsandbytes has at most 4096."""


def find_bitsandbytes(files: SafetensorsFiles, name: str, shape: tuple[int, int]) -> StoredWeight | None:
    """Bytes with a sign and a scale an output; or codes of a table of 16 numbers, which no grid has."""
    weight, scales, layout = f"{name}.weight", f"{name}.SCB", f"{name}.weight_format"
    outputs, inputs = shape
    if scales not in files.names:
        return _find_table(files, weight, shape)
    files.check(weight, shape, "I8")
    files.check(scales, (outputs,), "F32")
    if layout in files.names and files.read(layout).flatten().tolist() != [0]:
        raise UnsupportedModelError(f"{layout} is not that of rows; save the checkpoint again with bitsandbytes 0.44")

    def read() -> Grid:
        codes = PackedCodes(files.read(weight), 8, steps(outputs, inputs * 8), steps(inputs, 8), 128)
        return Grid(codes, files.read(scales)[:, None] / 127, torch.full((outputs, 1), 128, dtype=torch.int16))

    used = {weight, scales, layout} & set(files.names)
    return grid_weight(name, used, "bitsandbytes", 8, torch.zeros(inputs, dtype=torch.long), read)


def _find_table(files: SafetensorsFiles, weight: str, shape: tuple[int, int]) -> StoredWeight | None:
    """Codes of a table with a scale for a block. Blocks run over the rows one after the other."""
    states = [f"{weight}.quant_state.bitsandbytes__{kind}" for kind in ("nf4", "fp4")]
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

    def values(dtype: torch.dtype) -> torch.Tensor:
        codes, table, scales = (files.read(each) for each in (weight, f"{weight}.quant_map", f"{weight}.absmax"))
        if nested:  # the scales are codes themselves
            outer, of_scales = (files.read(f"{weight}.nested_{each}") for each in ("absmax", "quant_map"))
            scales = of_scales[scales.long()] * outer.repeat_interleave(nested)[:blocks] + added
        if not (scales.isfinite().all() and table.isfinite().all()):
            raise ModelLoadError(f"scales of {weight} are no finite numbers; the checkpoint is damaged")
        made = torch.empty(count, dtype=dtype)
        pairs = torch.stack([table.repeat_interleave(16), table.repeat(16)], dim=1)  # by byte; the high bits are first
        for first in range(0, blocks, _AT_ONCE):
            last = min(count, (first + _AT_ONCE) * size)
            some = pairs[codes.view(-1)[first * size // 2 : (last + 1) // 2].long()].view(-1)
            own = scales[first : first + _AT_ONCE].repeat_interleave(size)[: last - first * size]
            made[first * size : last] = some[: len(own)] * own
        return made.view(shape)

    return StoredWeight(tuple(names), values)


def _read_state(files: SafetensorsFiles, name: str, shape: tuple[int, int]) -> tuple[int, int, float]:
    """Weights of a block; scales of a block of scales, 0 where these are numbers; what is added to scales."""
    try:
        state: Any = json.loads(bytes(files.read(name).flatten().tolist()))
        size, nested = int(state["blocksize"]), int(state.get("nested_blocksize") or 0)
        added, own = float(state.get("nested_offset") or 0), tuple(state["shape"])
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ModelLoadError(f"{name} cannot be read; the checkpoint is damaged") from error
    if own != shape or not 2 <= size <= _MOST_WEIGHTS or size % 2 or not 0 <= nested <= _MOST_WEIGHTS:
        raise ModelLoadError(
            f"{name} describes {str(list(own))[:40]} weights in blocks of {str(size)[:20]}, whose scales are in blocks "
            f"of {str(nested)[:20]}, but its layer has {list(shape)}, and blocks have {_MOST_WEIGHTS:,} at most; the "
            "checkpoint is damaged"
        )
    return size, nested, added
