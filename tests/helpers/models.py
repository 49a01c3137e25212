"""Tiny random models of every family, made so that drafts with a part of their layers are right fairly often.

A model with freshly initialised weights repeats one token whatever its layers do. Here the first layer mixes the
context into the residual stream, the middle ones change it a little and the last one somewhat more, and the final norm
has weights of either sign: the next token is a random function of the last ones, and mostly of what drafts compute.
"""

import functools
import zlib
from collections.abc import Callable
from typing import Any

import torch
from transformers import (
    ArceeConfig,
    AutoConfig,
    AutoModelForCausalLM,
    Ernie4_5Config,
    Exaone4Config,
    Gemma2Config,
    Gemma3TextConfig,
    Glm4Config,
    Glm4MoeConfig,
    GptOssConfig,
    GraniteConfig,
    GraniteMoeConfig,
    HunYuanDenseV1Config,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    NemotronConfig,
    Olmo2Config,
    OlmoeConfig,
    Phi3Config,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen2MoeConfig,
    Qwen3Config,
    Qwen3MoeConfig,
    SmolLM3Config,
    StableLmConfig,
    Starcoder2Config,
)

VOCABULARY = 128
LAYERS = 6
SUBLAYERS = 2 * LAYERS
WINDOW = 16
ROPE_SWITCH = 96
"""Sequence length past which the ``phi3-longrope`` model takes its long frequencies."""

_SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
_MIXED_LAYERS = ["sliding_attention", "full_attention", "sliding_attention"] * 2
_WINDOWED = {"use_sliding_window": True, "sliding_window": WINDOW}


def _config(config_class: type[PreTrainedConfig], **options: Any) -> Callable[[], PreTrainedConfig]:
    return functools.partial(config_class, **{**_SIZES, **options})


def _rope(kind: str, **options: Any) -> dict[str, Any]:
    return {"rope_type": kind, "rope_theta": 1000.0, **options}


