"""GGUF files of tiny random models of every family, in the form that llama.cpp's own converter gives them.

Names of tensors are those of the package ``gguf``. Written independently of what reads them.
"""

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
import torch
from gguf import MODEL_ARCH, GGMLQuantizationType, GGUFWriter, quants
from transformers import PreTrainedModel
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from helpers.gguf_hybrids import CONVOLUTIONS, DELTA_NETS, RECURRENT, hybrid_settings, hybrid_tensors
from helpers.gguf_observed import (
    activation_settings,
    bailing_projections,
    further_settings,
    observed_settings,
    observed_tensors,
)
from helpers.k_quants import quantise_k
from selfspec.loading.gguf_header import GgufTensor

ARCHITECTURES = {
    "llama": MODEL_ARCH.LLAMA,
    "mistral": MODEL_ARCH.LLAMA,
    "mixtral": MODEL_ARCH.LLAMA,
    "qwen2": MODEL_ARCH.QWEN2,
    "qwen3": MODEL_ARCH.QWEN3,
    "qwen3_moe": MODEL_ARCH.QWEN3MOE,
    "qwen2_moe": MODEL_ARCH.QWEN2MOE,
    "olmoe": MODEL_ARCH.OLMOE,
    "granitemoe": MODEL_ARCH.GRANITE_MOE,
    "smollm3": MODEL_ARCH.SMOLLM3,
    "phi3": MODEL_ARCH.PHI3,
    "olmo2": MODEL_ARCH.OLMO2,
    "granite": MODEL_ARCH.GRANITE,
    "gemma2": MODEL_ARCH.GEMMA2,
    "gemma3_text": MODEL_ARCH.GEMMA3,
    "starcoder2": MODEL_ARCH.STARCODER2,
    "exaone4": MODEL_ARCH.EXAONE4,
    "seed_oss": MODEL_ARCH.SEED_OSS,
    "ernie4_5": MODEL_ARCH.ERNIE4_5,
    "arcee": MODEL_ARCH.ARCEE,
    "gemma": MODEL_ARCH.GEMMA,
    "glm4": MODEL_ARCH.GLM4,
    "stablelm": MODEL_ARCH.STABLELM,
    "gpt_oss": MODEL_ARCH.GPT_OSS,
    "glm4_moe": MODEL_ARCH.GLM4_MOE,
    "deepseek_v2": MODEL_ARCH.DEEPSEEK2,
    "deepseek_v3": MODEL_ARCH.DEEPSEEK2,
    "qwen3_next": MODEL_ARCH.QWEN3NEXT,
    "qwen3_5_text": MODEL_ARCH.QWEN35,
    "qwen3_5_moe_text": MODEL_ARCH.QWEN35MOE,
    "olmo3": MODEL_ARCH.OLMO2,
    "ernie4_5_moe": MODEL_ARCH.ERNIE4_5_MOE,
    "hunyuan_v1_dense": MODEL_ARCH.HUNYUAN_DENSE,
    "minimax_m2": MODEL_ARCH.MINIMAXM2,
    "dots1": MODEL_ARCH.DOTS1,
    "nemotron": MODEL_ARCH.NEMOTRON,
    "cohere2": MODEL_ARCH.COHERE2,
    "falcon_h1": MODEL_ARCH.FALCON_H1,
    "nemotron_h": MODEL_ARCH.NEMOTRON_H,
    "lfm2": MODEL_ARCH.LFM2,
    "lfm2_moe": MODEL_ARCH.LFM2MOE,
    "exaone_moe": MODEL_ARCH.EXAONE_MOE,
    "jais2": MODEL_ARCH.JAIS2,
    "glm": MODEL_ARCH.CHATGLM,
    "mellum": MODEL_ARCH.QWEN3MOE,
    "hy_v3": MODEL_ARCH.DOTS1,
    "iquestcoder": MODEL_ARCH.LLAMA,
    "internlm3": MODEL_ARCH.LLAMA,
    "solar_open": MODEL_ARCH.GLM4_MOE,
    "glm4_moe_lite": MODEL_ARCH.DEEPSEEK2,
    "minicpm3": MODEL_ARCH.MINICPM3,
    "jamba": MODEL_ARCH.JAMBA,
    "gpt2": MODEL_ARCH.GPT2,
    "gpt_bigcode": MODEL_ARCH.STARCODER,
    "gpt_neox": MODEL_ARCH.GPTNEOX,
    "bloom": MODEL_ARCH.BLOOM,
    "mpt": MODEL_ARCH.MPT,
    "falcon": MODEL_ARCH.FALCON,
    "phi": MODEL_ARCH.PHI2,
    "phimoe": MODEL_ARCH.PHIMOE,
    "cohere": MODEL_ARCH.COMMAND_R,
    "olmo": MODEL_ARCH.OLMO,
    "exaone": MODEL_ARCH.EXAONE,
    "llama4_text": MODEL_ARCH.LLAMA4,
    "ministral3": MODEL_ARCH.MISTRAL3,
    "hunyuan_v1_moe": MODEL_ARCH.HUNYUAN_MOE,
    "granitemoeshared": MODEL_ARCH.GRANITE_MOE,
    "granitemoehybrid": MODEL_ARCH.GRANITE_HYBRID,
    "afmoe": MODEL_ARCH.AFMOE,
    "cohere2_moe": MODEL_ARCH.DOTS1,
    "mimo_v2_flash": MODEL_ARCH.MIMO2,
    "sarvam_moe": MODEL_ARCH.BAILINGMOE2,
    "laguna": MODEL_ARCH.STEP35,
    "apertus": MODEL_ARCH.APERTUS,
    "youtu": MODEL_ARCH.DEEPSEEK2,
    "granite_swa": MODEL_ARCH.GRANITE,
    "granitemoe_swa": MODEL_ARCH.GRANITE_MOE,
    "gemma4_text": MODEL_ARCH.GEMMA4,
    "gemma4_unified_text": MODEL_ARCH.GEMMA4,
    "mamba": MODEL_ARCH.MAMBA,
    "falcon_mamba": MODEL_ARCH.MAMBA,
    "mamba2": MODEL_ARCH.MAMBA2,
}
"""By ``config.model_type``."""

