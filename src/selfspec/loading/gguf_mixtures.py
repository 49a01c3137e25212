"""What GGUF files say of further mixtures of experts, which run by transformers' own modules."""

from typing import Any

from selfspec.loading.gguf_deepseek import has_sigmoids, read_groups, read_mixture, require_sigmoids, sigmoids_if_said
from selfspec.loading.gguf_family import GgufFamily, Header
from selfspec.loading.gguf_readers import reads, sparse_after_dense, sparse_by_router, windows
from selfspec.loading.gguf_settings import Settings, refused

_RMS = "attention.layer_norm_rms_epsilon"
_PERIOD = 4
"""Every fourth layer attends to everything where a file does not say which."""

_EPSILON = 1e-5
"""What norms of Cohere that subtract a mean add to a variance, where these are not computed."""


def has_rms(settings: Settings) -> bool:
    """Whether a file says what norms without a mean add."""
    return settings.number(_RMS, 0.0) > 0


def _cohere2_moe(header: Header) -> dict[str, Any]:
    settings = header.settings
    size, shared = settings.integer("expert_feed_forward_length"), settings.integer("expert_shared_count", 0)
    if (together := settings.integer("expert_shared_feed_forward_length", shared * size)) != shared * size:
        raise refused(f"this GGUF file has experts of {size} and {shared} shared ones of {together} together")
    sigmoids, normed = not settings.get("expert_gating_func") or has_sigmoids(settings), "expert_weights_norm"
    norms = bool(settings.get(normed))
    if not sigmoids and not norms:
        raise refused(f"this GGUF file has a softmax without {settings.key(normed)}, which transformers always does")
    return {
        **windows(default=None, period=_PERIOD, first=True)(header),
        **sparse_after_dense(header),
        "num_shared_experts": shared,
        "shared_expert_combination_strategy": "average",  # llama.cpp has no other
        "expert_selection_fn": "sigmoid" if sigmoids else "softmax",
        "norm_topk_prob": norms,
        "intermediate_size": size,
        "prefix_dense_intermediate_size": settings.integer("feed_forward_length", 0) or None,
        "prefix_dense_sliding_window_pattern": 1,  # all dense layers have a rope
        "logit_scale": settings.number("logit_scale", 0.0) or 1.0,
        "layer_norm_eps": settings.number("attention.layer_norm_epsilon", _EPSILON),
        "rms_norm_eps": settings.number(_RMS, 0.0) or None,
    }


COHERE2_MOE_RMS = GgufFamily("cohere2_moe", _cohere2_moe)
"""Of models whose norms subtract no mean."""


def _mimo(header: Header) -> dict[str, Any]:
    settings = header.settings
    settings.by_layer("attention.sliding_window_pattern")  # without which it is not known
    layers = windows(default=None, period=_PERIOD)(header)
    name, kinds = "attention.head_count_kv", layers["layer_types"]
    groups = settings.by_layer(name)[: header.layers]
    full = min(groups, default=0)
    if groups != [full if kind == "full_attention" else 2 * full for kind in kinds]:
        raise refused(
            f"this GGUF file has {settings.key(name)} = {str(groups)[:60]}, not twice as many where layers have a "
            "window"
        )
    return {
        **reads(sigmoids_if_said, read_groups, sparse_by_router)(header),
        **layers,
        "num_key_value_heads": full,
        "v_head_dim": settings.integer("attention.value_length", header.head_dim),
        "attention_value_scale": settings.number("attention.value_scale", 0.0) or 1.0,
        "norm_topk_prob": True,  # llama.cpp does it always
        "routed_scaling_factor": 1.0,  # and has no other
    }


def _unscaled(settings: Settings, rope: dict[str, Any]) -> dict[str, Any]:
    if rope["rope_type"] != "default":
        raise refused(f"this GGUF file scales its rope as '{rope['rope_type']}', which no model of its family does")
    return rope


def _bailing2(header: Header) -> dict[str, Any]:
    settings = header.settings
    size, shared = settings.integer("expert_feed_forward_length"), settings.integer("expert_shared_count", 0)
    if shared > 1 or settings.integer("expert_shared_feed_forward_length", size) not in (0, size):
        raise refused(f"this GGUF file has {shared} shared experts, or one of another width than {size}, not supported")
    return {**read_mixture(header), "use_qk_norm": True}


def _laguna(header: Header) -> dict[str, Any]:
    settings, size = header.settings, header.head_dim
    name, normed = "attention.head_count", "expert_weights_norm"
    heads = [header.heads] * header.layers if isinstance(settings.get(name), int) else settings.by_layer(name)
    value, gate = settings.integer("attention.value_length", size), header.tensors.get("blk.0.attn_gate.weight")
    fits = len(heads) == header.layers and all(0 < each <= header.heads and each % header.groups == 0 for each in heads)
    if not fits or value != size or gate is None:
        raise refused(
            f"this GGUF file has heads of {size} entries for keys and {value} for values, {settings.key(name)} = "
            f"{str(heads)[:60]}, and a gate of attention of the shape {gate and gate.shape}, which is not supported"
        )
    if not settings.get(normed):
        raise refused(f"this GGUF file does not have {settings.key(normed)}, which transformers always does")
    return {
        "sliding_window": 0,
        **reads(require_sigmoids, sparse_after_dense)(header),
        **windows(default=0, period=_PERIOD, first=True)(header),
        "num_attention_heads": heads[0],
        "num_attention_heads_per_layer": heads,
        "gating": True if gate.shape[0] == heads[0] else "per-element",
        "moe_routed_scaling_factor": settings.number("expert_weights_scale", 0.0) or 1.0,
    }


MIXTURES = {
    "bailingmoe2": GgufFamily("sarvam_moe", reads(require_sigmoids, _bailing2), partial_rope=True),
    "cohere2moe": GgufFamily("cohere2_moe", _cohere2_moe, norm="layer_norm_eps", rms=False),
    "mimo2": GgufFamily(
        "mimo_v2_flash",
        _mimo,
        partial_rope=True,
        rope_by_layer_type=True,
        local_base=10000.0,
        change_rope=_unscaled,
        varies=True,
        own_heads=True,
    ),
    "laguna": GgufFamily("laguna", _laguna, partial_rope=True, rope_by_layer_type=True, own_heads=True),
}
"""By ``general.architecture``."""