VARIANTS: dict[str, Callable[[], PreTrainedConfig]] = {
    "llama": _config(LlamaConfig, head_dim=24, tie_word_embeddings=False),
    "llama-tied-biases": _config(LlamaConfig, tie_word_embeddings=True, attention_bias=True, mlp_bias=True),
    "llama-ungrouped": _config(LlamaConfig, num_key_value_heads=4),
    "llama-multi-query": _config(LlamaConfig, num_key_value_heads=1, head_dim=8),
    "llama-linear-rope": _config(LlamaConfig, rope_parameters=_rope("linear", factor=4.0)),
    "llama-llama3-rope": _config(
        LlamaConfig,
        rope_parameters=_rope(
            "llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=128
        ),
    ),
    "llama-yarn-rope": _config(
        LlamaConfig, rope_parameters=_rope("yarn", factor=4.0, original_max_position_embeddings=256)
    ),
    "llama-dynamic-rope": _config(LlamaConfig, rope_parameters=_rope("dynamic", factor=2.0)),
    "llama-eager": _config(LlamaConfig, attn_implementation="eager"),
    "mistral": _config(MistralConfig, sliding_window=None, head_dim=8),
    "mistral-window": _config(MistralConfig, sliding_window=WINDOW),
    "qwen2": _config(Qwen2Config, tie_word_embeddings=True),
    "qwen2-window": _config(Qwen2Config, layer_types=_MIXED_LAYERS, **_WINDOWED),
    "qwen3": _config(Qwen3Config, head_dim=24),
    "qwen3-window": _config(Qwen3Config, head_dim=16, layer_types=_MIXED_LAYERS, attention_bias=True, **_WINDOWED),
    "smollm3": _config(SmolLM3Config, no_rope_layer_interval=3),
    "smollm3-window": _config(SmolLM3Config, no_rope_layer_interval=2, tie_word_embeddings=False, **_WINDOWED),
    "phi3": _config(Phi3Config, rope_parameters={**_rope("default"), "partial_rotary_factor": 0.5}),
    "phi3-window": _config(Phi3Config, sliding_window=WINDOW),
    "phi3-longrope": _config(
        Phi3Config,
        original_max_position_embeddings=ROPE_SWITCH,
        rope_parameters=_rope(
            "longrope",
            short_factor=[1.0 + 0.05 * index for index in range(8)],
            long_factor=[2.0 + 0.5 * index for index in range(8)],
            original_max_position_embeddings=ROPE_SWITCH,
        ),
    ),
    "olmo2": _config(Olmo2Config),
    "granite": _config(
        GraniteConfig,
        embedding_multiplier=3.0,
        residual_multiplier=0.7,
        attention_multiplier=0.2,
        logits_scaling=0.5,
        tie_word_embeddings=True,
    ),
    "gemma2": _config(
        Gemma2Config,
        head_dim=16,
        query_pre_attn_scalar=20,
        sliding_window=WINDOW,
        attn_logit_softcapping=2.0,
        final_logit_softcapping=8.0,
        attn_implementation="eager",
    ),
    "gemma3": _config(
        Gemma3TextConfig,
        head_dim=24,
        query_pre_attn_scalar=20,
        sliding_window=WINDOW,
        sliding_window_pattern=3,
        rope_parameters={
            "full_attention": _rope("linear", factor=2.0),
            "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
        },
    ),
    "mixtral": _config(MixtralConfig, num_local_experts=4, num_experts_per_tok=2),
    "mixtral-window": _config(MixtralConfig, num_local_experts=4, num_experts_per_tok=2, sliding_window=WINDOW),
    "qwen3-moe": _config(
        Qwen3MoeConfig,
        head_dim=16,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=48,
        norm_topk_prob=True,
        mlp_only_layers=[1],
    ),
    "qwen3-moe-window": _config(
        Qwen3MoeConfig, head_dim=16, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=48, **_WINDOWED
    ),
    "qwen2-moe": _config(
        Qwen2MoeConfig,
        num_experts=5,
        num_experts_per_tok=3,
        moe_intermediate_size=32,
        shared_expert_intermediate_size=80,
        layer_types=_MIXED_LAYERS,
        **_WINDOWED,
    ),
    "olmoe": _config(OlmoeConfig, num_experts=4, num_experts_per_tok=3),
    "granite-moe": _config(
        GraniteMoeConfig,
        num_local_experts=4,
        num_experts_per_tok=1,
        embedding_multiplier=3.0,
        residual_multiplier=0.7,
        attention_multiplier=0.2,
        logits_scaling=0.5,
        tie_word_embeddings=True,
    ),
    "starcoder2": _config(Starcoder2Config, use_bias=False, tie_word_embeddings=True),
    "starcoder2-window": _config(Starcoder2Config, sliding_window=WINDOW, tie_word_embeddings=False),
    "glm4": _config(Glm4Config, head_dim=24),
    "glm4-whole-rope": _config(
        Glm4Config,
        head_dim=16,
        attention_bias=False,
        rope_parameters={**_rope("default"), "partial_rotary_factor": 1.0},
    ),
    "stablelm": _config(
        StableLmConfig, use_qkv_bias=True, rope_parameters={**_rope("default"), "partial_rotary_factor": 0.5}
    ),
    "stablelm-head-norms": _config(StableLmConfig, qk_layernorm=True),
    "exaone4": _config(Exaone4Config, head_dim=16, sliding_window=WINDOW, layer_types=_MIXED_LAYERS),
    "hunyuan": _config(HunYuanDenseV1Config, head_dim=24),
    "ernie4_5": _config(Ernie4_5Config, head_dim=24, use_bias=True),
    "arcee": _config(ArceeConfig, head_dim=24, mlp_bias=True),
    "nemotron": _config(NemotronConfig, head_dim=16),
    "glm4-moe": _config(
        Glm4MoeConfig,
        head_dim=16,
        use_qk_norm=True,
        n_routed_experts=6,
        num_experts_per_tok=3,
        n_group=3,
        topk_group=2,
        n_shared_experts=1,
        moe_intermediate_size=32,
        first_k_dense_replace=1,
        routed_scaling_factor=1.5,
    ),
    "gpt-oss": _config(
        GptOssConfig,
        head_dim=16,
        num_local_experts=4,
        num_experts_per_tok=2,
        sliding_window=WINDOW,
        rope_parameters=_rope("yarn", factor=4.0, original_max_position_embeddings=256, truncate=False),
    ),
}
"""By name; every form that the sublayers of the families of the table have."""


