"""GGUF files of families without a row, but for hybrids, in the form that llama.cpp's own converter gives them."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

Values = npt.NDArray[np.float32]

_SEPARATE = ("gpt2", "gpt_bigcode", "gpt_neox", "bloom", "mpt", "falcon", "phi")
"""Families whose converters write all settings themselves."""


_FUSED = {"shared_mlp.input_linear": "ffn_up_shexp", "mlp.experts.gate_up_proj": "ffn_gate_up_exps"}
"""What files of Granite with windows and experts have as one tensor."""


def observed_settings(config: Any) -> dict[str, Any] | None:
    """All settings of a family whose converter writes them itself; ``None`` for another one."""
    family = config.model_type
    if family not in _SEPARATE:
        return None
    width = getattr(config, "n_inner", None) or getattr(config, "intermediate_size", None)
    return {
        "vocab_size": config.vocab_size,
        "embedding_length": config.hidden_size,
        "block_count": config.num_hidden_layers,
        "context_length": {"falcon": 2048, "mpt": getattr(config, "max_seq_len", 0), "bloom": config.hidden_size}.get(
            family, getattr(config, "max_position_embeddings", None)
        ),
        "feed_forward_length": 4 * config.hidden_size if family in ("bloom", "mpt", "falcon") else width,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": _groups(config),
        "attention.layer_norm_epsilon": getattr(config, "layer_norm_epsilon", None) or config.layer_norm_eps,
        **_own(config),
    }


def _groups(config: Any) -> int | None:
    heads: int = config.num_attention_heads
    return {"bloom": heads, "phi": heads, "gpt_bigcode": 1, "falcon": getattr(config, "num_kv_heads", 1)}.get(
        config.model_type
    )


def _own(config: Any) -> dict[str, Any]:
    family = config.model_type
    if family in ("gpt_neox", "phi"):
        size = config.hidden_size // config.num_attention_heads
        share = config.rope_parameters["partial_rotary_factor"]
        parallel = {"use_parallel_residual": config.use_parallel_residual} if family == "gpt_neox" else {}
        return {"rope.dimension_count": int(share * size), **parallel}
    if family == "mpt":
        clip = config.attn_config.clip_qkv
        return {"attention.max_alibi_bias": 8.0, "attention.clamp_kqv": None if clip is None else float(clip)}
    return {"tensor_data_layout": "jploski"} if family == "falcon" else {}


def further_settings(config: Any) -> dict[str, Any]:
    """What families without a row have beside the usual settings."""
    family = config.model_type
    if family == "llama4_text":
        return {
            "feed_forward_length": config.intermediate_size_mlp,
            "interleave_moe_layer_step": config.interleave_moe_layer_step,
            "expert_feed_forward_length": config.intermediate_size,
        }
    if family == "ministral3":
        rope = config.rope_parameters
        return {
            "rope.scaling.yarn_log_multiplier": rope["mscale_all_dim"],
            "attention.temperature_scale": rope["llama_4_scaling_beta"],
            "rope.scaling.yarn_beta_fast": rope["beta_fast"],
            "rope.scaling.yarn_beta_slow": rope["beta_slow"],
        }
    if family == "minicpm3":
        return {
            "attention.q_lora_rank": config.q_lora_rank,
            "attention.kv_lora_rank": config.kv_lora_rank,
            "attention.key_length": config.qk_nope_head_dim + config.qk_rope_head_dim,
            "attention.value_length": None,
            "logit_scale": None,
            "rope.dimension_count": config.qk_rope_head_dim,
        }
    if family == "hunyuan_v1_moe":
        return {
            "expert_used_count": config.moe_topk,
            "expert_feed_forward_length": config.intermediate_size,
            "expert_shared_feed_forward_length": config.intermediate_size,
            "expert_shared_count": 1,
        }
    if family == "afmoe":
        return {
            "expert_shared_count": config.num_shared_experts,
            "leading_dense_block_count": config.num_dense_layers,
            "expert_weights_norm": True,
            "expert_weights_scale": config.route_scale,
            "expert_gating_func": 2,
            "expert_group_count": 1,
            "expert_group_used_count": 1,
            "attention.sliding_window": config.sliding_window,
        }
    if family == "laguna":
        return _laguna(config)
    if family == "sarvam_moe":
        return {"expert_shared_feed_forward_length": config.moe_intermediate_size, "nextn_predict_layers": 0}
    if family == "mimo_v2_flash":
        return _mimo(config)
    if family == "cohere2_moe":
        return _cohere2_moe(config)
    if family.startswith("gemma4"):
        return _gemma4(config)
    if family in ("granite_swa", "granitemoe_swa"):
        return {
            "attention.rope_pattern": [base > 0 for base in config.layer_rope_theta],
            "expert_shared_feed_forward_length": getattr(config, "shared_intermediate_size", None),
        }
    if family == "youtu":
        return {
            "expert_feed_forward_length": config.intermediate_size,
            "expert_shared_count": 0,
            "leading_dense_block_count": config.num_hidden_layers,
        }
    if family == "granitemoeshared":
        return {"expert_shared_feed_forward_length": config.shared_intermediate_size}
    if family == "phimoe":
        return {
            "rope.scaling.original_context_length": config.max_position_embeddings,
            "attention.sliding_window": config.sliding_window or 0,
        }
    if family == "olmo":
        clip = config.clip_qkv
        return {"attention.layer_norm_epsilon": 1e-5, "attention.clamp_kqv": None if clip is None else float(clip)}
    return {"rope.scaling.type": "none"} if family == "cohere" else {}


def _cohere2_moe(config: Any) -> dict[str, Any]:
    shared = config.num_shared_experts
    return {
        "feed_forward_length": config.prefix_dense_intermediate_size,
        "attention.sliding_window": config.sliding_window,
        "attention.sliding_window_pattern": [kind == "sliding_attention" for kind in config.layer_types],
        "expert_feed_forward_length": config.intermediate_size,
        "expert_shared_count": shared or None,
        "expert_shared_feed_forward_length": shared * config.intermediate_size or None,
        "expert_gating_func": {"softmax": 1, "sigmoid": 2}[config.expert_selection_fn],
        "expert_weights_norm": config.norm_topk_prob,
        "leading_dense_block_count": config.mlp_layer_types.count("dense"),
        "rope.scaling.type": "none",
    }


def _mimo(config: Any) -> dict[str, Any]:
    sliding = [int(kind == "sliding_attention") for kind in config.layer_types]
    ropes = config.rope_parameters
    return {
        "attention.head_count_kv": [config.num_key_value_heads * (1 + each) for each in sliding],
        "attention.sliding_window": config.sliding_window,
        "attention.sliding_window_pattern": sliding,
        "attention.value_length": config.v_head_dim,
        "attention.value_scale": config.attention_value_scale,
        "expert_count": config.n_routed_experts,
        "expert_group_count": config.n_group,
        "expert_group_used_count": config.topk_group,
        "expert_gating_func": 2,
        "rope.freq_base_swa": ropes["sliding_attention"]["rope_theta"],
    }


def _laguna(config: Any) -> dict[str, Any]:
    local = config.rope_parameters["sliding_attention"]
    return {
        "attention.head_count": config.num_attention_heads_per_layer,
        "attention.sliding_window": config.sliding_window or None,
        "expert_shared_feed_forward_length": config.shared_expert_intermediate_size,
        "expert_weights_norm": True,
        "expert_weights_scale": config.moe_routed_scaling_factor,
        "expert_gating_func": 2,
        "leading_dense_block_count": config.mlp_layer_types.count("dense"),
        "rope.freq_base_swa": local["rope_theta"],
        "rope.dimension_count_swa": int(config.head_dim * local["partial_rotary_factor"]),
    }


def _gemma4(config: Any) -> dict[str, Any]:
    sliding = [kind == "sliding_attention" for kind in config.layer_types]
    sizes = [each.head_dim for each in config.per_layer_config]
    groups = [each.num_key_value_heads for each in config.per_layer_config]
    full, own = sliding.index(False), config.num_hidden_layers - getattr(config, "num_kv_shared_layers", 0)
    width = config.intermediate_size
    return {
        "attention.key_length": sizes[full],
        "attention.value_length": sizes[full],
        "attention.key_length_swa": sizes[0],
        "attention.value_length_swa": sizes[0],
        "attention.head_count_kv": groups if len(set(groups)) > 1 else groups[0],
        "attention.sliding_window": config.sliding_window,
        "attention.sliding_window_pattern": sliding,
        "attention.shared_kv_layers": getattr(config, "num_kv_shared_layers", 0),
        "embedding_length_per_layer_input": getattr(config, "hidden_size_per_layer_input", 0),
        "feed_forward_length": [width if layer < own else 2 * width for layer in range(len(sliding))]
        if getattr(config, "use_double_wide_mlp", False)
        else width,
        "rope.dimension_count": sizes[full],
        "rope.dimension_count_swa": sizes[0],
        "rope.freq_base_swa": config.rope_parameters["sliding_attention"]["rope_theta"],
        "expert_used_count": getattr(config, "top_k_experts", None),
    }


def activation_settings(model: Any) -> dict[str, Any]:
    """The parameters of Apertus' activations, which files have as settings."""
    if model.config.model_type != "apertus":
        return {}
    names = ("alpha_p", "alpha_n", "beta", "eps")
    layers = [layer.mlp.act_fn for layer in model.model.layers]
    return {f"xielu.{name}": [getattr(layer, name).item() for layer in layers] for name in names}


