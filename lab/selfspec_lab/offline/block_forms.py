"""The forms of attention, of norms, rope and activations, and of the choice of tokens, for shapes of real models."""

from collections.abc import Mapping

import torch
import triton

from selfspec.gpu import attention, by_row, head
from selfspec_lab.offline.forms import KernelForm


def block_forms() -> list[KernelForm]:
    """The kernels beside those of products: what they are compiled as for Llama, Qwen, Gemma, gpt-oss and Phi."""
    return [
        *_attention("one key head a head", 32, 1, 128),
        *_attention("grouped", 8, 4, 128),
        *_attention("grouped, float32", 8, 4, 128, dtype=torch.float32),
        *_attention("groups of 8, 64 entries, window, sinks", 8, 8, 64, window=128, sinks=True),
        *_attention("256 entries, softcap, window", 8, 2, 256, window=4096, softcap=50.0),
        *_attention("256 entries, float32", 4, 2, 256, dtype=torch.float32),
        *_attention("80 entries", 32, 1, 80),
        *_norms(),
        *_turns(),
        _gate(),
        *_choices(),
    ]


def _attention(
    name: str,
    key_heads: int,
    group: int,
    dim: int,
    window: int = 0,
    softcap: float = 0.0,
    sinks: bool = False,
    dtype: torch.dtype = torch.bfloat16,
) -> list[KernelForm]:
    """The two kernels for one shape; attention to splits for a chain and for a tree."""
    own, width = "*fp32" if dtype == torch.float32 else "*bf16", triton.next_power_of_2(dim)
    sizes = {"DIM": dim, "WIDTH": width, "WINDOW": window}
    partial = {"mixed": "*fp32", "weights": "*fp32"}
    split = {
        **dict.fromkeys(("queries", "keys", "values"), own),
        **{"positions": "*i64", "prefix": "*i32", "paths": "*i32"},
        **partial,
        **dict.fromkeys(("rows", "path_length", "row_stride", "key_stride", "value_stride"), "i32"),
        "scale": "fp32",
    }
    merge = {**partial, "positions": "*i64", "sinks": own, "out": own, "rows": "i32", "splits": "i32"}
    step, warps = attention.step_of(width, dtype), attention.warps_of(width, dtype)
    own_sizes = {**sizes, "KEY_HEADS": key_heads, "GROUP": group, "STEP": step, "SOFTCAP": softcap}
    aligned = (*_pointers(split), *(each for each in split if each.endswith("stride")))
    forms = [
        KernelForm(kind, attention.attend_split, split, {**own_sizes, "TREE": tree}, warps, aligned=aligned)
        for kind, tree in ((f"attention, {name}", False), (f"attention, {name}, tree", True))
    ]
    constants, warps = {**sizes, "HEADS": key_heads * group, "SINKS": sinks}, max(1, width // 128)
    kernel, aligned = attention.merge_splits, _pointers(merge)
    return [*forms, KernelForm(f"merge, {name}", kernel, merge, constants, warps, aligned=aligned)]


def _norms() -> list[KernelForm]:
    pointers = dict.fromkeys(("rows", "weight", "out"), "*bf16")
    strides = {"row_stride": "i32", "head_stride": "i32"}
    signature, aligned = {**pointers, **strides, "epsilon": "fp32", "added": "fp32"}, (*pointers, *strides)
    forms = []
    for size in (128, 576, 4096):
        width = triton.next_power_of_2(size)
        constants, warps = {"SIZE": size, "WIDTH": width, "ROUNDS": True}, by_row.warps_of(width)
        forms.append(KernelForm(f"norm of {size}", by_row.norm_rows, signature, constants, warps, aligned=aligned))
    return forms


def _turns() -> list[KernelForm]:
    pointers = dict.fromkeys(("heads", "cosine", "sine"), "*bf16")
    strides = {"row_stride": "i32", "turn_stride": "i32"}
    signature, aligned = {**pointers, **strides}, (*pointers, *strides)
    sizes = {"DIM": 128, "HEAD": 128, "WIDTH": 64}
    names = {"rope of 128": False, "rope of 128, neighbours": True}
    return [
        KernelForm(name, by_row.turn_rows, signature, {**sizes, "NEIGHBOURS": neighbours}, 1, aligned=aligned)
        for name, neighbours in names.items()
    ]


def _gate() -> KernelForm:
    pointers = {"entered": "*bf16", "out": "*bf16"}
    signature = {**pointers, "size": "i32"}
    return KernelForm("gated SiLU", by_row.gate_rows, signature, {"SPAN": by_row.SPAN}, aligned=(*pointers, "size"))


def _choices() -> list[KernelForm]:
    """Choices from logits of bfloat16 and float32."""
    drawing = {"keys": "*i64", "positions": "*i64", "temperatures": "*fp32"}
    spans = {"numbers": "*fp32", "tokens": "*i32", "finite": "*i32"}
    forms = []
    for dtype, draws in (("bf16", False), ("bf16", True), ("fp32", True)):
        signature = {"logits": f"*{dtype}", **drawing, **spans, "vocab": "i32", "stride": "i32"}
        name = f"choice of {dtype}{', drawn' if draws else ''}"
        forms.append(KernelForm(name, head.choose_spans, signature, {"DRAWS": draws}, aligned=_pointers(signature)))
    for vocab in (32000, 128256, 262144):
        signature = {**spans, "chosen": "*i64", "confidence": "*fp32", "numeric": "*i1", "spans": "i32"}
        constants = {"SPANS": triton.next_power_of_2(triton.cdiv(vocab, head.SPAN))}
        name = f"choice, joined for {vocab} tokens"
        forms.append(KernelForm(name, head.join_spans, signature, constants, 1, aligned=_pointers(signature)))
    return forms


def _pointers(signature: Mapping[str, str]) -> tuple[str, ...]:
    return tuple(name for name, kind in signature.items() if kind[0] == "*")
