"""How checkpoints of GPTQ, AWQ, compressed-tensors and bitsandbytes store the weights of a linear layer.

Each finder is given the name of a linear layer and its shape. It says what is stored for it, which has been checked by
shapes and dtypes, and how it is read; ``None`` where the layer is stored as ordinary numbers.
"""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch

from selfspec.errors import ModelLoadError, UnsupportedModelError
from selfspec.loading.bitsandbytes_tables import find_table
from selfspec.loading.quantised_grid import Grid, find_form
from selfspec.loading.safetensors_files import SafetensorsFiles
from selfspec.runtimes.formats import GRID_BITS, PackedFormat
from selfspec.runtimes.packed_codes import PackedCodes

_WORD = 32
_FLOATS = ("F16", "BF16", "F32")
_AWQ_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)
"""In which four bits of a word AWQ has each of eight outputs."""

_INT_FORMATS = ("pack-quantized", "int-quantized", "naive-quantized")


@dataclass(frozen=True, eq=False)
class StoredLinear:
    """The weights of a linear layer in a checkpoint.

    Attributes:
        names: the tensors that hold them.
        form: the format in which they keep their numbers; ``None`` where they fit none.
        grid: reads them where they are a grid.
        values: reads them in a dtype.
    """

    names: tuple[str, ...]
    form: PackedFormat | None
    grid: Callable[[], Grid]
    values: Callable[[torch.dtype], torch.Tensor]


Finder: TypeAlias = Callable[[SafetensorsFiles, str, tuple[int, int]], StoredLinear | None]


def find_layout(settings: Mapping[str, Any]) -> Finder | None:
    """The layout that a config's ``quantization_config`` names; ``None`` for those that only transformers knows.

    Raises:
        UnsupportedModelError: inputs of layers, or keys and values, are quantised as well.
    """
    method = settings.get("quant_method")
    kind = settings.get("checkpoint_format") or settings.get("version") or settings.get("format")
    if method == "gptq" and kind in (None, "gptq", "gptq_v2"):
        return _gptq_v2 if kind == "gptq_v2" else _gptq
    if method == "awq" and str(kind or "gemm").lower() == "gemm":
        return _awq
    if method == "bitsandbytes":
        return _bitsandbytes
    if method == "compressed-tensors":
        return _compressed_tensors_layout(settings)
    return None


def _compressed_tensors_layout(settings: Mapping[str, Any]) -> Finder | None:
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


def _gptq(files: SafetensorsFiles, name: str, shape: tuple[int, int]) -> StoredLinear | None:
    return _find_gptq(files, name, shape, added=1)


def _gptq_v2(files: SafetensorsFiles, name: str, shape: tuple[int, int]) -> StoredLinear | None:
    return _find_gptq(files, name, shape, added=0)


def _find_gptq(files: SafetensorsFiles, name: str, shape: tuple[int, int], *, added: int) -> StoredLinear | None:
    """Words of inputs by output, and of zeros by group, which the first version stores less one."""
    words, zeros, scales, index = (f"{name}.{each}" for each in ("qweight", "qzeros", "scales", "g_idx"))
    if words not in files.names:
        return None
    outputs, inputs = shape
    rows, groups = _first_size(files, words), _first_size(files, scales)
    bits = _find_bits(words, rows, inputs, GRID_BITS)
    zero_words = _words(outputs, bits)
    files.check(words, (rows, outputs), "I32")
    files.check(zeros, (groups, zero_words), "I32")
    files.check(scales, (groups, outputs), *_FLOATS)
    group_of = _even_groups(inputs, groups)
    if index in files.names:
        group_of = files.read(files.check(index, (inputs,), "I32")).long()
        if group_of.min() < 0 or group_of.max() >= groups:
            raise ModelLoadError(f"{index} names groups that {scales} does not have; the checkpoint is damaged")
    if group_of is None:
        raise ModelLoadError(f"{name} has no g_idx, and its {inputs} inputs do not divide into {groups} groups")

    def read() -> Grid:
        data, packed_zeros = files.read(words), files.read(zeros)
        if _WORD % bits:  # codes go on in the next word
            data = data.T.contiguous()
            codes = PackedCodes(data, bits, _steps(outputs, rows * _WORD), _steps(inputs, bits))
        else:
            each = _WORD // bits
            places = _steps(inputs) // each * outputs * _WORD + _steps(inputs) % each * bits
            codes = PackedCodes(data, bits, _steps(outputs, _WORD), places)
            if added:  # in whole words, as writers subtract it, so that a carry comes back
                packed_zeros = packed_zeros + sum(1 << at for at in range(0, _WORD, bits))
        found = PackedCodes(packed_zeros, bits, _steps(outputs, bits), _steps(groups, zero_words * _WORD)).read()
        if added and _WORD % bits:
            found = (found + 1) & ((1 << bits) - 1)
        return Grid(codes, files.read(scales).T.float(), found, group_of).check(name)

    used = (words, zeros, scales, *({index} & set(files.names)))
    return _stored(used, find_form(bits, group_of, "GPTQ"), read)


