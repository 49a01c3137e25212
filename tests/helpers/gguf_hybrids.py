"""Layers with recurrent states in GGUF files, in the form that llama.cpp's own converter gives them."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

Values = npt.NDArray[np.float32]

DELTA_NETS = ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text")
CONVOLUTIONS = ("lfm2", "lfm2_moe")
_MAMBA = ("mamba", "falcon_mamba", "jamba")
RECURRENT = ("mamba", "falcon_mamba", "mamba2")
_STATES = {
    **dict.fromkeys(("falcon_h1", "granitemoehybrid", "jamba"), ".mamba."),
    **dict.fromkeys(("nemotron_h", *RECURRENT), ".mixer."),
}
"""What parameters with states of Mamba or Mamba-2 are in, by family."""


def hybrid_settings(config: Any) -> dict[str, Any]:
    """The settings of such layers."""
    family = config.model_type
    if family in CONVOLUTIONS:
        return {
            "attention.head_count_kv": [
                config.num_key_value_heads if kind == "full_attention" else 0 for kind in config.layer_types
            ],
            "attention.layer_norm_rms_epsilon": config.norm_eps,
            "attention.layer_norm_epsilon": None,
            "shortconv.l_cache": config.conv_L_cache,
            "leading_dense_block_count": getattr(config, "num_dense_layers", None),
            "expert_gating_func": 2 if family == "lfm2_moe" else None,
        }
    if family in RECURRENT:
        return _mamba_settings(config)
    if family in _STATES:
        return _mamba2_settings(config)
    if family not in DELTA_NETS:
        return {}
    return {
        "ssm.conv_kernel": config.linear_conv_kernel_dim,
        "ssm.state_size": config.linear_key_head_dim,
        "ssm.group_count": config.linear_num_key_heads,
        "ssm.time_step_rank": config.linear_num_value_heads,
        "ssm.inner_size": config.linear_num_value_heads * config.linear_value_head_dim,
        "attention.recurrent_layers": [kind == "linear_attention" for kind in config.layer_types],
        "full_attention_interval": 4,
        "rope.dimension_sections": [11, 11, 10, 0] if family.startswith("qwen3_5") else None,
    }


def _mamba_settings(config: Any) -> dict[str, Any]:
    is_second = config.model_type == "mamba2"
    inner = config.expand * config.hidden_size
    more = {"ssm.group_count": config.n_groups} if is_second else {"ssm.dt_b_c_rms": config.model_type != "mamba"}
    return {
        "vocab_size": config.vocab_size,
        "embedding_length": config.hidden_size,
        "block_count": config.num_hidden_layers,
        "context_length": 2**20,
        "feed_forward_length": 0,
        "attention.head_count": 0,
        "attention.layer_norm_rms_epsilon": config.layer_norm_epsilon,
        "ssm.conv_kernel": config.conv_kernel,
        "ssm.inner_size": inner,
        "ssm.state_size": config.state_size,
        "ssm.time_step_rank": inner // config.head_dim if is_second else config.time_step_rank,
        **more,
    }


def _mamba2_settings(config: Any) -> dict[str, Any]:
    if config.model_type == "jamba":
        groups = config.num_key_value_heads
        return {
            "attention.head_count_kv": [groups if kind == "attention" else 0 for kind in config.layers_block_type],
            "expert_feed_forward_length": None,
            "rope.freq_base": None,
            "rope.dimension_count": None,
            "ssm.conv_kernel": config.mamba_d_conv,
            "ssm.state_size": config.mamba_d_state,
            "ssm.time_step_rank": config.mamba_dt_rank,
            "ssm.inner_size": config.mamba_expand * config.hidden_size,
        }
    if config.model_type == "granitemoehybrid":
        kinds = config.layer_types
        return {
            "attention.head_count_kv": [
                config.num_key_value_heads if kind == "full_attention" else 0 for kind in kinds
            ],
            "context_length": 2**20,
            "rope.scaling.finetuned": False,
            "expert_shared_feed_forward_length": config.shared_intermediate_size,
            "ssm.conv_kernel": config.mamba_d_conv,
            "ssm.state_size": config.mamba_d_state,
            "ssm.group_count": config.mamba_n_groups,
            "ssm.time_step_rank": config.mamba_n_heads,
            "ssm.inner_size": config.mamba_expand * config.hidden_size,
        }
    if config.model_type == "falcon_h1":
        return {
            "ssm.conv_kernel": config.mamba_d_conv,
            "ssm.state_size": config.mamba_d_state,
            "ssm.group_count": config.mamba_n_groups,
            "ssm.time_step_rank": config.mamba_n_heads,
            "ssm.inner_size": config.mamba_d_ssm,
            "embedding_scale": None,
            "rope.dimension_count": None,
        }
    kinds = config.layers_block_type
    mixture = "moe" in kinds
    width = config.moe_intermediate_size if mixture else config.intermediate_size
    return {
        "ssm.conv_kernel": config.conv_kernel,
        "ssm.state_size": config.ssm_state_size,
        "ssm.group_count": config.n_groups,
        "ssm.time_step_rank": config.mamba_num_heads,
        "ssm.inner_size": config.mamba_num_heads * config.mamba_head_dim,
        "attention.head_count_kv": [config.num_key_value_heads if kind == "full_attention" else 0 for kind in kinds],
        "feed_forward_length": [width if kind in ("mlp", "moe") else 0 for kind in kinds],
        "attention.layer_norm_rms_epsilon": config.layer_norm_epsilon,
        "attention.layer_norm_epsilon": config.layer_norm_epsilon,
        "rope.dimension_count": config.hidden_size // config.num_attention_heads,  # though there is no rope
        "rope.scaling.finetuned": False,
        **({} if mixture else dict.fromkeys((*_MIXTURE, "expert_shared_feed_forward_length"))),
        **({"expert_shared_feed_forward_length": config.moe_shared_expert_intermediate_size} if mixture else {}),
    }


_MIXTURE = (
    *("expert_count", "expert_used_count", "expert_shared_count", "expert_feed_forward_length", "expert_gating_func"),
    *("expert_weights_scale", "expert_weights_norm", "expert_group_count", "expert_group_used_count"),
)


def hybrid_tensors(name: str, values: Values, config: Any) -> Iterator[tuple[str, Values]] | None:
    """The tensors of a parameter of such a layer, without their block; ``None`` for another parameter."""
    if (within := _STATES.get(config.model_type)) and (part := name.rpartition(within)[2]) in _MAMBA2:
        return iter([(_MAMBA2[part], _of_mamba2(part, values, config))])
    _, _, own = name.partition(".linear_attn.")
    if ".conv.conv." in name:
        return iter([("shortconv.conv.weight", values[:, 0])])
    return _delta_net(own, values, config) if own else None


def _of_mamba2(part: str, values: Values, config: Any) -> Values:
    if part == "conv1d.weight":
        return values[:, 0]
    if part == "norm.weight":
        return values.reshape(getattr(config, "n_groups", None) or config.mamba_n_groups, -1)
    if part == "A_log":
        values = -np.exp(values.astype(np.float64))
    return values[:, None] if part in ("A_log", "D") and config.model_type not in _MAMBA else values


_MAMBA2 = {
    "in_proj.weight": "ssm_in.weight",
    "in_proj.bias": "ssm_in.bias",
    "conv1d.weight": "ssm_conv1d.weight",
    "conv1d.bias": "ssm_conv1d.bias",
    "x_proj.weight": "ssm_x.weight",
    "dt_proj.weight": "ssm_dt.weight",
    "dt_proj.bias": "ssm_dt.bias",
    **{f"{part}_layernorm.weight": f"ssm_{part}_norm.weight" for part in ("dt", "b", "c")},
    "dt_bias": "ssm_dt.bias",
    "A_log": "ssm_a",
    "D": "ssm_d",
    "norm.weight": "ssm_norm.weight",
    "out_proj.weight": "ssm_out.weight",
}


def _delta_net(own: str, values: Values, config: Any) -> Iterator[tuple[str, Values]]:
    heads, size = config.linear_num_key_heads, config.linear_key_head_dim
    if own == "in_proj_qkvz.weight":  # by key head: its query, its key, its values and their gates
        each = config.linear_num_value_heads // heads * config.linear_value_head_dim
        query, key, value, gate = np.split(
            values.reshape(heads, -1, values.shape[-1]), [size, 2 * size, 2 * size + each], 1
        )
        yield "attn_qkv.weight", np.concatenate([part.reshape(-1, values.shape[-1]) for part in (query, key, value)])
        yield "attn_gate.weight", gate.reshape(-1, values.shape[-1])
        return
    tiled = config.model_type != "qwen3_next"
    if own == "conv1d.weight":
        values = values[:, 0]
    if tiled and own in ("in_proj_qkv.weight", "conv1d.weight"):
        queries_keys, of_values = np.split(values, [2 * heads * size])
        values = np.concatenate([queries_keys, _tile(of_values, config)])
    elif tiled and own == "out_proj.weight":
        values = _tile(values.T, config).T
    elif tiled and own != "norm.weight":
        values = _tile(values, config)
    if own == "A_log":
        values = -np.exp(values.astype(np.float64))
    yield _NAMES[own], values


def _tile(values: Values, config: Any) -> Values:
    """Puts the first head of values of every key head first, then the second of every one."""
    keys, heads = config.linear_num_key_heads, config.linear_num_value_heads
    by_head = np.split(values, heads)
    per_key = heads // keys
    return np.concatenate([by_head[key * per_key + index] for index in range(per_key) for key in range(keys)])


_NAMES = {
    "in_proj_qkv.weight": "attn_qkv.weight",
    "in_proj_z.weight": "attn_gate.weight",
    "in_proj_b.weight": "ssm_beta.weight",
    "in_proj_a.weight": "ssm_alpha.weight",
    "in_proj_ba.weight": "ssm_ba.weight",
    "conv1d.weight": "ssm_conv1d.weight",
    "dt_bias": "ssm_dt.bias",
    "A_log": "ssm_a",
    "norm.weight": "ssm_norm.weight",
    "out_proj.weight": "ssm_out.weight",
}