_NEWER = {
    "mellum": "mellum",
    "hy_v3": "hy-v3",
    "cohere2_moe": "cohere2moe",
    "laguna": "laguna",
    "granite_swa": "granite_swa",
    "granitemoe_swa": "granite_swa",
}
"""What files call families that the package ``gguf`` does not have yet; names of tensors are those of another one."""

_PATTERNS = ("exaone4", "olmo3", "exaone_moe", "mellum", "granite_swa", "granitemoe_swa")
"""Families whose files say which layers have a window."""

_PERMUTED = (
    *("llama", "mistral", "mixtral", "smollm3", "granite", "granitemoe", "arcee"),
    *(
        "granite_swa",
        "granitemoe_swa",
        "granitemoeshared",
        "granitemoehybrid",
        "ministral3",
        "olmo",
        "iquestcoder",
        "internlm3",
    ),
)


def save_family(
    model: PreTrainedModel,
    path: Path,
    *,
    settings: dict[str, Any] | None = None,
    leave_out: tuple[str, ...] = (),
    tensors: dict[str, npt.NDArray[np.float32]] | None = None,
    quantised: GGMLQuantizationType = GGMLQuantizationType.F32,
) -> Path:
    """Writes a model.

    Args:
        model: of one of ``ARCHITECTURES``.
        path: where to.
        settings: further settings, or others, without the name of the family; whole keys where they have a colon
            before them.
        leave_out: settings and tensors that the file does not get.
        tensors: further tensors, or others.
        quantised: type of all matrices but routers whose inputs are whole blocks; everything else is float32.
    """
    config: Any = model.config
    name = _NEWER.get(config.model_type) or gguf.MODEL_ARCH_NAMES[_architecture(config)]
    writer = GGUFWriter(path, name)
    own = {f"{name}.{key}": value for key, value in _settings(config).items()}
    more = {key[1:] if key.startswith(":") else f"{name}.{key}": value for key, value in (settings or {}).items()}
    everything: dict[str, Any] = {"tokenizer.ggml.model": "no_vocab", **own, **activation_settings(model), **more}
    for key, value in everything.items():
        if value is not None and key.removeprefix(f"{name}.") not in leave_out:
            _add(writer, key, value)
    written = {**dict(_tensors(model)), **(tensors or {})}
    for tensor, values in written.items():
        if tensor not in leave_out:
            numbers = np.ascontiguousarray(values, np.float32)
            is_matrix = numbers.ndim > 1 and not tensor.endswith("bias")
            is_matrix = is_matrix and not any(
                part in tensor for part in ("gate_inp", "conv", "ssm_a", "ssm_d", "ssm_norm")
            )
            is_matrix = is_matrix and numbers.shape[-1] % gguf.GGML_QUANT_SIZES[quantised][0] == 0
            kind = quantised if is_matrix else GGMLQuantizationType.F32
            blocks = quantise_k(numbers, kind.name) if kind.name.endswith("_K") else quants.quantize(numbers, kind)
            writer.add_tensor(tensor, blocks, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def save_with_gguf_head(model: PreTrainedModel, head: Mapping[str, torch.Tensor], path: Path, **options: Any) -> Path:
    """Writes a model and its multi-token-prediction head as one more block.

    Args:
        model: of one of ``ARCHITECTURES``.
        head: its tensors by the names of the checkpoint, ``model.layers.{layers}.…`` or ``mtp.…``, experts apart.
        path: where to.
        **options: those of ``save_family``.
    """
    config: Any = model.config
    layers = config.num_hidden_layers
    names = gguf.get_tensor_name_map(ARCHITECTURES[config.model_type], layers + 1)
    beside = gguf.get_tensor_name_map(MODEL_ARCH.GLM4_MOE, layers + 1)  # the package lists none for DeepSeek's
    written: dict[str, npt.NDArray[np.float32]] = {}
    experts: dict[str, dict[int, npt.NDArray[np.float32]]] = {}
    for own, tensor in head.items():
        name = _QWEN_HEAD.get(own, own.replace("mtp.layers.0", "model.layers.{}")).format(layers)
        values, (module, _, kind) = _stored(name, tensor.float().numpy(), config), name.rpartition(".")
        if (match := re.fullmatch(r"(.+\.experts)\.(\d+)\.(.+)", module)) is not None:
            stored = f"{names.get_name(f'{match[1]}.{match[3]}')}.{kind}"
            experts.setdefault(stored, {})[int(match[2])] = values
        elif name.endswith("kv_b_proj.weight"):
            written |= _expanding(names, name, values, config)
        elif name.endswith("_correction_bias"):
            written[f"{names.get_name(name.removesuffix('_bias'))}.bias"] = values
        else:
            written[f"{names.get_name(module) or beside.get_name(module)}.{kind}"] = values
    written |= {name: np.stack([parts[each] for each in sorted(parts)]) for name, parts in experts.items()}
    settings = {"block_count": layers + 1, "nextn_predict_layers": 1}
    return save_family(model, path, settings=settings, tensors=written, **options)


_QWEN_HEAD = {
    f"mtp.{own}.weight": f"model.layers.{{}}.{name}.weight"
    for own, name in {
        "fc": "eh_proj",
        "pre_fc_norm_embedding": "enorm",
        "pre_fc_norm_hidden": "hnorm",
        "norm": "shared_head.norm",
    }.items()
}


def _architecture(config: Any) -> MODEL_ARCH:
    has_experts = "moe" in (getattr(config, "layers_block_type", None) or ())
    return MODEL_ARCH.NEMOTRON_H_MOE if has_experts else ARCHITECTURES[config.model_type]


def dequantise(tensor: GgufTensor) -> npt.NDArray[np.float32]:
    """The values of a tensor, as the package ``gguf`` computes them, in the tensor's shape."""
    kind = GGMLQuantizationType[tensor.type]
    values: npt.NDArray[np.float32] = quants.dequantize(_typed(tensor.data(), kind), kind)
    return values.astype(np.float32).reshape(tensor.shape)


def _typed(data: npt.NDArray[np.uint8], kind: GGMLQuantizationType) -> npt.NDArray[Any]:
    plain = {GGMLQuantizationType.F32: np.float32, GGMLQuantizationType.F16: np.float16}
    return data.view(plain[kind]) if kind in plain else data


def _add(writer: GGUFWriter, key: str, value: Any) -> None:
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        writer.add_array(key, value)


def _settings(config: Any) -> dict[str, Any]:
    """Settings as the converter writes them; those that are ``None`` are left out."""
    family = config.model_type
    if (whole := observed_settings(config)) is not None:
        return whole
    if family in RECURRENT:
        return hybrid_settings(config)
    head_dim = _head_dim(config)
    layer = config.per_layer_config[0] if getattr(config, "is_heterogeneous", False) else config
    rope = config.rope_parameters.get("full_attention", config.rope_parameters)
    experts = getattr(config, "num_local_experts", getattr(config, "num_experts", None))
    return {
        "vocab_size": config.vocab_size,
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "block_count": config.num_hidden_layers,
        "feed_forward_length": getattr(config, "intermediate_size", None),
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": layer.num_key_value_heads,
        "attention.key_length": getattr(layer, "head_dim", None),
        "attention.value_length": getattr(layer, "head_dim", None),
        "attention.layer_norm_rms_epsilon": getattr(config, "rms_norm_eps", None),
        "attention.layer_norm_epsilon": next(
            (getattr(config, name) for name in ("layer_norm_eps", "norm_epsilon", "norm_eps") if hasattr(config, name)),
            None,
        ),
        "rope.freq_base": None if family == "gemma2" else float(rope["rope_theta"]),
        "rope.dimension_count": None
        if family
        in (
            *("qwen2", "qwen3", "qwen3_moe", "qwen2_moe", "olmoe", "gemma2", "gemma3_text", "olmo2", "starcoder2"),
            *CONVOLUTIONS,
        )
        else int(head_dim * rope.get("partial_rotary_factor", 1.0)),
        **_rope_scaling(config, rope),
        **(_windows(config) if family in (*_PATTERNS, "phi3", "gemma2", "gemma3_text", "gpt_oss", "cohere2") else {}),
        "attention.sliding_window_pattern": [kind == "sliding_attention" for kind in config.layer_types]
        if family in _PATTERNS and config.sliding_window
        else None,
        "expert_count": experts,
        "expert_used_count": getattr(config, "num_experts_per_tok", None),
        "expert_shared_feed_forward_length": getattr(config, "shared_expert_intermediate_size", None),
        "expert_feed_forward_length": config.intermediate_size
        if family in ("gpt_oss", "minimax_m2")
        else getattr(config, "moe_intermediate_size", None),
        "attn_logit_softcapping": getattr(config, "attn_logit_softcapping", None),
        "final_logit_softcapping": getattr(config, "final_logit_softcapping", None),
        "attention.scale": getattr(config, "attention_multiplier", None),
        "embedding_scale": getattr(config, "embedding_multiplier", None),
        "residual_scale": getattr(config, "residual_multiplier", None),
        "logit_scale": getattr(config, "logits_scaling", getattr(config, "logit_scale", None)),
        **_routing(config),
        **(_latents(config) if family.startswith("deepseek") or family in ("glm4_moe_lite", "youtu") else {}),
        **hybrid_settings(config),
        **further_settings(config),
        "use_parallel_residual": True if family == "stablelm" else None,  # as of a config that does not have it
    }


def _routing(config: Any) -> dict[str, Any]:
    """Of mixtures with shared experts without a gate, or with sigmoids."""
    if config.model_type == "minimax_m2":
        return {"expert_gating_func": int(gguf.ExpertGatingFuncType.SIGMOID)}
    if config.model_type == "ernie4_5_moe":
        return {
            "expert_shared_count": config.moe_num_shared_experts,
            "expert_shared_feed_forward_length": config.moe_num_shared_experts * config.moe_intermediate_size,
            "interleave_moe_layer_step": config.moe_layer_interval,
            "leading_dense_block_count": config.moe_layer_start_index,
        }
    if config.model_type == "exaone_moe":
        return {
            "expert_shared_count": config.num_shared_experts,
            "expert_shared_feed_forward_length": config.num_shared_experts * config.moe_intermediate_size,
            "expert_gating_func": int(gguf.ExpertGatingFuncType.SIGMOID),
            "expert_weights_scale": config.routed_scaling_factor,
            "expert_weights_norm": config.norm_topk_prob,
            "expert_group_count": config.n_group,
            "expert_group_used_count": config.topk_group,
            "leading_dense_block_count": config.first_k_dense_replace,
            "rope.scaling.type": "none",
        }
    if config.model_type == "hy_v3":
        return {
            "expert_shared_feed_forward_length": config.num_shared_experts * config.moe_intermediate_size,
            "expert_gating_func": int(gguf.ExpertGatingFuncType.SIGMOID),
            "expert_weights_scale": config.router_scaling_factor,
            "expert_weights_norm": True,
        }
    if config.model_type in ("mellum", "mimo_v2_flash") or not hasattr(config, "n_routed_experts"):
        return {}
    return {
        "expert_count": config.n_routed_experts,
        "expert_shared_count": config.n_shared_experts,
        "expert_gating_func": int(
            gguf.ExpertGatingFuncType.SOFTMAX
            if config.model_type == "deepseek_v2"
            else gguf.ExpertGatingFuncType.SIGMOID
        ),
        "expert_weights_scale": float(config.routed_scaling_factor),
        "expert_weights_norm": config.norm_topk_prob or None,
        "expert_group_count": config.n_group,
        "expert_group_used_count": config.topk_group,
        "leading_dense_block_count": 1
        if config.model_type == "glm4_moe_lite"
        else getattr(config, "first_k_dense_replace", None),
    }


def _latents(config: Any) -> dict[str, Any]:
    """Heads of keys and values are one of latents for llama.cpp, with a rotated key after it."""
    scale = config.rope_parameters.get("mscale_all_dim")
    return {
        "attention.head_count_kv": 1,
        "attention.q_lora_rank": config.q_lora_rank,
        "attention.kv_lora_rank": config.kv_lora_rank,
        "attention.key_length": config.kv_lora_rank + config.qk_rope_head_dim,
        "attention.value_length": config.kv_lora_rank,
        "attention.key_length_mla": config.qk_nope_head_dim + config.qk_rope_head_dim,
        "attention.value_length_mla": config.v_head_dim,
        "rope.dimension_count": config.qk_rope_head_dim,
        "rope.scaling.yarn_log_multiplier": None if scale is None else 0.1 * scale,
    }


def _rope_scaling(config: Any, rope: dict[str, Any]) -> dict[str, Any]:
    kind = rope["rope_type"]
    if kind == "linear":
        return {"rope.scaling.type": "linear", "rope.scaling.factor": rope["factor"]}
    if kind == "yarn":
        return {
            "rope.scaling.type": "yarn",
            "rope.scaling.factor": rope["factor"],
            "rope.scaling.original_context_length": rope["original_max_position_embeddings"],
        }
    if kind == "longrope":
        return {
            "rope.scaling.original_context_length": rope["original_max_position_embeddings"],
            "rope.scaling.attn_factor": ROPE_INIT_FUNCTIONS["longrope"](config, torch.device("cpu"))[1],
        }
    assert kind in ("default", "llama3", "proportional")
    return (
        {"rope.scaling.original_context_length": config.max_position_embeddings} if config.model_type == "phi3" else {}
    )


def _windows(config: Any) -> dict[str, Any]:
    rope = config.rope_parameters
    return {
        "attention.sliding_window": config.sliding_window or 0,
        "rope.freq_base_swa": rope.get("sliding_attention", {}).get("rope_theta"),
    }


def _head_dim(config: Any) -> int:
    config = config.per_layer_config[0] if getattr(config, "is_heterogeneous", False) else config
    return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)