def _awq(files: SafetensorsFiles, name: str, shape: tuple[int, int]) -> StoredLinear | None:
    """Words of eight outputs by input."""
    words, zeros, scales = (f"{name}.{each}" for each in ("qweight", "qzeros", "scales"))
    if words not in files.names:
        return None
    outputs, inputs = shape
    groups = _first_size(files, scales)
    line = _words(outputs, 4)
    files.check(words, (inputs, line), "I32")
    files.check(zeros, (groups, line), "I32")
    files.check(scales, (groups, outputs), *_FLOATS)
    group_of = _whole_groups(scales, inputs, groups)

    def read() -> Grid:
        places = _steps(outputs) // 8 * _WORD + 4 * torch.tensor(_AWQ_PLACES)[_steps(outputs) % 8]
        codes = PackedCodes(files.read(words), 4, places, _steps(inputs, line * _WORD))
        found = PackedCodes(files.read(zeros), 4, places, _steps(groups, line * _WORD)).read()
        return Grid(codes, files.read(scales).T.float(), found, group_of).check(name)

    return _stored((words, zeros, scales), find_form(4, group_of, "AWQ"), read)


def _compressed_tensors(files: SafetensorsFiles, name: str, shape: tuple[int, int]) -> StoredLinear | None:
    """Words of inputs, or bytes with a sign; zeros are packed along the outputs, or bytes with a sign."""
    scales, zeros, index = (f"{name}.weight_{each}" for each in ("scale", "zero_point", "g_idx"))
    if scales not in files.names:
        return None
    outputs, inputs = shape
    weight, is_packed = f"{name}.weight_packed", f"{name}.weight_packed" in files.names
    weight = weight if is_packed else f"{name}.weight"
    bits = _packed_bits(files, weight, shape) if is_packed else 8
    line = _words(inputs, bits) if is_packed else inputs
    files.check(weight, (outputs, line), "I32" if is_packed else "I8")
    found = files.shape(scales)
    groups = found[1] if len(found) == 2 else 1
    files.check(scales, found if found in ((), (1,)) else (outputs, groups), *_FLOATS)
    group_of = _whole_groups(scales, inputs, groups)
    has_zeros = zeros in files.names
    if has_zeros and is_packed:
        files.check(zeros, (_words(outputs, bits), groups), "I32")
    elif has_zeros:
        files.check(zeros, found, "I8")
    if index in files.names:
        given = files.read(files.check(index, (inputs,), "I32", "I64")).long()
        if not (given == -1).all():  # as it is where no order was chosen
            if given.min() < 0 or (torch.bincount(given) != inputs // groups).any() or given.max() >= groups:
                raise ModelLoadError(f"{index} does not put as many inputs into each group; the checkpoint is damaged")
            group_of = given
    of_shape = f"{name}.weight_shape"
    if of_shape in files.names and files.read(files.check(of_shape, (2,))).tolist() != [outputs, inputs]:
        raise ModelLoadError(f"{of_shape} is not {[outputs, inputs]}, which its layer has; the checkpoint is damaged")

    def read() -> Grid:
        codes = PackedCodes(
            files.read(weight),
            bits,
            _steps(outputs, line * (_WORD if is_packed else 8)),
            _steps(inputs, bits),
            0 if is_packed else 128,
        )
        half = torch.full((outputs, groups), 1 << (bits - 1), dtype=torch.int16)
        if has_zeros and is_packed:
            each = _WORD // bits
            places = _steps(outputs) // each * groups * _WORD + _steps(outputs) % each * bits
            half = PackedCodes(files.read(zeros), bits, places, _steps(groups, _WORD)).read()
        elif has_zeros:
            half = half + files.read(zeros).to(torch.int16)
        return Grid(codes, files.read(scales).float().expand(outputs, groups), half, group_of).check(name)

    used = {weight, scales, zeros, index, of_shape} & set(files.names)
    return _stored(tuple(used), find_form(bits, group_of, "compressed-tensors"), read)


def _bitsandbytes(files: SafetensorsFiles, name: str, shape: tuple[int, int]) -> StoredLinear | None:
    """Bytes with a sign and a scale an output; or codes of a table of 16 numbers, which no grid has."""
    weight, scales, layout = f"{name}.weight", f"{name}.SCB", f"{name}.weight_format"
    outputs, inputs = shape
    if scales not in files.names:
        table = find_table(files, name, shape)
        return None if table is None else StoredLinear(table.names, None, _no_grid, table.read)
    files.check(weight, shape, "I8")
    files.check(scales, (outputs,), "F32")
    if layout in files.names and files.read(layout).flatten().tolist() != [0]:
        raise UnsupportedModelError(f"{layout} is not that of rows; save the checkpoint again with bitsandbytes 0.44")
    group_of = torch.zeros(inputs, dtype=torch.long)

    def read() -> Grid:
        codes = PackedCodes(files.read(weight), 8, _steps(outputs, inputs * 8), _steps(inputs, 8), 128)
        zeros = torch.full((outputs, 1), 128, dtype=torch.int16)
        return Grid(codes, files.read(scales)[:, None] / 127, zeros, group_of).check(name)

    used = tuple({weight, scales, layout} & set(files.names))
    return _stored(used, find_form(8, group_of, "bitsandbytes"), read)


def _stored(names: tuple[str, ...], form: PackedFormat | None, grid: Callable[[], Grid]) -> StoredLinear:
    return StoredLinear(names, form, grid, lambda dtype: grid().values(dtype))


def _no_grid() -> Grid:
    raise AssertionError("a table is no grid")


def _steps(count: int, step: int = 1) -> torch.Tensor:
    return torch.arange(count) * step


def _first_size(files: SafetensorsFiles, name: str) -> int:
    shape = files.shape(name) if name in files.names else ()
    if len(shape) != 2 or shape[0] == 0:
        raise ModelLoadError(f"the tensor {name} is missing or no matrix; download the checkpoint again")
    return shape[0]


def _packed_bits(files: SafetensorsFiles, name: str, shape: tuple[int, int]) -> int:
    return _find_bits(name, files.shape(name)[-1] if files.shape(name) else 0, shape[1], (2, 4, 8))


def _find_bits(name: str, words: int, count: int, choices: Collection[int]) -> int:
    """The number of bits at which so many codes take so many words."""
    found = next((bits for bits in choices if _words(count, bits) == words), None)
    if found is None:
        raise UnsupportedModelError(
            f"{name} has {words} words for {count} weights, which are not those of {', '.join(map(str, choices))} bits "
            "a weight; take another checkpoint"
        )
    return found


def _words(codes: int, bits: int) -> int:
    return -(-codes * bits // _WORD)


def _even_groups(inputs: int, groups: int) -> torch.Tensor | None:
    return _steps(inputs) // (inputs // groups) if groups and inputs % groups == 0 else None


def _whole_groups(scales: str, inputs: int, groups: int) -> torch.Tensor:
    found = _even_groups(inputs, groups)
    if found is None:
        raise ModelLoadError(f"the {inputs} inputs of a layer do not divide into the {groups} groups of {scales}")
    return found
