"""How GPTQ and AWQ store the weights of a linear layer."""

import torch

from selfspec.errors import ModelLoadError
from selfspec.loading.filling import StoredWeight
from selfspec.loading.quantised_weights import (
    FLOATS,
    WORD,
    Grid,
    even_groups,
    find_bits,
    first_size,
    grid_weight,
    steps,
    whole_groups,
    words_of,
)
from selfspec.model.safetensors_files import SafetensorsFiles
from selfspec.runtimes.formats import GRID_BITS
from selfspec.runtimes.packed_codes import PackedCodes

_AWQ_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)
"""In which four bits of a word AWQ has each of eight outputs."""


def find_gptq(
    files: SafetensorsFiles, name: str, shape: tuple[int, int], *, subtracted: bool = True
) -> StoredWeight | None:
    """Words of inputs by output, and of zeros by group, of which the first version has ``subtracted`` one."""
    words, zeros, scales, index = (f"{name}.{each}" for each in ("qweight", "qzeros", "scales", "g_idx"))
    if words not in files.names:
        return None
    outputs, inputs = shape
    rows, groups = first_size(files, words), first_size(files, scales)
    bits = find_bits(words, rows, inputs, GRID_BITS)
    zero_words = words_of(outputs, bits)
    files.check(words, (rows, outputs), "I32")
    files.check(zeros, (groups, zero_words), "I32")
    files.check(scales, (groups, outputs), *FLOATS)
    group_of = even_groups(inputs, groups)
    if index in files.names:
        group_of = files.read(files.check(index, (inputs,), "I32")).long()
        if group_of.min() < 0 or group_of.max() >= groups:
            raise ModelLoadError(f"{index} names groups that {scales} does not have; the checkpoint is damaged")
    if group_of is None:
        raise ModelLoadError(f"{name} has no g_idx, and its {inputs} inputs do not divide into {groups} groups")

    def read() -> Grid:
        data, packed_zeros = files.read(words), files.read(zeros)
        if WORD % bits:  # codes go on in the next word
            data = data.T.contiguous()
            codes = PackedCodes(data, bits, steps(outputs, rows * WORD), steps(inputs, bits))
        else:
            each = WORD // bits
            places = steps(inputs) // each * outputs * WORD + steps(inputs) % each * bits
            codes = PackedCodes(data, bits, steps(outputs, WORD), places)
            if subtracted:  # from whole words, so that it is added to these: a carry comes back
                packed_zeros = packed_zeros + sum(1 << at for at in range(0, WORD, bits))
        found = PackedCodes(packed_zeros, bits, steps(outputs, bits), steps(groups, zero_words * WORD)).read()
        if subtracted and WORD % bits:
            found = (found + 1) & ((1 << bits) - 1)
        return Grid(codes, files.read(scales).T.float(), found)

    used = (words, zeros, scales, *({index} & set(files.names)))
    return grid_weight(name, used, "GPTQ", bits, group_of, read)


def find_awq(files: SafetensorsFiles, name: str, shape: tuple[int, int]) -> StoredWeight | None:
    """Words of eight outputs by input."""
    words, zeros, scales = (f"{name}.{each}" for each in ("qweight", "qzeros", "scales"))
    if words not in files.names:
        return None
    outputs, inputs = shape
    groups = first_size(files, scales)
    line = words_of(outputs, 4)
    files.check(words, (inputs, line), "I32")
    files.check(zeros, (groups, line), "I32")
    files.check(scales, (groups, outputs), *FLOATS)
    group_of = whole_groups(scales, inputs, groups)

    def read() -> Grid:
        places = steps(outputs) // 8 * WORD + 4 * torch.tensor(_AWQ_PLACES)[steps(outputs) % 8]
        codes = PackedCodes(files.read(words), 4, places, steps(inputs, line * WORD))
        found = PackedCodes(files.read(zeros), 4, places, steps(groups, line * WORD)).read()
        return Grid(codes, files.read(scales).T.float(), found)

    return grid_weight(name, (words, zeros, scales), "AWQ", 4, group_of, read)