def _tensors(model: PreTrainedModel) -> Iterator[tuple[str, npt.NDArray[np.float32]]]:
    config: Any = model.config
    names = gguf.get_tensor_name_map(_architecture(config), config.num_hidden_layers)
    norms: dict[str, list[npt.NDArray[np.float32]]] = {}
    kept = model.state_dict().keys()
    buffers = [(own, buffer) for own, buffer in model.named_buffers() if own in kept]
    for own, parameter in (*model.named_parameters(), *buffers):
        values = parameter.detach().numpy()
        name = own.replace("block_sparse_moe.router", "mlp.gate").replace("block_sparse_moe", "mlp")
        name = f"{name}.weight" if name.endswith("sinks") else name
        if config.model_type == "nemotron_h":
            name = name.replace("model.", "backbone.", 1)
        elif config.model_type == "falcon_h1" and name.endswith("pre_ff_layernorm.weight"):
            yield names.get_name(name), values
            continue
        if (parts := hybrid_tensors(name, values, config)) is not None:
            yield from ((f"blk.{name.split('.')[2]}.{part}", each) for part, each in parts)
        elif (found := observed_tensors(name, values, config)) is not None:
            for each, numbers in found:
                module, _, kind = each.rpartition(".")
                yield each if each.startswith("blk.") else f"{names.get_name(module)}.{kind}", numbers
        elif ".norms." in name:  # one for each head
            norms.setdefault(name.split(".norms.")[0], []).append(values)
        elif name.endswith("kv_b_proj.weight") and config.model_type != "minicpm3":
            yield from _expanding(names, name, values, config)
        elif name.endswith("_correction_bias"):
            plain = name.removesuffix("_bias").replace("gate.moe_statics", "moe_statics")
            yield f"{names.get_name(plain)}.bias", values.reshape(-1)
        elif name.endswith("expert_bias"):
            yield f"{names.get_name(name.removesuffix('_bias') + '_bias')}.bias", values
        elif ".experts." in name:
            yield from _experts(names, name, values, in_pairs=config.model_type == "gpt_oss")
        else:
            module, _, kind = name.rpartition(".")
            yield f"{names.get_name(module)}.{kind}", _stored(name, values, config)
    if config.model_type == "sarvam_moe":
        yield from bailing_projections(model)
    for name, parts in norms.items():
        yield f"{names.get_name(name)}.weight", np.stack(parts)
    yield from _rope_tensors(config)


