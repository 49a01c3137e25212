"""What families of models in GGUF files have of their own: one row of a table each, with what reads their settings."""

from collections.abc import Callable
from typing import Any

from selfspec.loading.gguf_deepseek import (
    has_sigmoids,
    read_latents,
    read_mixture,
    read_softmax_mixture,
    require_sigmoids,
    scale_yarn,
)
from selfspec.loading.gguf_family import NORM_AFTER_ATTENTION, GgufFamily, Header
from selfspec.loading.gguf_hybrids import FALCON_MAMBA, HYBRIDS
from selfspec.loading.gguf_mixtures import COHERE2_MOE_RMS, MIXTURES, has_rms
from selfspec.loading.gguf_observed import OBSERVED
from selfspec.loading.gguf_readers import (
    Reader,
    has,
    integers,
    multipliers,
    numbers,
    passes_over,
    picture_positions,
    reads,
    sparse_by_router,
    windows,
)
from selfspec.loading.gguf_settings import Settings, damaged, refused


def _original_context(header: Header) -> dict[str, Any]:
    original = header.settings.integer("rope.scaling.original_context_length", 0)
    return {"original_max_position_embeddings": original} if original else {}


def _with_rope(header: Header) -> dict[str, Any]:
    if header.settings.get("rope.scaling.finetuned") is False:
        raise refused("this GGUF file is of a Granite model without rope, not supported")
    return {}


def _rope_by_layer(header: Header) -> dict[str, Any]:
    settings, name = header.settings, "attention.rope_pattern"
    rotates = settings.by_layer(name) if name in settings else [1] * header.layers
    if len(rotates) != header.layers:
        raise damaged(f"{settings.key(name)} of this GGUF file has {len(rotates)} entries for {header.layers} layers")
    base = settings.number("rope.freq_base", 10000.0)
    return {"layer_rope_theta": [base if each else 0.0 for each in rotates]}


def _attention_scale(largest: int) -> Reader:
    """Files do not tell the scale of attention. It goes by the size of a head, in the largest model by the width."""
    return lambda header: {
        "query_pre_attn_scalar": header.hidden // header.heads if header.layers == largest else header.head_dim
    }


def _all_dense(header: Header) -> dict[str, Any]:
    if header.settings.integer("leading_dense_block_count", header.layers) != header.layers:
        raise refused("this GGUF file has attention to latents and layers with experts, but says of no experts")
    return {}


