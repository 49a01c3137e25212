"""One table: how each Hugging Face decoder family splits into attention and MLP residual branches.

A layer of a supported family is two residual branches in sequence. What differs between families is where the norms
stand and a few multipliers; the projections, rope, q/k norms and score caps stay inside transformers' own attention and
MLP modules, which the generic path calls as they are. The fused blocks (``blocks.py``) know those modules by their
classes, and what a family's attention does beside projections and rope.
"""

from dataclasses import dataclass
from enum import Enum

from transformers import PretrainedConfig

from selfspec.errors import UnsupportedModelError


class Windows(Enum):
    """Which layers of a family attend through a sliding window of ``config.sliding_window`` positions."""

    NONE = "none"
    ALL = "all"
    """Every layer, if the config sets a window at all."""
    BY_LAYER_TYPE = "by layer type"
    """The layers that ``config.layer_types`` calls ``sliding_attention``."""


@dataclass(frozen=True)
class Branch:
    """A residual branch: ``hidden + norm_after(module(norm_before(hidden)))``; the names are attributes of a layer."""

    module: str
    norm_before: str | None
    norm_after: str | None = None


@dataclass(frozen=True)
class Family:
    """How the decoder layers of one family split into sublayers.

    Attributes:
        name: the family's name as people write it.
        attention: the attention branch, sublayer ``2i``.
        mlp: the MLP (or mixture-of-experts) branch, sublayer ``2i + 1``.
        windows: which layers have a sliding window.
        residual_multiplier: config attribute that scales every branch before it is added, if any.
        embedding_multiplier: config attribute that scales the embeddings, if any.
        sqrt_embedding: embeddings are scaled by the root of the hidden size (by the embedding module itself in newer
            versions of transformers).
        logits_divisor: config attribute that the logits are divided by, if any.
        rope_by_layer_type: each layer type has a rope of its own.
        bidirectional_flag: config attribute that must be off, because it makes attention look ahead, if any.
        classes: how the names of its modules' classes begin in transformers, as in ``LlamaAttention``.
        plain_norms: norms multiply by their weight; off where they multiply by one plus the weight.
        rounds_normed: norms round what they normed to the model's dtype before they multiply by their weight.
        softcap: attribute of an attention module that caps its scores, if any.
    """

    name: str
    attention: Branch = Branch("self_attn", norm_before="input_layernorm")
    mlp: Branch = Branch("mlp", norm_before="post_attention_layernorm")
    windows: Windows = Windows.NONE
    residual_multiplier: str | None = None
    embedding_multiplier: str | None = None
    sqrt_embedding: bool = False
    logits_divisor: str | None = None
    rope_by_layer_type: bool = False
    bidirectional_flag: str | None = None
    classes: str = ""
    plain_norms: bool = True
    rounds_normed: bool = True
    softcap: str | None = None


_POST_NORM_ATTENTION = Branch("self_attn", norm_before=None, norm_after="post_attention_layernorm")
_POST_NORM_MLP = Branch("mlp", norm_before=None, norm_after="post_feedforward_layernorm")
_SANDWICH_ATTENTION = Branch("self_attn", norm_before="input_layernorm", norm_after="post_attention_layernorm")
_SANDWICH_MLP = Branch("mlp", norm_before="pre_feedforward_layernorm", norm_after="post_feedforward_layernorm")

FAMILIES: dict[str, Family] = {
    "llama": Family("Llama", classes="Llama"),
    "mistral": Family("Mistral", classes="Mistral", windows=Windows.ALL),
    "qwen2": Family("Qwen2", classes="Qwen2", windows=Windows.BY_LAYER_TYPE),
    "qwen3": Family("Qwen3", classes="Qwen3", windows=Windows.BY_LAYER_TYPE),
    "smollm3": Family("SmolLM3", classes="SmolLM3", windows=Windows.BY_LAYER_TYPE),
    "phi3": Family("Phi-3", classes="Phi3", windows=Windows.ALL),
    "olmo2": Family("OLMo-2", classes="Olmo2", rounds_normed=False, attention=_POST_NORM_ATTENTION, mlp=_POST_NORM_MLP),
    "granite": Family(
        "Granite",
        classes="Granite",
        residual_multiplier="residual_multiplier",
        embedding_multiplier="embedding_multiplier",
        logits_divisor="logits_scaling",
    ),
    "gemma2": Family(
        "Gemma-2",
        classes="Gemma2",
        plain_norms=False,
        softcap="attn_logit_softcapping",
        attention=_SANDWICH_ATTENTION,
        mlp=_SANDWICH_MLP,
        windows=Windows.BY_LAYER_TYPE,
        sqrt_embedding=True,
    ),
    "gemma3_text": Family(
        "Gemma-3 (text)",
        classes="Gemma3",
        plain_norms=False,
        attention=_SANDWICH_ATTENTION,
        mlp=_SANDWICH_MLP,
        windows=Windows.BY_LAYER_TYPE,
        sqrt_embedding=True,
        rope_by_layer_type=True,
        bidirectional_flag="use_bidirectional_attention",
    ),
    "mixtral": Family("Mixtral", classes="Mixtral", windows=Windows.ALL),
    "qwen3_moe": Family("Qwen3-MoE", classes="Qwen3Moe", windows=Windows.ALL),
}
"""By ``config.model_type``."""

_REFUSALS: dict[str, str] = {
    "mamba": "a state-space model has no attention sublayers and no cache that can be rolled back",
    "mamba2": "a state-space model has no attention sublayers and no cache that can be rolled back",
    "falcon_mamba": "a state-space model has no attention sublayers and no cache that can be rolled back",
    "jamba": "a hybrid state-space model has no cache that can be rolled back",
    "rwkv": "a recurrent model has no cache that can be rolled back",
    "recurrent_gemma": "a recurrent model has no cache that can be rolled back",
    "gpt_neox": "attention and MLP run in parallel on one residual, so that they cannot be skipped one by one",
    "gptj": "attention and MLP run in parallel on one residual, so that they cannot be skipped one by one",
    "phi": "attention and MLP run in parallel on one residual, so that they cannot be skipped one by one",
    "falcon": "attention and MLP run in parallel on one residual, so that they cannot be skipped one by one",
    "cohere": "attention and MLP run in parallel on one residual, so that they cannot be skipped one by one",
    "cohere2": "attention and MLP run in parallel on one residual, so that they cannot be skipped one by one",
    "gemma3": "this is the image-and-text model; load its text part (model_type gemma3_text)",
}


def find_family(config: PretrainedConfig) -> Family:
    """The row of the table for a model.

    Args:
        config: the model's config.

    Returns:
        How its layers split into sublayers.

    Raises:
        UnsupportedModelError: the family is not in the table; the message says why where that is known, and what is.
    """
    model_type = str(getattr(config, "model_type", None))
    if model_type in FAMILIES:
        return FAMILIES[model_type]
    reason = _REFUSALS.get(model_type)
    if reason is None and getattr(config, "is_encoder_decoder", False):
        reason = "an encoder-decoder model is not a decoder-only language model"
    supported = ", ".join(family.name for family in FAMILIES.values())
    raise UnsupportedModelError(
        f"model family '{model_type}' is not supported{f': {reason}' if reason else ''}; supported are {supported}"
    )
