"""What families of models in GGUF files have of their own: one row of a table each, with what reads their settings."""

from collections.abc import Callable
from typing import Any

from selfspec.loading.gguf_deepseek import has_sigmoids, read_latents, read_mixture, read_softmax_mixture, scale_yarn
from selfspec.loading.gguf_family import (
    GgufFamily,
    Header,
    biases,
    biases_and_mlp,
    experts,
    multipliers,
    pass_over_sections,
    qwen2_moe,
    require_sigmoids,
    windows,
)
from selfspec.loading.gguf_hybrids import FALCON_MAMBA, HYBRIDS
from selfspec.loading.gguf_mixtures import COHERE2_MOE_RMS, MIXTURES, has_rms
from selfspec.loading.gguf_observed import OBSERVED
from selfspec.loading.gguf_settings import Settings, damaged, refused


def _granite_moe(header: Header) -> dict[str, Any]:
    values = _granite(header)
    del values["mlp_bias"]
    return {**values, **experts(header)}


def _granite_shared(header: Header) -> dict[str, Any]:
    shared = header.settings.integer("expert_shared_feed_forward_length")
    return {**_granite_moe(header), "shared_intermediate_size": shared}


def _olmoe(header: Header) -> dict[str, Any]:
    return {**biases(header), **experts(header), "norm_topk_prob": False, "clip_qkv": None}


def _qwen3_moe(header: Header) -> dict[str, Any]:
    return {
        **biases(header),
        **experts(header),
        "moe_intermediate_size": header.settings.integer("expert_feed_forward_length"),
        "norm_topk_prob": True,  # llama.cpp does it always
    }


def _qwen2_vl(header: Header) -> dict[str, Any]:
    pass_over_sections(header)
    return {}


def _qwen3_vl(header: Header) -> dict[str, Any]:
    header.settings.get("n_deepstack_layers")  # layers that pictures are added after
    return {**_qwen2_vl(header), **biases(header)}


def _qwen3_vl_moe(header: Header) -> dict[str, Any]:
    return {**_qwen3_vl(header), **_qwen3_moe(header)}


def _smollm3(header: Header) -> dict[str, Any]:
    # Files do not tell which layers have no rope. It is every fourth in the models that there are.
    return {**biases_and_mlp(header), "no_rope_layer_interval": 4}


def _phi3(header: Header) -> dict[str, Any]:
    original = header.settings.integer("rope.scaling.original_context_length", 0)
    return {
        "sliding_window": header.settings.integer("attention.sliding_window", 0) or None,
        **({"original_max_position_embeddings": original} if original else {}),
    }


def _granite(header: Header) -> dict[str, Any]:
    settings = header.settings
    if settings.get("rope.scaling.finetuned") is False:
        raise refused("this GGUF file is of a Granite model without rope, not supported")
    for name in _HYBRID_SETTINGS:
        settings.get(name)
    return {**biases_and_mlp(header), **multipliers(header)}


def _granite_swa(header: Header) -> dict[str, Any]:
    settings, name = header.settings, "attention.rope_pattern"
    rotates = settings.by_layer(name) if name in settings else [1] * header.layers
    if len(rotates) != header.layers:
        raise damaged(f"{settings.key(name)} of this GGUF file has {len(rotates)} entries for {header.layers} layers")
    base = settings.number("rope.freq_base", 10000.0)
    return {
        **_granite(header),
        **windows(header, default=None, period=4, first=True),
        "layer_rope_theta": [base if each else 0.0 for each in rotates],
    }


def _granite_moe_swa(header: Header) -> dict[str, Any]:
    values = _granite_swa(header)
    del values["mlp_bias"]
    shared = header.settings.integer("expert_shared_feed_forward_length", 0)
    return {**values, **experts(header), "shared_intermediate_size": shared}


def _gemma2(header: Header) -> dict[str, Any]:
    return {
        **_gemma(header, largest=46),
        **windows(header, default=4096, period=2),
        "attn_logit_softcapping": header.settings.number("attn_logit_softcapping", 50.0) or None,
        "final_logit_softcapping": header.settings.number("final_logit_softcapping", 30.0) or None,
    }


