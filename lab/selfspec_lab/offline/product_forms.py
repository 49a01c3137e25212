"""The forms in which the kernels for products are compiled offline, for the shapes of Llama 3.1 8B."""

from typing import Any

import triton.language as tl

from selfspec.gpu.blocks import WITHOUT_KERNEL, tile_form
from selfspec.gpu.few_rows import (
    ADDED,
    LOW_BIT_STAGES,
    STAGES,
    WARPS,
    add_shares,
    dense_product,
    dense_shares,
    divisions,
    low_bit_product,
    shares,
    unpack_rows,
)
from selfspec.runtimes.formats import GGUF_FORMATS, GRID_BITS, LOW_BITS, PackedFormat
from selfspec_lab.offline.forms import KernelForm

SHAPES = ((6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336), (128256, 4096))
"""Outputs and inputs of Llama 3.1 8B: queries, keys and values; attention's output; gate and up; down; LM head."""

_TYPES = {tl.bfloat16: "bf16", tl.float16: "fp16", tl.float32: "fp32"}
_SIZES = {"rows": "i32", "outputs": "i32", "stride": "i32"}
_POINTERS = ("x", "bias", "out", "outputs", "stride")


def product_forms(rows: int = 8) -> list[KernelForm]:
    """The kernels for products: each dtype, each format of few bits, each kind of scales by float32 rows too.

    ``rows`` are those of a program: 8, or 16 on ROCm.
    """
    outputs, inputs = SHAPES[1]
    forms = [_dense(dtype, *shape, rows) for dtype in _TYPES for shape in (SHAPES[1], SHAPES[-1])]
    forms += [_low_bit(form, tl.bfloat16, outputs, inputs, rows) for form in _formats()]
    forms += [_low_bit(GGUF_FORMATS["Q4_K"], tl.bfloat16, *shape, rows) for shape in SHAPES if shape != SHAPES[1]]
    kinds = {tile_form(form).kind: form for form in _formats()}
    for form in kinds.values():
        forms += [_low_bit(form, tl.float32, outputs, inputs, rows), _unpack(form, inputs)]
    return [*forms, _add(outputs, inputs)]


def _formats() -> list[PackedFormat]:
    own = [PackedFormat(bits, group) for bits in LOW_BITS for group in (32, 128)]
    of_files = [form for name, form in GGUF_FORMATS.items() if name not in WITHOUT_KERNEL]
    return [*of_files, *own, *(PackedFormat(bits, 128, "GRID") for bits in GRID_BITS)]


def _name(form: PackedFormat) -> str:
    return f"{form}, groups of {form.group}" if form.name not in GGUF_FORMATS else form.name


def _dense(dtype: Any, outputs: int, inputs: int, rows: int) -> KernelForm:
    name, own = _TYPES[dtype], dense_shares(outputs, inputs, dtype.primitive_bitwidth // 8, rows)
    pointers = {"x": f"*{name}", "weights": f"*{name}", "bias": f"*{name}", "out": _out(own.splits, name)}
    return KernelForm(
        f"{name} {outputs}x{inputs}",
        dense_product,
        {**pointers, **_SIZES},
        {"SHARES": own, "HAS_BIAS": False},
        WARPS,
        STAGES,
        (*_POINTERS, "weights"),
    )


def _low_bit(form: PackedFormat, dtype: Any, outputs: int, inputs: int, rows: int) -> KernelForm:
    name, own = _TYPES[dtype], shares(outputs, inputs, form.unit, rows, rows == 16)
    pointers = {"x": f"*{name}", "tiles": "*u8", "bias": f"*{name}", "out": _out(own.splits, name)}
    constants = {"SHARES": own, "HAS_BIAS": False, "FORM": tile_form(form)}
    return KernelForm(
        f"{_name(form)} by {name} {outputs}x{inputs}",
        low_bit_product,
        {**pointers, **_SIZES},
        constants,
        WARPS,
        LOW_BIT_STAGES,
        (*_POINTERS, "tiles"),
    )


def _unpack(form: PackedFormat, inputs: int) -> KernelForm:
    signature = {"tiles": "*u8", "chosen": "*i64", "out": "*bf16", "count": "i32"}
    constants = {"INPUTS": inputs, "FORM": tile_form(form)}
    return KernelForm(f"{_name(form)} unpacked", unpack_rows, signature, constants, 1, 2, ("tiles", "chosen", "out"))


def _add(outputs: int, inputs: int) -> KernelForm:
    signature = {"shares": "*fp32", "bias": "*bf16", "out": "*bf16", **_SIZES}
    constants = {"SPLITS": divisions(outputs, inputs), "HAS_BIAS": False, "OUTPUTS": ADDED}
    aligned = ("shares", "bias", "out", "outputs", "stride")
    return KernelForm("shares added", add_shares, signature, constants, WARPS, STAGES, aligned)


def _out(splits: int, name: str) -> str:
    return f"*{name}" if splits == 1 else "*fp32"
