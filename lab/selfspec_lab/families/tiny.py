"""A tiny random model of each decoder-only family that transformers has."""

import re
from typing import Any

import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

VOCABULARY = 128
LAYERS = 4
WINDOW = 16

_ENCODERS = """
    bart bert bert-generation big_bird bigbird_pegasus blenderbot blenderbot-small camembert data2vec-text electra ernie
    marian mbart megatron-bert mvp pegasus plbart prophetnet reformer rembert roberta roberta-prelayernorm roc_bert
    roformer trocr whisper xlm xlm-roberta xlm-roberta-xl xlnet xmod
"""
"""Encoders, and decoders of encoder-decoder models."""

_OTHERS = """
    blt cwm dots3_note emu3 fuyu gemma3 gemma3n gemma4 gemma4_assistant gemma4_unified gemma4_unified_assistant git
    got_ocr2 gpt-sw3 llama4 mllama moshi moss_transcribe_diarize musicgen musicgen_melody phi4_multimodal qwen3_5
    qwen3_5_moe qwen4_exp
"""
"""Models of images, sounds or bytes, whose text parts are families of their own, and other names of a family."""

NOT_DECODERS = frozenset(f"{_ENCODERS} {_OTHERS}".split())
"""What ``AutoModelForCausalLM`` loads and is not listed."""

_SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    **dict.fromkeys(("hidden_size", "n_embd", "d_model", "word_embed_proj_dim", "attention_hidden_size"), 64),
    **dict.fromkeys(("intermediate_size", "intermediate_size_mlp", "ffn_dim", "ffn_hidden_size", "n_inner"), 96),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "num_layers", "n_layers"), LAYERS),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads"), 2),
    **dict.fromkeys(("max_position_embeddings", "max_seq_len", "n_positions", "n_ctx", "index_topk"), 512),
    **dict.fromkeys(("head_dim", "attention_head_dim", "kv_channels", "query_pre_attn_scalar"), 32),
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "v_head_dim", "index_head_dim"), 16),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "moe_k", "moe_topk", "index_n_heads"), 2),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size", "shared_intermediate_size"), 32),
    **dict.fromkeys(("n_shared_experts", "num_shared_experts", "n_group", "topk_group", "num_key_value_heads"), 1),
    **dict.fromkeys(("qk_rope_head_dim", "linear_key_head_dim", "linear_value_head_dim", "rotary_dim"), 8),
    **dict.fromkeys(("state_size", "ssm_state_size", "mamba_d_state", "chunk_size", "mamba_chunk_size"), 8),
    **dict.fromkeys(("mamba_n_heads", "mamba_num_heads", "n_mamba_heads"), 8),
    **dict.fromkeys(("mamba_d_head", "mamba_head_dim", "mamba_headdim"), 16),
    **dict.fromkeys(("mamba_n_groups", "mamba_ngroups", "n_groups"), 1),
    **dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"), None),
    **dict.fromkeys(("sliding_window", "attention_window_size", "window_size"), WINDOW),
    "mamba_expand": 2,
    "mamba_d_ssm": 128,
    "time_step_rank": 4,
    "mamba_dt_rank": 4,
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "lru_width": 64,
    "first_k_dense_replace": 1,
    "conv_L_cache": 3,
}
"""Sizes by the names that configs have for them."""