def _gemma3(header: Header) -> dict[str, Any]:
    return {
        **_gemma(header, largest=62),
        **windows(header, default=0, period=6),
        "final_logit_softcapping": header.settings.number("final_logit_softcapping", 0.0) or None,
    }


def _gemma(header: Header, largest: int) -> dict[str, Any]:
    """Files do not tell the scale of attention. It goes by the size of a head, in the largest model by the width."""
    scalar = header.hidden // header.heads if header.layers == largest else header.head_dim
    return {"query_pre_attn_scalar": scalar}


def _exaone4(header: Header) -> dict[str, Any]:
    return {"sliding_window": None, **windows(header, default=0, period=4)}


def _olmo3(header: Header) -> dict[str, Any]:
    return {**biases(header), **windows(header, default=0, period=4)}


def _seed_oss(header: Header) -> dict[str, Any]:
    return {**biases_and_mlp(header), "attention_out_bias": header.has("attn_output.bias")}


def _gpt_oss(header: Header) -> dict[str, Any]:
    return {
        **biases(header),
        **experts(header),
        **windows(header, default=0, period=2),
        "intermediate_size": header.settings.integer("expert_feed_forward_length"),
    }


def _deepseek2(header: Header) -> dict[str, Any]:
    settings = header.settings
    return {**experts(header, "n_routed_experts"), **read_latents(settings), **read_softmax_mixture(settings)}


def _youtu(header: Header) -> dict[str, Any]:
    settings = header.settings
    settings.get("expert_feed_forward_length")  # that of the MLPs
    if settings.integer("leading_dense_block_count", header.layers) != header.layers:
        raise refused("this GGUF file has attention to latents and layers with experts, but says of no experts")
    return {**read_latents(settings), "rope_interleave": True}


def _deepseek3(header: Header) -> dict[str, Any]:
    settings = header.settings
    return {**experts(header, "n_routed_experts"), **read_latents(settings), **read_mixture(settings)}


def _glm4_moe(header: Header) -> dict[str, Any]:
    require_sigmoids(header)
    return {
        **biases(header),
        **experts(header, "n_routed_experts"),
        **read_mixture(header.settings),
        "use_qk_norm": header.has("attn_q_norm.weight"),
    }


def _dots(header: Header) -> dict[str, Any]:
    require_sigmoids(header)
    return {
        **biases(header),
        **experts(header, "n_routed_experts"),
        **read_mixture(header.settings),
        "sliding_window": None,
    }


def _exaone_moe(header: Header) -> dict[str, Any]:
    require_sigmoids(header)
    header.settings.get("expert_shared_feed_forward_length")
    values = read_mixture(header.settings)
    return {
        **experts(header, "num_experts"),
        **values,
        **windows(header, default=0, period=4),
        "num_shared_experts": values["n_shared_experts"],
    }


def _mellum(header: Header) -> dict[str, Any]:
    return {**_qwen3_moe(header), **windows(header, default=0, period=4)}


def _hy_v3(header: Header) -> dict[str, Any]:
    require_sigmoids(header)
    settings, size = header.settings, header.settings.integer("expert_feed_forward_length")
    return {
        **biases(header),
        **experts(header),
        "moe_intermediate_size": size,
        "num_shared_experts": settings.integer("expert_shared_feed_forward_length") // (size or 1),
        "router_scaling_factor": settings.number("expert_weights_scale", 0.0) or 1.0,
        "mlp_layer_types": ["sparse" if each else "dense" for each in header.layers_with("ffn_gate_inp.weight")],
    }


def _minimax(header: Header) -> dict[str, Any]:
    require_sigmoids(header)
    return {**experts(header), "intermediate_size": header.settings.integer("expert_feed_forward_length")}