def _relative(model_type: str, **options: Any) -> Callable[[], PreTrainedConfig]:
    return functools.partial(AutoConfig.for_model, model_type, **{**_SIZES, **options})


_EXPERTS = {
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "moe_k"), 2),
    **dict.fromkeys(("n_shared_experts", "num_shared_experts", "moe_num_shared_experts"), 1),
    "moe_intermediate_size": 32,
    "head_dim": 16,
}

_LATENTS = {
    **{"n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1, "moe_intermediate_size": 32},
    **{"num_key_value_heads": 4, "first_k_dense_replace": 1, "routed_scaling_factor": 1.5},
    **{"n_group": 2, "topk_group": 1, "q_lora_rank": 32, "kv_lora_rank": 64},
    **{"qk_nope_head_dim": 16, "qk_rope_head_dim": 32, "v_head_dim": 24},
}

RELATIVES: dict[str, Callable[[], PreTrainedConfig]] = {
    **{name: _relative(name) for name in ("internlm3", "iquestcoder", "jais2")},
    **{name: _relative(name, head_dim=16) for name in ("seed_oss", "helium", "glm", "gemma")},
    "ministral": _relative("ministral", head_dim=16, sliding_window=WINDOW, layer_types=_MIXED_LAYERS),
    "olmo3": _relative("olmo3", sliding_window=WINDOW, layer_types=_MIXED_LAYERS),
    "vaultgemma": _relative("vaultgemma", head_dim=16, sliding_window=WINDOW, attn_implementation="eager"),
    "hyperclovax": _relative(
        "hyperclovax", attention_multiplier=0.2, residual_multiplier=0.7, embedding_multiplier=3.0, logits_scaling=2.0
    ),
    "deepseek_v2": _relative("deepseek_v2", **_LATENTS, topk_method="group_limited_greedy"),
    "deepseek_v2-yarn": _relative(
        "deepseek_v2",
        **{**_LATENTS, "q_lora_rank": None, "n_group": 1},
        rope_parameters=_rope(
            "yarn", factor=4.0, original_max_position_embeddings=256, mscale=0.707, mscale_all_dim=0.707
        ),
    ),
    "deepseek_v3": _relative("deepseek_v3", **_LATENTS, head_dim=32),
    "mellum": _relative("mellum", sliding_window=WINDOW, layer_types=_MIXED_LAYERS, **_EXPERTS),
    **{
        name: _relative(name, **_EXPERTS)
        for name in ("flex_olmo", "dots1", "solar_open", "exaone_moe", "hy_v3", "minimax_m2", "ernie4_5_moe")
    },
}
"""Families of the table whose sublayers have forms that ``VARIANTS`` have, or latents, by ``model_type``."""

FAMILY_NAMES = (
    *("llama", "mistral-window", "qwen2-window", "qwen3-window", "smollm3-window", "phi3", "olmo2", "granite"),
    *("gemma2", "gemma3", "mixtral", "qwen3-moe-window", "qwen2-moe", "olmoe", "granite-moe"),
    *("starcoder2-window", "glm4", "stablelm"),
)
"""One variant of each of these families, its most intricate: for tests too slow for all of them."""


@functools.cache
@torch.inference_mode(mode=False)  # made inside a test's inference mode, the shared model would be of use nowhere else
def build(name: str) -> PreTrainedModel:
    """The model of a variant, in float32. Shared by all tests, which must not change it."""
    return make({**VARIANTS, **RELATIVES}[name](), name)


@functools.cache
@torch.inference_mode(mode=False)
def build_with_large_cache() -> PreTrainedModel:
    """A model with 160 KiB of keys and values a token, whose caches take memory as they are written."""
    heads = {"num_attention_heads": 16, "num_key_value_heads": 16, "head_dim": 160}
    return make(_config(LlamaConfig, **heads, num_hidden_layers=8)(), "large-cache")


def make(config: PreTrainedConfig, name: str) -> PreTrainedModel:
    """A model of a config, in float32, with weights that depend on the name."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    randomise(model, zlib.crc32(name.encode()))
    return model


def randomise(model: PreTrainedModel, seed: int) -> None:
    """Gives a model of any family its random weights, in place."""
    config: Any = model.config
    generator = torch.Generator().manual_seed(seed)
    family = config.model_type
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            parameter.copy_(_weights(parameter_name, parameter, generator, family))
        for buffer_name, buffer in model.named_buffers():
            if buffer_name.endswith("e_score_correction_bias"):
                buffer.copy_(0.2 * torch.randn(buffer.shape, generator=generator))
        # The residual stream starts at size 1. A tied head is scaled with it.
        scale = config.hidden_size**0.5 if "gemma" in family else getattr(config, "embedding_multiplier", 1.0)
        model.get_input_embeddings().weight.div_(scale)


def _weights(name: str, like: torch.Tensor, generator: torch.Generator, family: str) -> torch.Tensor:
    normal = torch.randn(like.shape, generator=generator)
    if name.endswith("bias"):
        return 0.1 * normal
    if like.dim() == 1:
        return _norm(name, 1 + 0.25 * normal.clamp(-2, 2), family)
    if "embed" in name or "wte" in name:
        return normal
    normal = normal / like.shape[-1] ** 0.5
    if "lm_head" in name:
        return 4 * normal
    if name.endswith(("q_proj.weight", "gate.weight")):
        return 2 * normal
    return _strength(name) * normal if name.endswith(_OUTPUTS) else normal


_OUTPUTS = ("o_proj.weight", "down_proj.weight", "experts.down_proj", "c_proj.weight")
"""How the names of the weights end that a branch multiplies by last."""


def _norm(name: str, norm: torch.Tensor, family: str) -> torch.Tensor:
    gemma = "gemma" in family
    if name == "model.norm.weight":
        # As many negative as positive, or a tied head would see the last token itself again.
        norm = norm * torch.where(norm.argsort() % 2 == 0, 1.0, -1.0) * (4.0 if gemma else 1.0)
    elif any(part in name for part in ("post_feedforward", "post_self_attn", "post_mlp")) or (
        "post_attention" in name and (gemma or family in ("olmo2", "exaone4"))
    ):
        norm = _strength(name) * norm
    plus_one = gemma or family == "nemotron" or (family.startswith(("qwen3_next", "qwen3_5")) and "linear" not in name)
    return norm - 1 if plus_one else norm  # They multiply by one plus the weight.


def _strength(name: str) -> float:
    """How much a branch adds to the residual stream."""
    layer = int(next(part for part in name.split(".") if part.isdigit()))
    return {0: 1.0, LAYERS - 1: 0.3}.get(layer, 0.15)


def prompt(length: int, seed: int = 0) -> list[int]:
    """Random token ids."""
    generator = torch.Generator().manual_seed(1000 * seed + length)
    return torch.randint(VOCABULARY, (length,), generator=generator).tolist()


SMALLEST_GAP = 1e-4
"""Kernels for one row and for several differ in the last bits; text is comparable only where choices are clearer."""


@functools.cache
def _generate(name: str, prompt_ids: tuple[int, ...], max_new_tokens: int) -> tuple[int, ...]:
    output = build(name).generate(
        torch.tensor([prompt_ids]),
        attention_mask=torch.ones(1, len(prompt_ids), dtype=torch.long),
        max_new_tokens=max_new_tokens,
        do_sample=False,
        pad_token_id=0,
        output_logits=True,
        return_dict_in_generate=True,
    )
    best = torch.cat(output.logits).topk(2).values
    gap = float((best[:, 0] - best[:, 1]).min())
    assert gap > SMALLEST_GAP, f"{name}: a choice by {gap:.1e} can fall either way; take another prompt"
    return tuple(output.sequences[0, len(prompt_ids) :].tolist())


def plain_text(name: str, prompt_ids: list[int], max_new_tokens: int) -> tuple[int, ...]:
    """What transformers' own greedy ``generate`` writes, computed once for each prompt."""
    return _generate(name, tuple(prompt_ids), max_new_tokens)
