"""What GGUF files say of families without a row of the table, which run by transformers' own modules."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from selfspec.loading.gguf_deepseek import latent_ranks, sigmoids_if_said
from selfspec.loading.gguf_family import NORM_AFTER_ATTENTION, GgufFamily, Header, Rows
from selfspec.loading.gguf_gemma4 import GEMMA4
from selfspec.loading.gguf_readers import integers, numbers, passes_over, reads, windows
from selfspec.loading.gguf_settings import Settings, refused

_ALIBI = 8.0
"""What the slopes of distances go up to; transformers has no other."""

_EPSILON = 1e-5
"""What OLMo's norms add to a variance."""

_AFMOE_PERIOD = 4
"""Every fourth layer of AFMoE attends to everything, and has no rope."""

_CHUNK, _MAVERICK = 8192, 128
"""Of Llama 4: what layers with a rope attend to, and the number of experts of the model without norms of heads."""


def _order_heads(config: Any) -> Mapping[str, Rows]:
    """Files have all queries, then all keys, then all values; transformers has them by group of heads."""
    heads = int(config.num_attention_heads)
    groups, size = int(getattr(config, "num_kv_heads", heads)), int(config.hidden_size) // heads
    if getattr(config, "multi_query", False):
        groups = 1
    entries = np.arange((heads + 2 * groups) * size)
    parts = np.split(entries, [heads * size, (heads + groups) * size])
    return {"attn_qkv": np.concatenate([part.reshape(groups, -1) for part in parts], 1).flatten()}


def _one_group(header: Header) -> dict[str, Any]:
    if header.groups != 1:
        raise refused(f"this GGUF file has {header.groups} heads of keys, of which transformers' family has one")
    return {"multi_query": True}


def _parallel_unless_said(header: Header) -> dict[str, Any]:
    return {"use_parallel_residual": header.settings.get("use_parallel_residual") is not False}


def _mpt(header: Header) -> dict[str, Any]:
    settings, width = header.settings, header.settings.integer("feed_forward_length")
    if (bias := settings.number("attention.max_alibi_bias", 0.0)) != _ALIBI:
        raise refused(f"this GGUF file has {settings.key('attention.max_alibi_bias')} = {bias:g}, not {_ALIBI:g}")
    clip = settings.number("attention.clamp_kqv", 0.0) or None
    return {
        "max_seq_len": settings.integer("context_length"),
        "expansion_ratio": width // header.hidden,
        "attn_config": {"clip_qkv": clip},
    }


def _falcon(header: Header) -> dict[str, Any]:
    two_norms = header.has("attn_norm_2.weight")
    is_new = two_norms or header.groups > 1
    return {
        "num_kv_heads": header.groups,
        "multi_query": not is_new,
        "new_decoder_architecture": is_new,
        "num_ln_in_parallel_attn": 1 + two_norms if is_new else None,
        "ffn_hidden_size": header.settings.integer("feed_forward_length"),
    }


def _known_epsilon(header: Header) -> dict[str, Any]:
    settings = header.settings
    if (epsilon := settings.number("attention.layer_norm_epsilon")) != _EPSILON:
        raise refused(f"this GGUF file has norms that add {epsilon:g}, but those of its family add {_EPSILON:g}")
    return {}


def _norms_of_heads(header: Header) -> dict[str, Any]:
    settings = header.settings
    if "attention.sliding_window" in settings:
        raise refused(f"this GGUF file has {settings.key('attention.sliding_window')}, which no Llama 4 model has")
    return {"use_qk_norm": settings.integer("expert_count") != _MAVERICK}


def _known_rope(header: Header) -> dict[str, Any]:
    if "rope_factors_long.weight" in header.tensors:
        raise refused("this GGUF file scales its rope as 'longrope', by factors of Phi-MoE that files do not hold")
    return {"lm_head_bias": "output.bias" in header.tensors}


def _one_width(header: Header) -> dict[str, Any]:
    settings = header.settings
    names = ("feed_forward_length", "expert_feed_forward_length", "expert_shared_feed_forward_length")
    widths = {settings.integer(name) for name in names}
    if len(widths) > 1 or settings.integer("expert_shared_count", 1) != 1:
        raise refused(f"this GGUF file has shared experts, or experts of the widths {sorted(widths)}, not supported")
    return {}