def _ernie_moe(header: Header) -> dict[str, Any]:
    settings, values = header.settings, experts(header)
    size, together = (settings.integer(f"expert_{kind}feed_forward_length", 0) for kind in ("", "shared_"))
    if not size or together != size * settings.integer("expert_shared_count", 0):
        raise damaged(f"this GGUF file has experts of {size} and shared ones of {together} together")
    return {
        **_one_for_biases(header),
        "moe_num_experts": values["num_local_experts"],
        "moe_k": values["num_experts_per_tok"],
        "moe_intermediate_size": size,
        "moe_num_shared_experts": together // size,
        "moe_layer_start_index": settings.integer("leading_dense_block_count", 0),
        "moe_layer_interval": settings.integer("interleave_moe_layer_step", 1),
    }


def _one_for_biases(header: Header) -> dict[str, Any]:
    return {"use_bias": header.has_qkv_bias}


def _stablelm(header: Header) -> dict[str, Any]:
    return {
        "use_qkv_bias": header.has_qkv_bias,
        "qk_layernorm": header.has("attn_q_norm.weight"),
        "use_parallel_residual": not header.has("ffn_norm.weight"),
    }


def _has(settings: Settings, name: str) -> bool:
    """Whether a number is there and not 0."""
    return settings.integer(name, 0) > 0


_HYBRID_SETTINGS = (
    *(f"ssm.{name}" for name in ("conv_kernel", "state_size", "group_count", "inner_size", "time_step_rank")),
    "expert_shared_feed_forward_length",
)
"""What files of Granite 4 without recurrent layers have of models with these; none of it is computed with."""

