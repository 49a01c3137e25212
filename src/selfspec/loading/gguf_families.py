"""The config of a model from the header of its GGUF file, for every family that selfspec and llama.cpp both have.

A family is one row of a table. What a row does not say is alike in all of them: sizes, rope, biases, the head.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import transformers
from transformers import PreTrainedConfig

from selfspec.errors import ModelLoadError, UnsupportedModelError, first_line
from selfspec.loading.gguf_ends import read_special_tokens
from selfspec.loading.gguf_file import GgufTensor
from selfspec.loading.gguf_rope import read_rope
from selfspec.loading.gguf_settings import Settings
from selfspec.model.families import require_row

_MOST_HEADS = 2**12
_MOST_HEAD_DIM = 2**13
_MOST_EXPERTS = 2**14
"""No model has nearly as many. Tables of a model are as long, so that a damaged file may not choose them freely."""

_BLOCK = re.compile(r"blk\.(\d{1,9})\.")

_ELSEWHERE = "take the model's folder or its name on the hub"


@dataclass(frozen=True)
class Header:
    """What the settings of a config are read from.

    Attributes:
        settings: the model's own keys.
        tensors: the tensors of the file.
        layers: number of layers.
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


def _nothing(_: Header) -> dict[str, Any]:
    return {}


@dataclass(frozen=True)
class _Family:
    """A family of models in GGUF.

    Attributes:
        model_type: its name in transformers.
        norm: the attribute of its config for what norms add to a variance; its name tells the kind of norm.
        partial_rope: whether its models can rotate a part of a head.
        rope_by_layer_type: whether each type of layers has a rope of its own.
        rounds_yarn: whether the bounds of YaRN's ramp are whole numbers, as those of llama.cpp always are.
        more: the settings of its own.
    """

    model_type: str
    norm: str = "rms_norm_eps"
    partial_rope: bool = False
    rope_by_layer_type: bool = False
    rounds_yarn: bool = True
    more: Callable[[Header], dict[str, Any]] = _nothing


def _biases(header: Header) -> dict[str, Any]:
    return {"attention_bias": header.has_qkv_bias}


def _biases_and_mlp(header: Header) -> dict[str, Any]:
    return {**_biases(header), "mlp_bias": header.has("ffn_up.bias")}


def _experts(header: Header) -> dict[str, Any]:
    experts = header.settings.integer("expert_count", most=_MOST_EXPERTS)
    used = header.settings.integer("expert_used_count", most=_MOST_EXPERTS)
    if not 0 < used <= experts:
        raise ModelLoadError(f"this GGUF file uses {used} of {experts} experts; convert the model again")
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
        raise UnsupportedModelError(f"this GGUF file is of a Granite model without rope, not supported; {_ELSEWHERE}")
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
        raise ModelLoadError(
            f"{settings.key(name)} of this GGUF file has {len(windowed)} entries for {header.layers} layers; "
            "convert the model again"
        )
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


def _one_for_biases(header: Header) -> dict[str, Any]:
    return {"use_bias": header.has_qkv_bias}


def _stablelm(header: Header) -> dict[str, Any]:
    return {
        "use_qkv_bias": header.has_qkv_bias,
        "qk_layernorm": header.has("attn_q_norm.weight"),
        "use_parallel_residual": not header.has("ffn_norm.weight"),
    }


_FAMILIES = {
    "llama": _Family("llama", more=_biases_and_mlp),  # Mistral, too, which differs in nothing that files hold
    "qwen2": _Family("qwen2"),
    "qwen3": _Family("qwen3", more=_biases),
    "qwen3moe": _Family("qwen3_moe", more=_qwen3_moe),
    "qwen2moe": _Family("qwen2_moe", more=_qwen2_moe),
    "olmoe": _Family("olmoe", more=_olmoe),
    "granitemoe": _Family("granitemoe", more=_granite_moe),
    "smollm3": _Family("smollm3", more=_smollm3),
    "phi3": _Family("phi3", partial_rope=True, more=_phi3),
    "olmo2": _Family("olmo2", more=_biases),
    "exaone4": _Family("exaone4", more=_exaone4),
    "seed_oss": _Family("seed_oss", more=_seed_oss),
    "ernie4_5": _Family("ernie4_5", more=_one_for_biases),
    "arcee": _Family("arcee", more=_biases_and_mlp),
    "gemma": _Family("gemma"),
    "granite": _Family("granite", more=_granite),
    "gemma2": _Family("gemma2", more=_gemma2),
    "gemma3": _Family("gemma3_text", rope_by_layer_type=True, more=_gemma3),
    "starcoder2": _Family("starcoder2", norm="norm_epsilon", more=_one_for_biases),
    "glm4": _Family("glm4", partial_rope=True, more=_biases),
    "gpt-oss": _Family("gpt_oss", rounds_yarn=False, more=_gpt_oss),
    "stablelm": _Family("stablelm", norm="layer_norm_eps", partial_rope=True, more=_stablelm),
}
"""By ``general.architecture``."""

_MIXTRAL = _Family("mixtral", more=_experts)


