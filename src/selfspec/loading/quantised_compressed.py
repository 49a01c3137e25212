"""How compressed-tensors stores the weights of a linear layer."""

from collections.abc import Mapping
from typing import Any

import torch

from selfspec.errors import ModelLoadError, UnsupportedModelError
from selfspec.loading.filling import StoredWeight
from selfspec.loading.quantised_weights import (
    FLOATS,
    WORD,
    Finder,
    Grid,
    find_bits,
    grid_weight,
    steps,
    whole_groups,
    words_of,
)
from selfspec.model.safetensors_files import SafetensorsFiles
from selfspec.runtimes.packed_codes import PackedCodes

_INT_FORMATS = ("pack-quantized", "int-quantized", "naive-quantized")


def find_compressed_layout(settings: Mapping[str, Any]) -> Finder | None:
    """See ``quantised_model.find_layout``."""
    groups = [group for group in (settings.get("config_groups") or {}).values() if isinstance(group, Mapping)]
    formats = {group.get("format") or settings.get("format") for group in groups}
    if not groups or not formats <= set(_INT_FORMATS):
        return None
    if any(group.get("input_activations") or group.get("output_activations") for group in groups):
        raise UnsupportedModelError(
            "this checkpoint of compressed-tensors quantises the inputs of layers while it runs, so that rows are not "
            "those of its weights; take one whose weights alone are quantised (w4a16, w8a16), or a GGUF file"
        )
    if settings.get("kv_cache_scheme"):
        raise UnsupportedModelError(
            "this checkpoint of compressed-tensors quantises keys and values while it runs; take one without a "
            "kv_cache_scheme, or a GGUF file"
        )
    return _compressed_tensors


def _compressed_tensors(files: SafetensorsFiles, name: str, shape: tuple[int, int]) -> StoredWeight | None:
    """Words of inputs, or bytes with a sign; zeros are packed along the outputs, or bytes with a sign."""
    scales, zeros, index = (f"{name}.weight_{each}" for each in ("scale", "zero_point", "g_idx"))
    if scales not in files.names:
        return None
    outputs, inputs = shape
    weight, is_packed = f"{name}.weight_packed", f"{name}.weight_packed" in files.names
    weight = weight if is_packed else f"{name}.weight"
    bits = find_bits(weight, (files.shape(weight) or (0,))[-1], inputs, (2, 4, 8)) if is_packed else 8
    line = words_of(inputs, bits) if is_packed else inputs
    files.check(weight, (outputs, line), "I32" if is_packed else "I8")
    found = files.shape(scales)
    groups = found[1] if len(found) == 2 else 1
    files.check(scales, found if found in ((), (1,)) else (outputs, groups), *FLOATS)
    group_of = whole_groups(scales, inputs, groups)
    has_zeros = zeros in files.names
    if has_zeros and is_packed:
        files.check(zeros, (words_of(outputs, bits), groups), "I32")
    elif has_zeros:
        files.check(zeros, found, "I8")
    if index in files.names:
        given = files.read(files.check(index, (inputs,), "I32", "I64")).long()
        if not (given == -1).all():  # as it is where no order was chosen
            if given.min() < 0 or given.max() >= groups or (torch.bincount(given) != inputs // groups).any():
                raise ModelLoadError(f"{index} does not put as many inputs into each group; the checkpoint is damaged")
            group_of = given
    of_shape = f"{name}.weight_shape"
    if of_shape in files.names and files.read(files.check(of_shape, (2,))).tolist() != [outputs, inputs]:
        raise ModelLoadError(f"{of_shape} is not {[outputs, inputs]}, which its layer has; the checkpoint is damaged")

    def read() -> Grid:
        codes = PackedCodes(
            files.read(weight),
            bits,
            steps(outputs, line * (WORD if is_packed else 8)),
            steps(inputs, bits),
            0 if is_packed else 128,
        )
        half = torch.full((outputs, groups), 1 << (bits - 1), dtype=torch.int16)
        if has_zeros and is_packed:
            each = WORD // bits
            places = steps(outputs) // each * groups * WORD + steps(outputs) % each * bits
            half = PackedCodes(files.read(zeros), bits, places, steps(groups, WORD)).read()
        elif has_zeros:
            half = half + files.read(zeros).to(torch.int16)
        return Grid(codes, files.read(scales).float().expand(outputs, groups), half)

    used = {weight, scales, zeros, index, of_shape} & set(files.names)
    return grid_weight(name, used, "compressed-tensors", bits, group_of, read)