def _latent_sizes(header: Header) -> dict[str, Any]:
    turned = header.head_dim
    return {
        "qk_rope_head_dim": turned,
        "qk_nope_head_dim": header.settings.integer("attention.key_length") - turned,
        "v_head_dim": header.hidden // header.heads,
    }


def _scale_queries(settings: Settings, rope: dict[str, Any]) -> dict[str, Any]:
    """The rope of Ministral 3, by whose length queries of later tokens are scaled."""
    if rope["rope_type"] != "yarn":
        raise refused(f"this GGUF file scales its rope as '{rope['rope_type']}', not as 'yarn'")
    return {
        **rope,
        "mscale": 1.0,  # llama.cpp has no other
        "mscale_all_dim": settings.number("rope.scaling.yarn_log_multiplier", 0.0),
        "llama_4_scaling_beta": settings.number("attention.temperature_scale"),
    }


_width = integers(n_inner="feed_forward_length")
_logit_scale = numbers(logit_scale="logit_scale")
_olmo = reads(_known_epsilon, numbers(0.0, None, clip_qkv="attention.clamp_kqv"))
_llama4 = reads(
    _norms_of_heads,
    integers(
        intermediate_size="expert_feed_forward_length",
        intermediate_size_mlp="feed_forward_length",
        interleave_moe_layer_step="interleave_moe_layer_step",
    ),
    attention_chunk_size=_CHUNK,
)
_phimoe = reads(
    _known_rope,
    passes_over("rope.scaling.original_context_length"),
    integers(0, None, sliding_window="attention.sliding_window"),
)
# What embeddings, residuals and logits are multiplied by is that of the one model there is, as in llama.cpp.
_minicpm3 = reads(latent_ranks, _latent_sizes, scale_emb=12.0)
_afmoe = reads(
    sigmoids_if_said,
    windows(default=0, period=_AFMOE_PERIOD),
    numbers(0.0, 1.0, route_scale="expert_weights_scale"),
    global_attn_every_n_layers=_AFMOE_PERIOD,
    mup_enabled=True,  # llama.cpp has no other
)
_LAYER_NORMS: dict[str, Any] = {"norm": "layer_norm_epsilon", "rms": False}
_SHORT_NAMED: dict[str, Any] = {"norm": "layer_norm_eps", "rms": False}

OBSERVED = {
    "gpt2": GgufFamily("gpt2", _width, rotates=False, transposed=".c_", **_LAYER_NORMS),
    "starcoder": GgufFamily("gpt_bigcode", reads(_one_group, _width), rotates=False, **_LAYER_NORMS),
    "gptneox": GgufFamily(
        "gpt_neox", _parallel_unless_said, partial_rope=True, order_outputs=_order_heads, **_SHORT_NAMED
    ),
    "bloom": GgufFamily("bloom", rotates=False, order_outputs=_order_heads, **_LAYER_NORMS),
    "mpt": GgufFamily("mpt", _mpt, rotates=False, **_LAYER_NORMS),
    "falcon": GgufFamily("falcon", _falcon, order_outputs=_order_heads, **_LAYER_NORMS),
    "phi2": GgufFamily("phi", partial_rope=True, **_SHORT_NAMED),
    "phimoe": GgufFamily("phimoe", _phimoe),
    "command-r": GgufFamily("cohere", _logit_scale, **_SHORT_NAMED),
    "cohere2": GgufFamily("cohere2", reads(windows(default=0, period=4), _logit_scale), **_SHORT_NAMED),
    "olmo": GgufFamily("olmo", _olmo, interleaved=True, **_SHORT_NAMED),
    "exaone": GgufFamily("exaone"),
    "llama4": GgufFamily("llama4_text", _llama4, whole=frozenset({"embed_tokens", "experts"}), transposed=".experts."),
    "mistral3": GgufFamily("ministral3", change_rope=_scale_queries, interleaved=True),
    "minicpm3": GgufFamily("minicpm3", _minicpm3, latent=True),
    "hunyuan-moe": GgufFamily("hunyuan_v1_moe", _one_width, whole=frozenset({"wg"})),
    "apertus": GgufFamily("apertus"),
    "afmoe": GgufFamily("afmoe", _afmoe, modules=NORM_AFTER_ATTENTION),
    "gemma4": GEMMA4,
}
"""By ``general.architecture``."""