_HYBRID = {"layer_types": ["linear_attention", "full_attention"] * 2}
_CONVOLUTIONS = {"layer_types": ["conv", "full_attention"] * 2}
_LATENT = {"num_key_value_heads": 2}
_LATENT_NARROW = {**_LATENT, "head_dim": 8}
_LATENT_WIDE = dict.fromkeys(("qk_rope_head_dim", "q_lora_rank", "kv_lora_rank"), 32)
_SPECIAL: dict[str, dict[str, Any]] = {
    **dict.fromkeys(("axk2", "deepseek_v32", "glm4_moe_lite", "glm_moe_dsa"), _LATENT),
    **dict.fromkeys(("longcat_flash", "minicpm3"), _LATENT),
    **dict.fromkeys(("axk1", "youtu"), _LATENT_NARROW),
    "deepseek_v2": {**_LATENT, **_LATENT_WIDE},
    "deepseek_v3": {**_LATENT, **_LATENT_WIDE, "head_dim": 32},
    **dict.fromkeys(("minimax", "qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"), _HYBRID),
    **dict.fromkeys(("lfm2", "lfm2_moe"), _CONVOLUTIONS),
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "granitemoehybrid": {"layer_types": ["mamba", "attention"] * 2},
    "gpt_neo": {"attention_types": [[["global", "local"], 2]]},
    "gemma4_text": {
        "hidden_size_per_layer_input": 16,
        "num_kv_shared_layers": 2,
        "global_head_dim": 32,
        "vocab_size_per_layer_input": VOCABULARY,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
    },
    "gemma4_unified_text": {"global_head_dim": 64},
    "nemotron_h": {
        "layers_block_type": ["mamba", "attention", "mlp", "mamba"],
        "moe_shared_expert_intermediate_size": 32,
    },
    "bamba": {"attn_layer_indices": [1, 3]},
    "llama4_text": {"attention_chunk_size": WINDOW},
    "codegen": {"n_head": 4, "num_attention_heads": 4},
    "diffllama": {"num_attention_heads": 4, "num_key_value_heads": 2},
    "mamba2": {"num_heads": 8, "head_dim": 16, "expand": 2},
    "modernbert-decoder": {
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "cls_token_id": 1,
        "sep_token_id": 2,
    },
}


def family_names() -> list[str]:
    """The ``model_type`` of every decoder-only family of the installed transformers."""
    return sorted(set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES) - NOT_DECODERS)


def tiny_config(model_type: str) -> PreTrainedConfig:
    """A config of four layers and small sizes."""
    config_class = CONFIG_MAPPING[model_type]
    default: Any = config_class()
    known = {*vars(default), *getattr(config_class, "attribute_map", {})}
    sizes = {name: value for name, value in _SIZES.items() if name in known}
    if getattr(default, "sliding_window", WINDOW) is None:
        del sizes["sliding_window"]
    return config_class(**{**sizes, "tie_word_embeddings": False, **_SPECIAL.get(model_type, {})})


@torch.inference_mode(mode=False)
def tiny_model(model_type: str, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """A random model whose next token depends on the last ones, mostly by its first layer.

    So drafts that skip middle layers are right fairly often. One with freshly initialised weights repeats a token.
    """
    torch.manual_seed(0)
    config = tiny_config(model_type)
    make: Any = AutoModelForCausalLM.from_config
    with torch.device("meta"):
        parameters = sum(weight.numel() for weight in make(config).parameters())
    if parameters > _MOST_PARAMETERS:
        raise ValueError(f"the tiny config of {model_type} leaves {parameters:,} parameters")
    model: Any = make(config, dtype=dtype).eval()
    model.generation_config.eos_token_id = None
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            normal = torch.randn(weight.shape, generator=generator)
            layer = re.search(r"\.(\d+)\.", name)
            if weight.dim() < 2:
                if layer is None and name.endswith("weight"):  # norms of either sign: no token is its own successor
                    one = float(weight.mean().round())
                    weight.copy_(3 * torch.where(normal > 0, 1.0, -1.0) - (1 - one))
            elif layer is None:
                weight.copy_(normal if "emb" in name or "wte" in name else 4 * normal / weight.shape[-1] ** 0.5)
            else:
                weight.copy_((1.0 if layer[1] == "0" else 0.3) * normal / weight.shape[-1] ** 0.5)
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.copy_(0.2 * torch.randn(buffer.shape, generator=generator))
    made: PreTrainedModel = model
    return made


_MOST_PARAMETERS = 5_000_000