def bailing_projections(model: Any) -> Iterator[tuple[str, Values]]:
    """The joined projections of queries, keys and values."""
    for index, layer in enumerate(model.model.layers):
        parts = [getattr(layer.self_attn, f"{part}_proj").weight.detach().numpy() for part in "qkv"]
        yield f"blk.{index}.attn_qkv.weight", np.concatenate(parts)


def observed_tensors(name: str, values: Values, config: Any) -> Iterator[tuple[str, Values]] | None:
    """A parameter as files have it, by transformers' names or those that converters make; ``None`` for others."""
    family, (module, _, kind) = config.model_type, name.rpartition(".")
    if module.endswith("query_key_value"):
        values = _by_kind(values, config)
    if family in ("bloom", "falcon", "gpt_neox"):
        return iter([(name.removeprefix("transformer.") if family == "bloom" else name, values)])
    if family == "gpt2" and kind == "weight" and ".c_" in name:
        return iter([(name, values.T)])
    if family == "llama4_text" and ".experts." in name:
        by_outputs, own = values.swapaxes(1, 2), name
        if not own.endswith("gate_up_proj"):
            return iter([(f"{own}.weight", by_outputs)])
        halves = np.split(by_outputs, 2, axis=1)
        parts = (own.replace("gate_up_proj", f"{part}_proj.weight") for part in ("gate", "up"))
        return zip(parts, halves, strict=True)
    if ".act_fn." in name:  # settings in files
        return iter([])
    if family == "sarvam_moe" and name.endswith(("q_proj.weight", "k_proj.weight", "v_proj.weight")):
        return iter([])  # joined in checkpoints and files
    if family == "sarvam_moe" and name.endswith("e_score_correction_bias"):
        return iter([(f"blk.{name.split('.')[2]}.exp_probs_b.bias", values - values.mean())])
    if family.startswith("gemma4") and (found := _gemma4_tensor(name)) is not None:
        return iter([(found, values)])
    if family == "granitemoe_swa" and (part := _FUSED.get(module.partition(".layers.")[2].partition(".")[2])):
        return iter([(f"blk.{name.split('.')[2]}.{part}.weight", values)])
    if name.endswith(".sinks.weight"):
        return iter([(f"blk.{name.split('.')[2]}.attn_sinks.weight", values)])
    if ".shared_mlp.input_linear" in name:
        return _shared(name, values, config)
    if ".shared_mlp.output_linear" in name and not config.num_local_experts:
        return iter([(f"blk.{name.split('.')[2]}.ffn_down.weight", values)])
    return None


