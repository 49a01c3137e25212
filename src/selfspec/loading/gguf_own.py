"""What families of models in GGUF files have of their own: one row of a table each, with what reads their settings."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from selfspec.loading.gguf_deepseek import has_sigmoids, read_latents, read_mixture, read_softmax_mixture
from selfspec.loading.gguf_file import GgufTensor
from selfspec.loading.gguf_settings import Settings, damaged, refused

MOST_EXPERTS = 2**14
"""No model has nearly as many. Tables of a model are as long, so that a damaged file may not choose them freely."""


@dataclass(frozen=True)
class Header:
    """What the settings of a config are read from.

    Attributes:
        settings: the model's own keys.
        tensors: the tensors of the file.
        layers: number of layers, without those that predict later tokens.
        hidden: width of the residual stream.
        heads: attention heads.
        groups: heads of keys and values.
        head_dim: size of a head.
    """

    settings: Settings
    tensors: Mapping[str, GgufTensor]
    layers: int
    hidden: int
    heads: int
    groups: int
    head_dim: int

    def has(self, name: str) -> bool:
        """Whether the first layer has a tensor of this name."""
        return f"blk.0.{name}" in self.tensors

    @property
    def has_qkv_bias(self) -> bool:
        """Whether the projections of the attention's input have biases."""
        return self.has("attn_q.bias") or self.has("attn_qkv.bias")


def _biases(header: Header) -> dict[str, Any]:
    return {"attention_bias": header.has_qkv_bias}


def _biases_and_mlp(header: Header) -> dict[str, Any]:
    return {**_biases(header), "mlp_bias": header.has("ffn_up.bias")}


def _experts(header: Header) -> dict[str, Any]:
    experts = header.settings.integer("expert_count", most=MOST_EXPERTS)
    used = header.settings.integer("expert_used_count", most=MOST_EXPERTS)
    if not 0 < used <= experts:
        raise damaged(f"this GGUF file uses {used} of {experts} experts")
    return {"num_local_experts": experts, "num_experts_per_tok": used}


def _qwen2_moe(header: Header) -> dict[str, Any]:
    settings = header.settings
    experts = _experts(header)
    return {
        **experts,
        "num_experts": experts["num_local_experts"],
        "moe_intermediate_size": settings.integer("expert_feed_forward_length"),
        "shared_expert_intermediate_size": settings.integer("expert_shared_feed_forward_length"),
        "norm_topk_prob": False,  # llama.cpp never does it
        "qkv_bias": header.has_qkv_bias,
    }


def _granite_moe(header: Header) -> dict[str, Any]:
    values = _granite(header)
    del values["mlp_bias"]
    return {**values, **_experts(header)}


def _olmoe(header: Header) -> dict[str, Any]:
    return {**_biases(header), **_experts(header), "norm_topk_prob": False, "clip_qkv": None}


def _qwen3_moe(header: Header) -> dict[str, Any]:
    return {
        **_biases(header),
        **_experts(header),
        "moe_intermediate_size": header.settings.integer("expert_feed_forward_length"),
        "norm_topk_prob": True,  # llama.cpp does it always
    }


def _smollm3(header: Header) -> dict[str, Any]:
    # Files do not tell which layers have no rope. It is every fourth in the models that there are.
    return {**_biases_and_mlp(header), "no_rope_layer_interval": 4}


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
    return {
        **_biases_and_mlp(header),
        "embedding_multiplier": settings.number("embedding_scale", 0.0) or 1.0,
        "residual_multiplier": settings.number("residual_scale", 0.0) or 1.0,
        "logits_scaling": settings.number("logit_scale", 0.0) or 1.0,
        "attention_multiplier": settings.number("attention.scale", 0.0) or header.head_dim**-0.5,
    }


def _gemma2(header: Header) -> dict[str, Any]:
    return {
        **_gemma(header, largest=46),
        **_windows(header, default=4096, period=2),
        "attn_logit_softcapping": header.settings.number("attn_logit_softcapping", 50.0) or None,
        "final_logit_softcapping": header.settings.number("final_logit_softcapping", 30.0) or None,
    }