def _expanding(
    names: gguf.TensorNameMap, name: str, values: npt.NDArray[np.float32], config: Any
) -> Iterator[tuple[str, npt.NDArray[np.float32]]]:
    """What expands latents to keys, transposed, and to values, of each head."""
    by_head = values.reshape(config.num_attention_heads, -1, values.shape[-1])
    keys, of_values = np.split(by_head, [config.qk_nope_head_dim], axis=1)
    module = name.removesuffix(".weight")
    yield f"{names.get_name(module.replace('kv_b_proj', 'k_b_proj'))}.weight", keys.swapaxes(1, 2)
    yield f"{names.get_name(module.replace('kv_b_proj', 'v_b_proj'))}.weight", of_values


def _experts(
    names: gguf.TensorNameMap, name: str, values: npt.NDArray[np.float32], *, in_pairs: bool
) -> Iterator[tuple[str, npt.NDArray[np.float32]]]:
    """The tensors of a parameter of all experts; if ``in_pairs``, it has inputs first, and pairs of gate and up."""
    prefix, _, module = name.rpartition(".")
    kind = "bias" if module.endswith("_bias") else "weight"
    by_outputs = values.swapaxes(1, 2) if in_pairs and kind == "weight" else values
    if module.startswith("gate_up_proj"):
        gate, up = (by_outputs[:, ::2], by_outputs[:, 1::2]) if in_pairs else np.split(by_outputs, 2, axis=1)
        yield f"{names.get_name(f'{prefix}.gate_proj')}.{kind}", gate
        yield f"{names.get_name(f'{prefix}.up_proj')}.{kind}", up
    else:
        name = f"{prefix}.{module.removesuffix('_bias')}".replace("backbone", "model").replace(".mixer.", ".mlp.")
        yield f"{names.get_name(name)}.{kind}", by_outputs


