"""Which layout a quantised checkpoint has: that of GPTQ, AWQ, compressed-tensors or bitsandbytes.

Each finder is given the name of a linear layer and its shape. It says what is stored for it, which has been checked by
shapes and dtypes, and how it is read; ``None`` where the layer is stored as ordinary numbers.
"""

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch

from selfspec.errors import UnsupportedModelError
from selfspec.loading.bitsandbytes_tables import find_table
from selfspec.loading.quantised_compressed import find_compressed_layout
from selfspec.loading.quantised_gptq import find_awq, find_gptq
from selfspec.loading.quantised_grid import Grid, find_form
from selfspec.loading.quantised_parts import Finder, StoredLinear, steps, stored_grid
from selfspec.model.safetensors_files import SafetensorsFiles
from selfspec.runtimes.packed_codes import PackedCodes

MXFP4 = "mxfp4"
"""The ``quant_method`` of checkpoints whose experts are in MXFP4 (``quantised_mxfp4.py``)."""


def find_layout(settings: Mapping[str, Any]) -> Finder | None:
    """The layout that a config's ``quantization_config`` names; ``None`` for those that only transformers knows.

    Raises:
        UnsupportedModelError: inputs of layers, or keys and values, are quantised as well.
    """
    method = settings.get("quant_method")
    kind = settings.get("checkpoint_format") or settings.get("version") or settings.get("format")
    if method == "gptq" and kind in (None, "gptq", "gptq_v2"):
        return partial(find_gptq, subtracted=kind != "gptq_v2")
    if method == "awq" and str(kind or "gemm").lower() == "gemm":
        return find_awq
    if method == "bitsandbytes":
        return _bitsandbytes
    if method == MXFP4:
        return _ordinary
    if method == "compressed-tensors":
        return find_compressed_layout(settings)
    return None


def _ordinary(files: SafetensorsFiles, name: str, shape: tuple[int, int]) -> StoredLinear | None:
    """No linear layer has few bits."""
    return None


def _bitsandbytes(files: SafetensorsFiles, name: str, shape: tuple[int, int]) -> StoredLinear | None:
    """Bytes with a sign and a scale an output; or codes of a table of 16 numbers, which no grid has."""
    weight, scales, layout = f"{name}.weight", f"{name}.SCB", f"{name}.weight_format"
    outputs, inputs = shape
    if scales not in files.names:
        table = find_table(files, name, shape)
        return None if table is None else StoredLinear(table.names, None, None, table.read)
    files.check(weight, shape, "I8")
    files.check(scales, (outputs,), "F32")
    if layout in files.names and files.read(layout).flatten().tolist() != [0]:
        raise UnsupportedModelError(f"{layout} is not that of rows; save the checkpoint again with bitsandbytes 0.44")
    group_of = torch.zeros(inputs, dtype=torch.long)

    def read() -> Grid:
        codes = PackedCodes(files.read(weight), 8, steps(outputs, inputs * 8), steps(inputs, 8), 128)
        zeros = torch.full((outputs, 1), 128, dtype=torch.int16)
        return Grid(codes, files.read(scales)[:, None] / 127, zeros, group_of).check(name)

    used = tuple({weight, scales, layout} & set(files.names))
    return stored_grid(used, find_form(8, group_of, "bitsandbytes"), read)
