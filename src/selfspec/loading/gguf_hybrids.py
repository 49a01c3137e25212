"""What GGUF files say of layers with recurrent states: gated delta nets, short convolutions, Mamba and Mamba-2."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from selfspec.loading.gguf_deepseek import read_mixture, require_sigmoids, sigmoids_if_said
from selfspec.loading.gguf_family import NORM_AFTER_ATTENTION, GgufFamily, Header, Rows
from selfspec.loading.gguf_readers import Reader, has, integers, multipliers, passes_over, picture_positions, reads
from selfspec.loading.gguf_settings import damaged, refused

_PERIOD = 4
"""Every fourth layer has full attention where a file does not say which."""


def _read_delta_nets(header: Header) -> dict[str, Any]:
    """The layers with gated delta nets, and the sizes of these."""
    settings, layers, name = header.settings, header.layers, "attention.recurrent_layers"
    period = settings.integer("full_attention_interval", _PERIOD) or 1
    recurrent = [bool((layer + 1) % period) for layer in range(layers)]
    if name in settings:
        recurrent = list(map(bool, settings.by_layer(name)))[:layers]
    keys, values = settings.integer("ssm.group_count"), settings.integer("ssm.time_step_rank")
    inner = settings.integer("ssm.inner_size")
    if len(recurrent) != layers or not keys or not values or values % keys or inner % values:
        raise damaged(
            f"this GGUF file has delta nets of {keys} heads of keys and {values} of values in {inner} entries, in "
            f"{len(recurrent)} layers"
        )
    return {
        "layer_types": ["linear_attention" if each else "full_attention" for each in recurrent],
        "linear_conv_kernel_dim": settings.integer("ssm.conv_kernel"),
        "linear_key_head_dim": settings.integer("ssm.state_size"),
        "linear_num_key_heads": keys,
        "linear_num_value_heads": values,
        "linear_value_head_dim": inner // values,
    }


def _read_kinds(header: Header, other: str = "linear_attention") -> dict[str, list[str]]:
    """The kinds of layers; those without heads of keys and values are of the other one."""
    groups = header.settings.by_layer("attention.head_count_kv")
    if len(groups) != header.layers:
        raise damaged(f"this GGUF file gives heads of keys for {len(groups)} of {header.layers} layers")
    return {"layer_types": ["full_attention" if each else other for each in groups]}


def _mamba2_sizes(*names: str) -> Reader:
    """Of Mamba-2, by ``names``, its heads, their size, groups, states and the convolution's rows."""

    def read(header: Header) -> dict[str, Any]:
        inner, heads, groups, states, kernel = (
            header.settings.integer(f"ssm.{name}")
            for name in ("inner_size", "time_step_rank", "group_count", "state_size", "conv_kernel")
        )
        if not heads or not groups or inner % heads or inner % groups:
            raise damaged(f"this GGUF file has states of the sizes {inner} in all, {heads} heads and {groups} groups")
        return dict(zip(names, (heads, inner // heads, groups, states, kernel), strict=True))

    return read


def _expansion(name: str) -> Reader:
    """How many times the model's width the inner one is, by what a config calls that."""
    return lambda header: {name: header.settings.integer("ssm.inner_size") // header.hidden}


def _order_joined(config: Any) -> Mapping[str, Rows]:
    """Where the outputs of Qwen3-Next's ``in_proj_qkvz``, which has those of a key head together, are in two tensors.

    The tensors have all queries, keys and values, and what values are gated by.
    """
    heads, value = config.linear_num_key_heads, _values_of_key(config) * config.linear_value_head_dim
    sizes = (config.linear_key_head_dim, config.linear_key_head_dim, value, value)
    parts = np.split(np.arange(heads * sum(sizes)), np.cumsum(sizes[:-1]) * heads)
    return {"attn_qkv attn_gate": np.concatenate([part.reshape(heads, -1) for part in parts], 1).flatten()}


def _order_values(config: Any) -> Mapping[str, Rows]:
    """Where the outputs of Qwen3.5's delta nets are whose heads of values llama.cpp puts into another order."""
    keys = 2 * config.linear_num_key_heads * config.linear_key_head_dim
    each, wide = _order_heads(config, 1), _order_heads(config, config.linear_value_head_dim)
    mixed = np.concatenate([np.arange(keys), keys + wide])
    return {
        **dict.fromkeys(("attn_qkv", "ssm_conv1d"), mixed),
        "attn_gate": wide,
        **dict.fromkeys(("ssm_beta", "ssm_alpha", "ssm_dt", "ssm_a"), each),
    }


def _order_value_inputs(config: Any) -> Mapping[str, Rows]:
    """The same of inputs."""
    return {"ssm_out": _order_heads(config, config.linear_value_head_dim)}


def _order_heads(config: Any, size: int) -> Rows:
    """Files have the first head of values of every key head, then the second; transformers has them by key head."""
    heads = np.arange(config.linear_num_value_heads * size).reshape(_values_of_key(config), -1, size)
    order: Rows = heads.swapaxes(0, 1).flatten()
    return order


def _values_of_key(config: Any) -> int:
    return int(config.linear_num_value_heads // config.linear_num_key_heads)


def _nemotron_kinds(header: Header) -> dict[str, Any]:
    settings = header.settings
    groups, widths = (settings.by_layer(name) for name in ("attention.head_count_kv", "feed_forward_length"))
    if not len(groups) == len(widths) == header.layers:
        raise damaged(f"this GGUF file has kinds of {len(groups)} and {len(widths)} layers of {header.layers}")
    mlp = "moe" if settings.integer("expert_count", 0) else "mlp"
    kinds = [
        "full_attention" if heads else mlp if width else "linear_attention"
        for heads, width in zip(groups, widths, strict=True)
    ]
    return {"layers_block_type": kinds}


def _nemotron_experts(header: Header) -> dict[str, Any]:
    if not header.settings.integer("expert_count", 0):
        return {}
    shared = integers(moe_shared_expert_intermediate_size="expert_shared_feed_forward_length")
    return reads(sigmoids_if_said, read_mixture, shared)(header)


def _read_period(chosen: list[bool], name: str) -> dict[str, int]:
    """Which layers are chosen, as Jamba's config says it: one in every ``period``, from ``offset`` on."""
    offset = chosen.index(True) if True in chosen else 0
    period = next((after for after, each in enumerate(chosen[offset + 1 :], 1) if each), len(chosen))
    if chosen != [layer % period == offset for layer in range(len(chosen))]:
        raise refused(f"this GGUF file has no regular {name}_layer_period, which a Jamba model needs")
    return {f"{name}_layer_period": period, f"{name}_layer_offset": offset}


def _jamba_layers(header: Header) -> dict[str, Any]:
    sparse = header.layers_with("ffn_gate_inp.weight")
    whole = [kind == "full_attention" for kind in _read_kinds(header)["layer_types"]]
    return {**_read_period(whole, "attn"), **(_read_period(sparse, "expert") if any(sparse) else {})}


def _granite_hybrid(header: Header) -> dict[str, Any]:
    settings = header.settings
    if settings.get("rope.scaling.finetuned") is not False:
        raise refused("this GGUF file is of a Granite hybrid with a rope (Bamba), not supported")
    shared = settings.integer("expert_shared_feed_forward_length", 0)
    return {
        **({} if settings.integer("expert_count", 0) else {"num_local_experts": 0, "num_experts_per_tok": 0}),
        "shared_intermediate_size": shared or settings.integer("feed_forward_length"),
    }


_qwen3_next = reads(
    _read_delta_nets,
    lambda _: {"mlp_only_layers": []},
    norm_topk_prob=True,  # llama.cpp does it always
)
_qwen35 = reads(picture_positions, _read_delta_nets)
_convolutions = reads(
    lambda header: _read_kinds(header, "conv"), integers(conv_L_cache="shortconv.l_cache"), conv_bias=False
)
_lfm2_moe = reads(
    require_sigmoids,
    _convolutions,
    norm_topk_prob=True,  # llama.cpp does it always
    use_expert_bias=True,
)
_own_biases = has(mamba_conv_bias="ssm_conv1d.bias", mamba_proj_bias="ssm_in.bias")
_whole_biases = has(use_bias="ssm_in.bias", use_conv_bias="ssm_conv1d.bias")
_own_sizes = _mamba2_sizes("mamba_n_heads", "mamba_d_head", "mamba_n_groups", "mamba_d_state", "mamba_d_conv")
_falcon_h1 = reads(  # whose files have the multipliers of its config in the weights
    _own_sizes,
    integers(mamba_d_ssm="ssm.inner_size"),
    _own_biases,
    has(projectors_bias="ssm_out.bias", mamba_rms_norm="ssm_norm.weight"),
    mamba_norm_before_gate=False,
)
_granite = reads(multipliers, _granite_hybrid, _own_sizes, _expansion("mamba_expand"), _own_biases, _read_kinds)
_nemotron_h = reads(
    # The first is the same as that of root mean squares; the family has no rope.
    passes_over("attention.layer_norm_epsilon", "rope.dimension_count", "rope.freq_base"),
    _mamba2_sizes("mamba_num_heads", "mamba_head_dim", "n_groups", "ssm_state_size", "conv_kernel"),
    _nemotron_kinds,
    _whole_biases,
    _nemotron_experts,
)
_mamba = reads(
    passes_over("ssm.dt_b_c_rms"),
    integers(
        state_size="ssm.state_size",
        conv_kernel="ssm.conv_kernel",
        time_step_rank="ssm.time_step_rank",
        intermediate_size="ssm.inner_size",
    ),
    _expansion("expand"),
    _whole_biases,
)
_mamba2 = reads(
    _mamba2_sizes("num_heads", "head_dim", "n_groups", "state_size", "conv_kernel"),
    _expansion("expand"),
    _whole_biases,
)
_jamba = reads(
    _jamba_layers,
    integers(mamba_d_state="ssm.state_size", mamba_d_conv="ssm.conv_kernel", mamba_dt_rank="ssm.time_step_rank"),
    _expansion("mamba_expand"),
    _own_biases,
)

_DELTA_NETS: dict[str, Any] = {
    "modules": NORM_AFTER_ATTENTION,
    "norms_plus_one": True,
    "partial_rope": True,
}
_BY_VALUES = {**_DELTA_NETS, "order_outputs": _order_values, "order_inputs": _order_value_inputs}
_RECURRENT: dict[str, Any] = {
    "norm": "layer_norm_epsilon",
    "whole": frozenset({"dt_proj", "embeddings", "lm_head"}),
    "attends": False,
    "rotates": False,
}

FALCON_MAMBA = GgufFamily("falcon_mamba", _mamba, **_RECURRENT)

_NEMOTRON_H = GgufFamily(
    "nemotron_h",
    _nemotron_h,
    norm="layer_norm_epsilon",
    whole=frozenset({"experts"}),
    rotates=False,
    may_be_dense=True,
    varies=True,
)
HYBRIDS = {
    "mamba": GgufFamily("mamba", _mamba, **_RECURRENT),
    "mamba2": GgufFamily("mamba2", _mamba2, **_RECURRENT),
    "jamba": GgufFamily("jamba", _jamba, whole=frozenset({"dt_proj"}), rotates=False, varies=True),
    "granitehybrid": GgufFamily("granitemoehybrid", _granite, interleaved=True, may_be_dense=True, varies=True),
    "qwen3next": GgufFamily("qwen3_next", _qwen3_next, order_outputs=_order_joined, **_DELTA_NETS),
    "qwen35": GgufFamily("qwen3_5_text", _qwen35, **_BY_VALUES),
    "qwen35moe": GgufFamily("qwen3_5_moe_text", _qwen35, **_BY_VALUES),
    "lfm2": GgufFamily("lfm2", reads(_convolutions, block_auto_adjust_ff_dim=False), norm="norm_eps", varies=True),
    "lfm2moe": GgufFamily("lfm2_moe", _lfm2_moe, norm="norm_eps", varies=True),
    "falcon-h1": GgufFamily("falcon_h1", _falcon_h1),
    **dict.fromkeys(("nemotron_h", "nemotron_h_moe"), _NEMOTRON_H),
}
"""Families with recurrent states, by ``general.architecture``."""