def _gemma3(header: Header) -> dict[str, Any]:
    return {
        **_gemma(header, largest=62),
        **_windows(header, default=0, period=6),
        "final_logit_softcapping": header.settings.number("final_logit_softcapping", 0.0) or None,
    }


def _gemma(header: Header, largest: int) -> dict[str, Any]:
    """Files do not tell the scale of attention. It goes by the size of a head, in the largest model by the width."""
    scalar = header.hidden // header.heads if header.layers == largest else header.head_dim
    return {"query_pre_attn_scalar": scalar}


def _windows(header: Header, *, default: int, period: int) -> dict[str, Any]:
    """Every ``period``-th layer attends to everything, the others through a window, if the file says nothing else."""
    settings, name = header.settings, "attention.sliding_window_pattern"
    window, pattern = settings.integer("attention.sliding_window", default), settings.get(name)
    if isinstance(pattern, (list, tuple, np.ndarray)):
        windowed = [bool(each) for each in pattern]
    else:
        period = settings.integer(name, period)
        windowed = [period == 0 or (layer + 1) % period != 0 for layer in range(header.layers)]
    if len(windowed) != header.layers:
        raise damaged(f"{settings.key(name)} of this GGUF file has {len(windowed)} entries for {header.layers} layers")
    if not window:
        return {"layer_types": ["full_attention"] * header.layers}
    types = ["sliding_attention" if each else "full_attention" for each in windowed]
    return {"sliding_window": window, "layer_types": types}


def _exaone4(header: Header) -> dict[str, Any]:
    return {"sliding_window": None, **_windows(header, default=0, period=4)}


def _seed_oss(header: Header) -> dict[str, Any]:
    return {**_biases_and_mlp(header), "attention_out_bias": header.has("attn_output.bias")}


def _gpt_oss(header: Header) -> dict[str, Any]:
    return {
        **_biases(header),
        **_experts(header),
        **_windows(header, default=0, period=2),
        "intermediate_size": header.settings.integer("expert_feed_forward_length"),
    }


def _deepseek2(header: Header) -> dict[str, Any]:
    return {**_routed(header), **read_latents(header.settings), **read_softmax_mixture(header.settings)}


def _deepseek3(header: Header) -> dict[str, Any]:
    return {**_routed(header), **read_latents(header.settings), **read_mixture(header.settings)}


def _glm4_moe(header: Header) -> dict[str, Any]:
    if not has_sigmoids(header.settings):
        raise refused("the router of this GGUF file has a softmax, not GLM-4.5's sigmoids")
    return {
        **_biases(header),
        **_routed(header),
        **read_mixture(header.settings),
        "use_qk_norm": header.has("attn_q_norm.weight"),
    }


def _routed(header: Header) -> dict[str, Any]:
    experts = _experts(header)
    return {"n_routed_experts": experts["num_local_experts"], "num_experts_per_tok": experts["num_experts_per_tok"]}


def _one_for_biases(header: Header) -> dict[str, Any]:
    return {"use_bias": header.has_qkv_bias}


def _stablelm(header: Header) -> dict[str, Any]:
    return {
        "use_qkv_bias": header.has_qkv_bias,
        "qk_layernorm": header.has("attn_q_norm.weight"),
        "use_parallel_residual": not header.has("ffn_norm.weight"),
    }