def _stored(name: str, values: npt.NDArray[np.float32], config: Any) -> npt.NDArray[np.float32]:
    """The numbers that a file has of a parameter."""
    kind = name.split(".")[-2]
    if kind in ("q_proj", "k_proj") and config.model_type in _PERMUTED:
        heads = config.num_attention_heads if kind == "q_proj" else config.num_key_value_heads
        return values.reshape(heads, 2, -1, *values.shape[1:]).swapaxes(1, 2).reshape(values.shape)
    one_less = config.model_type in ("gemma", "gemma2", "gemma3_text") or config.model_type in (*DELTA_NETS, "nemotron")
    if one_less and name.endswith("norm.weight"):
        return values + np.float32(1)
    return values


def _rope_tensors(config: Any) -> Iterator[tuple[str, npt.NDArray[np.float32]]]:
    rope = config.rope_parameters
    if (whole := rope.get("full_attention", {})).get("rope_type") == "proportional":
        half = config.per_layer_config["full_attention"].head_dim // 2
        turned = int(half * whole["partial_rotary_factor"])
        yield "rope_freqs.weight", np.array([1.0] * turned + [1e30] * (half - turned), np.float32)
    if rope.get("rope_type") == "llama3":
        size = _head_dim(config)
        plain = 1 / rope["rope_theta"] ** (np.arange(0, size, 2, dtype=np.float32) / size)
        scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
        yield "rope_freqs.weight", (plain / scaled.numpy()).astype(np.float32)
    if rope.get("rope_type") == "longrope":
        for kind in ("long", "short"):
            yield f"rope_factors_{kind}.weight", np.array(rope[f"{kind}_factor"], np.float32)