def _shared_by_width(header: Header) -> dict[str, Any]:
    size, together = (header.settings.integer(f"expert_{kind}feed_forward_length") for kind in ("", "shared_"))
    scale = header.settings.number("expert_weights_scale", 0.0) or 1.0
    return {"num_shared_experts": together // (size or 1), "router_scaling_factor": scale}


def _ernie_shared(header: Header) -> dict[str, Any]:
    settings = header.settings
    size, together = (settings.integer(f"expert_{kind}feed_forward_length", 0) for kind in ("", "shared_"))
    if not size or together != size * settings.integer("expert_shared_count", 0):
        raise damaged(f"this GGUF file has experts of {size} and shared ones of {together} together")
    return {"moe_num_shared_experts": together // size}


def _parallel_where_one_norm(header: Header) -> dict[str, Any]:
    return {"use_parallel_residual": not header.has("ffn_norm.weight")}


def _has(settings: Settings, name: str) -> bool:
    return settings.integer(name, 0) > 0


_granite = reads(
    _with_rope,
    passes_over(
        *(f"ssm.{name}" for name in ("conv_kernel", "state_size", "group_count", "inner_size", "time_step_rank")),
        "expert_shared_feed_forward_length",
    ),
    multipliers,
)
"""Files of dense models and mixtures have settings of Granite's hybrids, too, which change nothing in them."""

_SHARED_WIDTH = {"shared_intermediate_size": "expert_shared_feed_forward_length"}
_granite_shared = reads(_granite, integers(**_SHARED_WIDTH))
_granite_swa = reads(_granite, windows(default=None, period=4, first=True), _rope_by_layer)
_granite_moe_swa = reads(_granite_swa, integers(0, **_SHARED_WIDTH))
_qwen3_moe = reads(norm_topk_prob=True)  # llama.cpp does it always
_qwen3_vl = reads(picture_positions, passes_over("n_deepstack_layers"))  # layers that pictures are added after
_routed_mixture = reads(require_sigmoids, read_mixture)
_wide_experts = integers(intermediate_size="expert_feed_forward_length")
_fourth_whole = windows(default=0, period=4)
_FINAL_SOFTCAP = {"final_logit_softcapping": "final_logit_softcapping"}
_gemma2 = reads(
    _attention_scale(largest=46),
    windows(default=4096, period=2),
    numbers(50.0, None, attn_logit_softcapping="attn_logit_softcapping"),
    numbers(30.0, None, **_FINAL_SOFTCAP),
)
_gemma3 = reads(_attention_scale(largest=62), windows(default=0, period=6), numbers(0.0, None, **_FINAL_SOFTCAP))
_phi3 = reads(integers(0, None, sliding_window="attention.sliding_window"), _original_context)
_exaone4 = reads(lambda _: {"sliding_window": None}, _fourth_whole)
_gpt_oss = reads(windows(default=0, period=2), _wide_experts)
_ernie_moe = reads(_ernie_shared, integers(1, moe_layer_interval="interleave_moe_layer_step"))
_exaone_moe = reads(_routed_mixture, passes_over("expert_shared_feed_forward_length"), _fourth_whole)
_hy_v3 = reads(require_sigmoids, _shared_by_width, sparse_by_router)
_deepseek2 = reads(read_latents, read_softmax_mixture)
_deepseek3 = reads(read_latents, read_mixture)
_youtu = reads(passes_over("expert_feed_forward_length"), _all_dense, read_latents, rope_interleave=True)

_SHARED_TOGETHER = {"shared_mlp.input_linear": "ffn_up_shexp"}


FAMILIES = {
    "llama": GgufFamily("llama", interleaved=True),  # Mistral, too, which differs in nothing here
    "qwen2": GgufFamily("qwen2"),
    "qwen3": GgufFamily("qwen3"),
    "qwen3moe": GgufFamily("qwen3_moe", _qwen3_moe),
    "qwen2vl": GgufFamily("qwen2", picture_positions),  # these three: the models of text alone
    "qwen3vl": GgufFamily("qwen3", _qwen3_vl),
    "qwen3vlmoe": GgufFamily("qwen3_moe", reads(_qwen3_vl, _qwen3_moe)),
    "qwen2moe": GgufFamily("qwen2_moe", reads(norm_topk_prob=False)),  # llama.cpp never does it
    "olmoe": GgufFamily("olmoe", reads(norm_topk_prob=False, clip_qkv=None)),
    "granitemoe": GgufFamily("granitemoe", _granite, interleaved=True),
    # Files do not tell which layers have no rope. It is every fourth in the models that there are.
    "smollm3": GgufFamily("smollm3", reads(no_rope_layer_interval=4), interleaved=True),
    "phi3": GgufFamily("phi3", _phi3, partial_rope=True),
    "olmo2": GgufFamily("olmo2", modules=NORM_AFTER_ATTENTION),
    "exaone4": GgufFamily("exaone4", _exaone4, modules=NORM_AFTER_ATTENTION),
    "seed_oss": GgufFamily("seed_oss", has(attention_out_bias="attn_output.bias"), modules=NORM_AFTER_ATTENTION),
    "ernie4_5": GgufFamily("ernie4_5"),
    "ernie4_5-moe": GgufFamily("ernie4_5_moe", _ernie_moe),
    "hunyuan-dense": GgufFamily("hunyuan_v1_dense"),
    "exaone-moe": GgufFamily("exaone_moe", _exaone_moe),
    "mellum": GgufFamily("mellum", reads(_qwen3_moe, _fourth_whole), rope_by_layer_type=True),
    "hy-v3": GgufFamily("hy_v3", _hy_v3),
    "jais2": GgufFamily("jais2", norm="layer_norm_eps", rms=False),
    "chatglm": GgufFamily("glm", partial_rope=True),
    "minimax-m2": GgufFamily("minimax_m2", reads(require_sigmoids, _wide_experts), partial_rope=True),
    "dots1": GgufFamily("dots1", reads(_routed_mixture, sliding_window=None)),
    "nemotron": GgufFamily("nemotron", norm="norm_eps", rms=False, norms_plus_one=True, partial_rope=True),
    "arcee": GgufFamily("arcee", interleaved=True),
    "gemma": GgufFamily("gemma", norms_plus_one=True),
    "granite": GgufFamily("granite", _granite, interleaved=True),
    "granite_swa": GgufFamily("granite_swa", _granite_swa, interleaved=True),
    "gemma2": GgufFamily("gemma2", _gemma2, modules=NORM_AFTER_ATTENTION, norms_plus_one=True),
    "gemma3": GgufFamily(
        "gemma3_text",
        _gemma3,
        modules=NORM_AFTER_ATTENTION,
        norms_plus_one=True,
        rope_by_layer_type=True,
        local_base=10000.0,
    ),
    "starcoder2": GgufFamily("starcoder2", norm="norm_epsilon", rms=False),
    "glm4": GgufFamily("glm4", partial_rope=True),
    "glm4moe": GgufFamily("glm4_moe", _routed_mixture, modules=NORM_AFTER_ATTENTION, partial_rope=True),
    "gpt-oss": GgufFamily(
        "gpt_oss", _gpt_oss, modules=NORM_AFTER_ATTENTION, in_turns=True, transposed=".experts.", rounds_yarn=False
    ),
    "deepseek2": GgufFamily("deepseek_v2", _deepseek2, change_rope=scale_yarn, latent=True),
    "stablelm": GgufFamily("stablelm", _parallel_where_one_norm, norm="layer_norm_eps", rms=False, partial_rope=True),
    **OBSERVED,
    **MIXTURES,
    **HYBRIDS,
}
"""By ``general.architecture``."""

OTHERS: tuple[tuple[str, Callable[[Settings], bool], GgufFamily], ...] = (
    ("llama", lambda settings: _has(settings, "expert_count"), GgufFamily("mixtral", interleaved=True)),
    ("deepseek2", has_sigmoids, GgufFamily("deepseek_v3", _deepseek3, change_rope=scale_yarn, latent=True)),
    ("deepseek2", lambda settings: not _has(settings, "expert_count"), GgufFamily("youtu", _youtu, latent=True)),
    (
        "olmo2",
        lambda settings: _has(settings, "attention.sliding_window"),
        GgufFamily("olmo3", _fourth_whole, modules=NORM_AFTER_ATTENTION, rope_by_layer_type=True),
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