def _gemma4_tensor(name: str) -> str | None:
    """What a converter renames on its own."""
    own = {"layer_scalar": "layer_output_scale.weight", "scale": "ffn_gate_inp.scale"}
    own["per_expert_scale"] = "ffn_down_exps.scale"
    if ".experts." in name:
        return f"{name}.weight"
    ending = own.get(name.rpartition(".")[2])
    return ending and f"blk.{name.split('.')[2]}.{ending}"


def _by_kind(values: Values, config: Any) -> Values:
    """All queries, all keys and all values of what transformers has by group of heads."""
    heads = config.num_attention_heads
    groups = heads if config.model_type != "falcon" else config.num_kv_heads
    by_group = values.reshape(groups, heads // groups + 2, config.hidden_size // heads, *values.shape[1:])
    parts = by_group[:, :-2], by_group[:, -2:-1], by_group[:, -1:]
    return np.concatenate([part.reshape(-1, *values.shape[1:]) for part in parts])


def _shared(name: str, values: Values, config: Any) -> Iterator[tuple[str, Values]]:
    block, ending = name.split(".")[2], "_shexp" if config.num_local_experts else ""
    for part, half in zip(("gate", "up"), np.split(values, 2), strict=True):
        yield f"blk.{block}.ffn_{part}{ending}.weight", half