_AFTER_ATTENTION = {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
_BEFORE_MLP = {"post_attention_layernorm": "post_attention_norm"}
_SANDWICH = {"post_self_attn_layernorm": "post_attention_norm", "post_mlp_layernorm": "post_ffw_norm"}


@dataclass(frozen=True)
class GgufFamily:
    """A family of models in GGUF.

    Attributes:
        model_type: its name in transformers.
        read_own: reads the settings of its own in transformers' words. Raises ``ModelLoadError`` for those that are
            missing or make no sense, ``UnsupportedModelError`` where transformers' family computes something else.
        norm: the attribute of its config for what norms add to a variance; its name tells the kind of norm.
        modules: names in GGUF by those of modules in transformers, where it differs from others.
        interleaved: llama.cpp stores its rotated projections with the two halves of a head interleaved.
        transposed: parameters of experts have inputs before outputs, and gate and up of an entry side by side.
        norms_plus_one: files have one added to the weights of norms.
        partial_rope: whether its models can rotate a part of a head.
        rope_by_layer_type: whether each type of layers has a rope of its own.
        rounds_yarn: whether the bounds of YaRN's ramp are whole numbers, as those of llama.cpp always are.
        latent: attention is to latents.
    """

    model_type: str
    read_own: Callable[[Header], dict[str, Any]] = lambda _: {}
    norm: str = "rms_norm_eps"
    modules: Mapping[str, str] = field(default_factory=dict)
    interleaved: bool = False
    transposed: bool = False
    norms_plus_one: bool = False
    partial_rope: bool = False
    rope_by_layer_type: bool = False
    rounds_yarn: bool = True
    latent: bool = False


FAMILIES = {
    "llama": GgufFamily("llama", _biases_and_mlp, interleaved=True),  # Mistral, too, which differs in nothing here
    "qwen2": GgufFamily("qwen2"),
    "qwen3": GgufFamily("qwen3", _biases),
    "qwen3moe": GgufFamily("qwen3_moe", _qwen3_moe),
    "qwen2moe": GgufFamily("qwen2_moe", _qwen2_moe),
    "olmoe": GgufFamily("olmoe", _olmoe),
    "granitemoe": GgufFamily("granitemoe", _granite_moe, interleaved=True),
    "smollm3": GgufFamily("smollm3", _smollm3, interleaved=True),
    "phi3": GgufFamily("phi3", _phi3, partial_rope=True),
    "olmo2": GgufFamily("olmo2", _biases, modules=_AFTER_ATTENTION),
    "exaone4": GgufFamily("exaone4", _exaone4, modules=_AFTER_ATTENTION),
    "seed_oss": GgufFamily("seed_oss", _seed_oss, modules=_BEFORE_MLP),
    "ernie4_5": GgufFamily("ernie4_5", _one_for_biases),
    "arcee": GgufFamily("arcee", _biases_and_mlp, interleaved=True),
    "gemma": GgufFamily("gemma", norms_plus_one=True),
    "granite": GgufFamily("granite", _granite, interleaved=True),
    "gemma2": GgufFamily("gemma2", _gemma2, modules=_AFTER_ATTENTION, norms_plus_one=True),
    "gemma3": GgufFamily(
        "gemma3_text", _gemma3, modules=_AFTER_ATTENTION, norms_plus_one=True, rope_by_layer_type=True
    ),
    "starcoder2": GgufFamily("starcoder2", _one_for_biases, norm="norm_epsilon"),
    "glm4": GgufFamily("glm4", _biases, modules=_SANDWICH, partial_rope=True),
    "glm4moe": GgufFamily("glm4_moe", _glm4_moe, modules=_BEFORE_MLP, partial_rope=True),
    "gpt-oss": GgufFamily("gpt_oss", _gpt_oss, modules=_BEFORE_MLP, transposed=True, rounds_yarn=False),
    "deepseek2": GgufFamily("deepseek_v2", _deepseek2, latent=True),
    "stablelm": GgufFamily("stablelm", _stablelm, norm="layer_norm_eps", partial_rope=True),
}
"""By ``general.architecture``."""

MIXTRAL = GgufFamily("mixtral", _experts, interleaved=True)
DEEPSEEK_V3 = GgufFamily("deepseek_v3", _deepseek3, latent=True)

BY_MODEL_TYPE = {family.model_type: family for family in (*FAMILIES.values(), MIXTRAL, DEEPSEEK_V3)}
"""By ``config.model_type``."""
