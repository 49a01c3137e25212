"""What GGUF files say of Gemma 4.

Heads differ between layers with a window and others; experts stand beside the MLP; the last layers read the keys and
values of earlier ones, and all read a second embedding of the tokens.
"""

from typing import Any

from selfspec.loading.gguf_family import NORM_AFTER_ATTENTION, GgufFamily, Header
from selfspec.loading.gguf_settings import Settings, damaged, refused


def _gemma4(header: Header) -> dict[str, Any]:
    settings = header.settings
    sliding = list(map(bool, settings.by_layer("attention.sliding_window_pattern")))
    shared = settings.integer("attention.shared_kv_layers", 0)
    if len(sliding) != header.layers or shared >= header.layers or sliding[-1]:
        raise damaged(
            f"this GGUF file has {settings.key('attention.sliding_window_pattern')} of {len(sliding)} and "
            f"{settings.key('attention.shared_kv_layers')} of {shared} layers, for a model of {header.layers} of which "
            "the last attends to everything"
        )
    size = settings.integer("attention.key_length_swa")
    others = {settings.integer(name, size) for name in ("attention.value_length_swa", "rope.dimension_count_swa")}
    if others != {size}:
        raise refused(f"this GGUF file has heads of {size} entries in layers with a window, but of {others} elsewhere")
    own = sliding[: header.layers - shared]
    values = map(any, zip(*map(header.layers_with, ("attn_v.weight", "attn_qkv.weight")), strict=True))
    return {
        "head_dim": size,
        "global_head_dim": header.head_dim,
        "layer_types": ["sliding_attention" if each else "full_attention" for each in sliding],
        "sliding_window": settings.integer("attention.sliding_window"),
        "attention_k_eq_v": not all(value or each for value, each in zip(values, own, strict=False)),
        "num_kv_shared_layers": shared,
        "final_logit_softcapping": settings.number("final_logit_softcapping", 0.0) or None,
        **_read_groups(settings, sliding),
        **_read_widths(settings, header.layers, shared),
        **_read_second_embedding(header),
        "enable_moe_block": settings.integer("expert_count", 0) > 0,
    }


def _read_groups(settings: Settings, sliding: list[bool]) -> dict[str, int]:
    """The heads of keys and values, which layers without a window may have fewer of."""
    name = "attention.head_count_kv"
    if isinstance(settings.get(name), int):
        return {}
    groups = settings.by_layer(name)
    kinds = [{count for count, each in zip(groups, sliding, strict=False) if each is kind} for kind in (True, False)]
    if len(groups) != len(sliding) or max(map(len, kinds)) > 1:
        raise refused(f"this GGUF file has {settings.key(name)} = {str(groups)[:60]}, which no Gemma 4 model has")
    (full,) = kinds[1]
    return {"num_key_value_heads": max(kinds[0], default=full), "num_global_key_value_heads": full}


def _read_widths(settings: Settings, layers: int, shared: int) -> dict[str, Any]:
    """The inner width of MLPs, twice as large in layers that read the keys and values of others."""
    name = "feed_forward_length"
    if isinstance(settings.get(name), int):
        return {}
    widths = settings.by_layer(name)
    first = widths[0] if widths else 0
    if widths != [first] * (layers - shared) + [2 * first] * shared:
        raise refused(f"this GGUF file has {settings.key(name)} = {str(widths)[:60]}, which no Gemma 4 model has")
    return {"intermediate_size": first, "use_double_wide_mlp": True}


def _read_second_embedding(header: Header) -> dict[str, int]:
    width = header.settings.integer("embedding_length_per_layer_input", 0)
    table = header.tensors.get("per_layer_token_embd.weight")
    if not width:
        return {"hidden_size_per_layer_input": 0}
    if table is None:
        raise damaged("this GGUF file has no tensor per_layer_token_embd.weight")
    return {"hidden_size_per_layer_input": width, "vocab_size_per_layer_input": table.shape[0]}


GEMMA4 = GgufFamily(
    "gemma4_text",
    _gemma4,
    modules=NORM_AFTER_ATTENTION,
    rope_by_layer_type=True,
    local_base=10000.0,
    may_be_dense=True,
    varies=True,
)
"""The row of the family."""