def read_config(metadata: Mapping[str, Any], tensors: Mapping[str, GgufTensor]) -> PreTrainedConfig:
    """The config of the model in a GGUF file, as transformers has it for the same model.

    What a file does not hold is taken to be absent, as llama.cpp does: a sliding window that is not named, above all,
    which some converters leave out. Every setting of the file is either read or known to change nothing.

    Args:
        metadata: the keys of the file's header.
        tensors: its tensors by name.

    Raises:
        ModelLoadError: a setting is missing or makes no sense.
        UnsupportedModelError: the family, or a setting of this model, is not supported; the message names it.
    """
    settings = Settings(metadata)
    family = _find_family(settings, metadata)
    header = _read_header(settings, tensors)
    values = _read_values(family, header)
    tokens = read_special_tokens(metadata, values["vocab_size"])
    settings.refuse_unread()
    try:
        config = transformers.AutoConfig.for_model(family.model_type, **values, **tokens)
    except Exception as error:  # each config class has its own checks, and huggingface_hub its own errors
        raise UnsupportedModelError(
            f"this GGUF file's settings fit no {family.model_type} model: {_reason(error)}"
        ) from error
    for name, value in tokens.items():  # some classes put ids of their own in the place of none
        setattr(config, name, value)
    require_row(config)
    return config


def _find_family(settings: Settings, metadata: Mapping[str, Any]) -> _Family:
    kind = metadata.get("general.type", "model")
    if not isinstance(kind, str) or kind != "model":
        raise UnsupportedModelError(f"this GGUF file holds no model but: {str(kind)[:40]}; take the file of the model")
    if settings.architecture not in _FAMILIES:
        raise UnsupportedModelError(
            f"the family '{settings.architecture[:40]}' of this GGUF file is not supported; supported are "
            f"{', '.join(_FAMILIES)}"
        )
    if settings.architecture == "llama" and settings.integer("expert_count", 0, most=_MOST_EXPERTS):
        return _MIXTRAL
    return _FAMILIES[settings.architecture]


def _read_header(settings: Settings, tensors: Mapping[str, GgufTensor]) -> Header:
    hidden, layers = settings.integer("embedding_length"), settings.integer("block_count")
    found = max((int(match[1]) + 1 for match in map(_BLOCK.match, tensors) if match), default=0)
    if not hidden or not layers or found != layers or layers > len(tensors):
        raise ModelLoadError(
            f"this GGUF file has tensors of {found} layers, but says {settings.key('block_count')} {layers} and "
            f"{settings.key('embedding_length')} {hidden}; download or convert it again"
        )
    heads = settings.integer("attention.head_count", most=_MOST_HEADS)
    head_dim = settings.integer("attention.key_length", hidden // heads if heads else 0, most=_MOST_HEAD_DIM)
    groups = settings.integer("attention.head_count_kv", heads, most=_MOST_HEADS)
    value_dim = settings.integer("attention.value_length", head_dim)
    if not heads or not groups or heads % groups or not head_dim or value_dim != head_dim:
        raise UnsupportedModelError(
            f"the attention of this GGUF file is not supported: {heads} heads of {head_dim} entries for keys, {groups} "
            f"of {value_dim} for values; {_ELSEWHERE}"
        )
    return Header(settings, tensors, layers, hidden, heads, groups, head_dim)


def _read_values(family: _Family, header: Header) -> dict[str, Any]:
    """The settings of a config that are not token ids."""
    settings, tensors = header.settings, header.tensors
    embedding = tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise ModelLoadError("this GGUF file has no tensor token_embd.weight; take a file that holds a whole model")
    context = settings.integer("context_length")
    epsilon = settings.number(f"attention.layer_norm_{'rms_' if family.norm == 'rms_norm_eps' else ''}epsilon")
    if not context or not 0 <= epsilon < 1:
        raise ModelLoadError(
            f"this GGUF file has a context of {context} tokens and norms that add {epsilon:g}; convert the model again"
        )
    rope = read_rope(settings, tensors, header.head_dim, context, partial=family.partial_rope)
    if rope["rope_type"] == "yarn" and not family.rounds_yarn:
        rope["truncate"] = False
    if family.rope_by_layer_type:
        local = {"rope_type": "default", "rope_theta": settings.number("rope.freq_base_swa", 10000.0)}
        rope = {"full_attention": rope, "sliding_attention": local}
    return {
        "vocab_size": embedding.shape[0],
        "hidden_size": header.hidden,
        "num_hidden_layers": header.layers,
        "num_attention_heads": header.heads,
        "head_dim": header.head_dim,
        "num_key_value_heads": header.groups,
        "intermediate_size": settings.integer("feed_forward_length"),
        "max_position_embeddings": context,
        family.norm: epsilon,
        "rope_parameters": rope,
        "tie_word_embeddings": "output.weight" not in tensors,
        **family.more(header),
    }


def _reason(error: Exception) -> str:
    """Why a config class refuses its settings, without the name of the check that found it."""
    return first_line(error.__cause__ or error)