_AFTER_ATTENTION = {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
_BEFORE_MLP = {"post_attention_layernorm": "post_attention_norm"}
_SHARED_TOGETHER = {"shared_mlp.input_linear": "ffn_up_shexp"}
_SANDWICH = {"post_self_attn_layernorm": "post_attention_norm", "post_mlp_layernorm": "post_ffw_norm"}


FAMILIES = {
    "llama": GgufFamily("llama", biases_and_mlp, interleaved=True),  # Mistral, too, which differs in nothing here
    "qwen2": GgufFamily("qwen2"),
    "qwen3": GgufFamily("qwen3", biases),
    "qwen3moe": GgufFamily("qwen3_moe", _qwen3_moe),
    "qwen2vl": GgufFamily("qwen2", _qwen2_vl),  # these three: the models of text alone
    "qwen3vl": GgufFamily("qwen3", _qwen3_vl),
    "qwen3vlmoe": GgufFamily("qwen3_moe", _qwen3_vl_moe),
    "qwen2moe": GgufFamily("qwen2_moe", qwen2_moe),
    "olmoe": GgufFamily("olmoe", _olmoe),
    "granitemoe": GgufFamily("granitemoe", _granite_moe, interleaved=True),
    "smollm3": GgufFamily("smollm3", _smollm3, interleaved=True),
    "phi3": GgufFamily("phi3", _phi3, partial_rope=True),
    "olmo2": GgufFamily("olmo2", biases, modules=_AFTER_ATTENTION),
    "exaone4": GgufFamily("exaone4", _exaone4, modules=_AFTER_ATTENTION),
    "seed_oss": GgufFamily("seed_oss", _seed_oss, modules=_BEFORE_MLP),
    "ernie4_5": GgufFamily("ernie4_5", _one_for_biases),
    "ernie4_5-moe": GgufFamily("ernie4_5_moe", _ernie_moe),
    "hunyuan-dense": GgufFamily("hunyuan_v1_dense", biases),
    "exaone-moe": GgufFamily("exaone_moe", _exaone_moe),
    "mellum": GgufFamily("mellum", _mellum, rope_by_layer_type=True),
    "hy-v3": GgufFamily("hy_v3", _hy_v3),
    "jais2": GgufFamily("jais2", biases_and_mlp, norm="layer_norm_eps", rms=False),
    "chatglm": GgufFamily("glm", biases, partial_rope=True),
    "minimax-m2": GgufFamily("minimax_m2", _minimax, partial_rope=True),
    "dots1": GgufFamily("dots1", _dots),
    "nemotron": GgufFamily(
        "nemotron", biases_and_mlp, norm="norm_eps", rms=False, norms_plus_one=True, partial_rope=True
    ),
    "arcee": GgufFamily("arcee", biases_and_mlp, interleaved=True),
    "gemma": GgufFamily("gemma", norms_plus_one=True),
    "granite": GgufFamily("granite", _granite, interleaved=True),
    "granite_swa": GgufFamily("granite_swa", _granite_swa, interleaved=True),
    "gemma2": GgufFamily("gemma2", _gemma2, modules=_AFTER_ATTENTION, norms_plus_one=True),
    "gemma3": GgufFamily(
        "gemma3_text",
        _gemma3,
        modules=_AFTER_ATTENTION,
        norms_plus_one=True,
        rope_by_layer_type=True,
        local_base=10000.0,
    ),
    "starcoder2": GgufFamily("starcoder2", _one_for_biases, norm="norm_epsilon", rms=False),
    "glm4": GgufFamily("glm4", biases, modules=_SANDWICH, partial_rope=True),
    "glm4moe": GgufFamily("glm4_moe", _glm4_moe, modules=_BEFORE_MLP, partial_rope=True),
    "gpt-oss": GgufFamily(
        "gpt_oss", _gpt_oss, modules=_BEFORE_MLP, in_turns=True, transposed=".experts.", rounds_yarn=False
    ),
    "deepseek2": GgufFamily("deepseek_v2", _deepseek2, change_rope=scale_yarn, latent=True),
    "stablelm": GgufFamily("stablelm", _stablelm, norm="layer_norm_eps", rms=False, partial_rope=True),
    **OBSERVED,
    **MIXTURES,
    **HYBRIDS,
}
"""By ``general.architecture``."""

OTHERS: tuple[tuple[str, Callable[[Settings], bool], GgufFamily], ...] = (
    ("llama", lambda settings: _has(settings, "expert_count"), GgufFamily("mixtral", experts, interleaved=True)),
    ("deepseek2", has_sigmoids, GgufFamily("deepseek_v3", _deepseek3, change_rope=scale_yarn, latent=True)),
    ("deepseek2", lambda settings: not _has(settings, "expert_count"), GgufFamily("youtu", _youtu, latent=True)),
    (
        "olmo2",
        lambda settings: _has(settings, "attention.sliding_window"),
        GgufFamily("olmo3", _olmo3, modules=_AFTER_ATTENTION, rope_by_layer_type=True),
    ),
    (
        "granitemoe",
        lambda settings: _has(settings, "expert_shared_feed_forward_length"),
        GgufFamily("granitemoeshared", _granite_shared, interleaved=True),
    ),
    (
        "granite_swa",
        lambda settings: _has(settings, "expert_count"),
        GgufFamily("granitemoe_swa", _granite_moe_swa, modules=_SHARED_TOGETHER, interleaved=True),
    ),
    ("mamba", lambda settings: settings.get("ssm.dt_b_c_rms") is True, FALCON_MAMBA),
    ("cohere2moe", has_rms, COHERE2_MOE_RMS),
    ("mistral3", lambda settings: "attention.temperature_scale" not in settings, FAMILIES["llama"]),
)
"""Families that files do not name apart from another one: what files call both, how to know one, and its row."""

_ALIKE = {
    **dict.fromkeys(("mistral", "iquestcoder", "internlm3"), "llama"),
    "solar_open": "glm4moe",
    "glm4_moe_lite": "deepseek2",
    "gemma4_unified_text": "gemma4",
}
"""What files call families that compute the same as another one."""

_ALL = [*FAMILIES.items(), *((name, family) for name, _, family in OTHERS)]
_NAMES = {**{family.model_type: name for name, family in reversed(_ALL)}, **_ALIKE}

BY_MODEL_TYPE = {family.model_type: family for _, family in _ALL}
"""By ``config.model_type``."""


def architecture_of(model_type: str) -> str:
    """What GGUF files call a family, by its name in transformers; empty if they are not read."""
    return _NAMES.get(model_type, "")
