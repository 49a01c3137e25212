"""One table: how each Hugging Face decoder family splits into attention and MLP residual branches.

A layer of a supported family is two residual branches in sequence. Families differ in the positions of their norms and
in a few multipliers. Projections, rope, q/k norms and score caps are inside transformers' own attention and MLP
modules, which the eager runtime calls as they are. A row also names the linear layers that these modules must have
(``decoder.py`` checks them when a model is loaded), and what the fused blocks (``runtimes/fused.py``) and kernels need:
the modules' classes, the layout of rope, whether the MLP has a gate, how rows choose experts.
"""

from dataclasses import dataclass, replace
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


class RopeLayout(Enum):
    """Which entries of a head rope rotates against each other."""

    HALVES = "an entry of the first half and the one at its place in the second half"
    NEIGHBOURS = "two neighbours"


@dataclass(frozen=True)
class Branch:
    """A residual branch: ``hidden + norm_after(module(norm_before(hidden)))``.

    The module is of the family's own class, or another one (a mixture of experts, a user's own), called as it is.
    ``module`` and the norms are attributes of a layer; a norm may be ``None``.

    Attributes:
        inputs: linear layers of the family's own module that read its input, in the order of the fused product.
        output: linear layer of the family's own module that computes its output.
        class_ending: how the name of the family's own module's class ends, as in ``LlamaAttention``.
    """

    module: str
    norm_before: str | None
    norm_after: str | None
    inputs: tuple[str, ...]
    output: str
    class_ending: str

    @property
    def parts(self) -> tuple[str, ...]:
        """The linear layers of the family's own module."""
        return *self.inputs, self.output


def _attention(
    before: str | None = "input_layernorm",
    after: str | None = None,
    inputs: tuple[str, ...] = ("q_proj", "k_proj", "v_proj"),
) -> Branch:
    return Branch("self_attn", before, after, inputs, "o_proj", "Attention")


def _mlp(
    before: str | None = "post_attention_layernorm",
    after: str | None = None,
    inputs: tuple[str, ...] = ("gate_proj", "up_proj"),
    output: str = "down_proj",
) -> Branch:
    return Branch("mlp", before, after, inputs, output, "MLP")


@dataclass(frozen=True)
class Mixture:
    """The mixture of experts that a branch's module may be.

    Attributes:
        class_ending: of its class.
        router: its module that gives experts their logits.
        sigmoid: an expert's score is the sigmoid of its logit, not its share in a softmax.
        bias: what is added to scores where experts are chosen, which its weights do not have. Such routers have float32
            logits.
        shared: its module of an expert that all rows share; ``shared_expert`` has a gate.
        transposed: weights of experts are ``[experts, inputs, outputs]``, not ``[experts, outputs, inputs]``.
        exact: logits are float32 without such a bias, too.
        normalizes: the weights of a row's experts add up to one, where the router does not say whether they do.
        best_of_group: a group of experts is chosen by the sum of as many of its best scores.
    """

    class_ending: str = "SparseMoeBlock"
    router: str = "gate"
    sigmoid: bool = False
    bias: str | None = None
    shared: str = "shared_expert"
    transposed: bool = False
    exact: bool = False
    normalizes: bool = True
    best_of_group: int = 2


_LLAMA_ATTENTION, _LLAMA_MLP = _attention(), _mlp()
_AFTER_ATTENTION = _attention(before=None, after="post_attention_layernorm")
_AFTER_MLP = _mlp(before=None, after="post_feedforward_layernorm")
_SANDWICH_ATTENTION = _attention(after="post_attention_layernorm")
_SANDWICH_MLP = _mlp(before="pre_feedforward_layernorm", after="post_feedforward_layernorm")
_UNGATED_MLP = _mlp(inputs=("up_proj",))
_FUSED_MLP = _mlp(inputs=("gate_up_proj",))
_BIASED = Mixture("MoE", sigmoid=True, bias="gate.e_score_correction_bias", shared="shared_experts")


@dataclass(frozen=True)
class Family:
    """How the decoder layers of one family split into sublayers. Attributes that are ``None`` do not apply.

    Attributes:
        classes: how the names of its modules' classes begin in transformers, as in ``LlamaAttention``.
        attention: the attention branch, sublayer ``2i``.
        mlp: the MLP (or mixture-of-experts) branch, sublayer ``2i + 1``.
        residual_multiplier: config attribute that scales every branch before it is added.
        embedding_multiplier: config attribute that scales the embeddings.
        sqrt_embedding: embeddings are scaled by the root of the hidden size (by the embedding module itself in newer
            versions of transformers).
        logits_divisor: config attribute that the logits are divided by.
        logits_multiplier: config attribute that they are multiplied by.
        rope_by_layer_type: each layer type has a rope of its own.
        norms_plus_one: norms multiply by one plus their weight.
        rounds_normed: RMS norms round to the model's dtype before they multiply by their weight.
        rope: which entries of a head rope rotates against each other.
        head_norms: modules that norm queries and keys, where an attention module has them.
        head_norms_last: they follow rope.
        local_rope: where there is a sliding window, layers without it have no rope.
        gated: the MLP multiplies two projections of its input; off where it has one alone.
        softcap: attribute of an attention module that caps its scores.
        angles_once: the rotary module gives each angle once, not for both entries that it rotates.
        complex_angles: it gives complex numbers, and attention modules take them.
        latent: a slot of the cache has a latent, and the rotated entries of a key, for all heads (DeepSeek's MLA).
        mixture: what a layer may have in the place of its MLP.
        without: config attribute with which a model of the family is none of this row.
    """

    name: str
    classes: str
    attention: Branch = _LLAMA_ATTENTION
    mlp: Branch = _LLAMA_MLP
    windows: Windows = Windows.NONE
    residual_multiplier: str | None = None
    embedding_multiplier: str | None = None
    sqrt_embedding: bool = False
    logits_divisor: str | None = None
    logits_multiplier: str | None = None
    rope_by_layer_type: bool = False
    without: str | None = None
    norms_plus_one: bool = False
    rounds_normed: bool = True
    rope: RopeLayout = RopeLayout.HALVES
    head_norms: tuple[str, str] = ("q_norm", "k_norm")
    head_norms_last: bool = False
    local_rope: bool = False
    gated: bool = True
    softcap: str | None = None
    angles_once: bool = False
    complex_angles: bool = False
    latent: bool = False
    mixture: Mixture | None = None

    def owns(self, module: object, class_ending: str) -> bool:
        """Whether a module is of this family's own class with this ending, as transformers has it."""
        kind = type(module)
        own = kind.__module__.startswith("transformers.models.")
        return own and kind.__name__ == f"{self.classes}{class_ending}"


_GRANITE = Family(
    "Granite",
    classes="Granite",
    residual_multiplier="residual_multiplier",
    embedding_multiplier="embedding_multiplier",
    logits_divisor="logits_scaling",
)
_GEMMA = Family("Gemma", classes="Gemma", norms_plus_one=True, rounds_normed=False, sqrt_embedding=True)
_GEMMA2 = replace(
    _GEMMA,
    name="Gemma-2",
    classes="Gemma2",
    softcap="attn_logit_softcapping",
    attention=_SANDWICH_ATTENTION,
    mlp=_SANDWICH_MLP,
    windows=Windows.BY_LAYER_TYPE,
)

FAMILIES: dict[str, Family] = {
    "llama": Family("Llama", classes="Llama"),
    "internlm3": Family("InternLM3", classes="Llama"),
    "iquestcoder": Family("IQuest-Coder", classes="Llama"),
    "seed_oss": Family("Seed-OSS", classes="SeedOss"),
    "ministral": Family("Ministral", classes="Ministral", windows=Windows.BY_LAYER_TYPE),
    "mistral": Family("Mistral", classes="Mistral", windows=Windows.ALL),
    "qwen2": Family("Qwen2", classes="Qwen2", windows=Windows.BY_LAYER_TYPE),
    "qwen3": Family("Qwen3", classes="Qwen3", windows=Windows.BY_LAYER_TYPE),
    "smollm3": Family("SmolLM3", classes="SmolLM3", windows=Windows.BY_LAYER_TYPE),
    "phi3": Family(
        "Phi-3",
        classes="Phi3",
        attention=_attention(inputs=("qkv_proj",)),
        mlp=_FUSED_MLP,
        windows=Windows.ALL,
    ),
    "olmo2": Family("OLMo-2", "Olmo2", _AFTER_ATTENTION, _AFTER_MLP, rounds_normed=False),
    "olmo3": Family(
        "OLMo-3",
        "Olmo3",
        _AFTER_ATTENTION,
        _AFTER_MLP,
        rounds_normed=False,
        windows=Windows.BY_LAYER_TYPE,
        rope_by_layer_type=True,
    ),
    "exaone4": Family(
        "EXAONE 4", "Exaone4", _AFTER_ATTENTION, _AFTER_MLP, windows=Windows.BY_LAYER_TYPE, local_rope=True
    ),
    "hunyuan_v1_dense": Family(
        "Hunyuan",
        classes="HunYuanDenseV1",
        head_norms=("query_layernorm", "key_layernorm"),
        head_norms_last=True,
    ),
    "helium": Family("Helium", classes="Helium", rope=RopeLayout.NEIGHBOURS, rounds_normed=False),
    "ernie4_5": Family("ERNIE 4.5", classes="Ernie4_5", rope=RopeLayout.NEIGHBOURS),
    "arcee": Family("Arcee", classes="Arcee", mlp=_UNGATED_MLP, gated=False),
    "jais2": Family("Jais 2", classes="Jais2", mlp=_UNGATED_MLP, gated=False),
    "nemotron": Family("Nemotron", classes="Nemotron", mlp=_UNGATED_MLP, gated=False, norms_plus_one=True),
    "granite": _GRANITE,
    "hyperclovax": Family(
        "HyperCLOVA X",
        classes="HyperCLOVAX",
        attention=_attention(after="post_norm1"),
        mlp=_mlp(after="post_norm2"),
        residual_multiplier="residual_multiplier",
        embedding_multiplier="embedding_multiplier",
        logits_multiplier="logits_scaling",
    ),
    "gemma": replace(_GEMMA, without="use_bidirectional_attention"),
    "vaultgemma": replace(
        _GEMMA2,
        name="VaultGemma",
        classes="VaultGemma",
        attention=_LLAMA_ATTENTION,
        mlp=_mlp(before="pre_feedforward_layernorm"),
    ),
    "gemma2": _GEMMA2,
    "gemma3_text": replace(
        _GEMMA2,
        name="Gemma-3 (text)",
        classes="Gemma3",
        softcap=None,
        rope_by_layer_type=True,
        without="use_bidirectional_attention",
    ),
    "mixtral": Family("Mixtral", classes="Mixtral", windows=Windows.ALL, mixture=Mixture()),
    "qwen3_moe": Family("Qwen3-MoE", classes="Qwen3Moe", windows=Windows.ALL, mixture=Mixture()),
    "qwen2_moe": Family("Qwen2-MoE", classes="Qwen2Moe", windows=Windows.BY_LAYER_TYPE, mixture=Mixture()),
    "mellum": Family(
        "Mellum", classes="Mellum", windows=Windows.BY_LAYER_TYPE, rope_by_layer_type=True, mixture=Mixture()
    ),
    "olmoe": Family("OLMoE", classes="Olmoe", without="clip_qkv", mixture=Mixture()),
    "flex_olmo": Family("FlexOlmo", "FlexOlmo", _AFTER_ATTENTION, _AFTER_MLP, rounds_normed=False, mixture=Mixture()),
    "glm4_moe": Family("GLM-4.5", classes="Glm4Moe", mixture=_BIASED),
    "dots1": Family("dots.llm1", classes="Dots1", windows=Windows.BY_LAYER_TYPE, mixture=_BIASED),
    "solar_open": Family("Solar Open", classes="SolarOpen", mixture=_BIASED),
    "exaone_moe": Family(
        "EXAONE MoE",
        classes="ExaoneMoe",
        windows=Windows.BY_LAYER_TYPE,
        local_rope=True,
        mixture=replace(_BIASED, class_ending="SparseMoEBlock"),
    ),
    "hy_v3": Family("Hunyuan 3", classes="HYV3", mixture=replace(_BIASED, bias="e_score_correction_bias")),
    "minimax_m2": Family(
        "MiniMax-M2",
        classes="MiniMaxM2",
        mixture=Mixture(sigmoid=True, bias="e_score_correction_bias"),
    ),
    "ernie4_5_moe": Family(
        "ERNIE 4.5 MoE",
        classes="Ernie4_5_Moe",
        rope=RopeLayout.NEIGHBOURS,
        mixture=Mixture(bias="gate.moe_statics.e_score_correction_bias", shared="shared_experts"),
    ),
    "granitemoe": replace(
        _GRANITE,
        name="Granite-MoE",
        classes="GraniteMoe",
        mlp=Branch("block_sparse_moe", "post_attention_layernorm", None, (), "", "MLP"),
        mixture=Mixture(class_ending="MoE", router="router"),
    ),
    "deepseek_v2": Family(
        "DeepSeek-V2",
        classes="DeepseekV2",
        attention=_attention(inputs=("kv_a_proj_with_mqa",)),
        rope=RopeLayout.NEIGHBOURS,
        angles_once=True,
        complex_angles=True,
        latent=True,
        mixture=Mixture("Moe", shared="shared_experts", exact=True, normalizes=False, best_of_group=1),
    ),
    "deepseek_v3": Family(
        "DeepSeek-V3",
        classes="DeepseekV3",
        attention=_attention(inputs=("kv_a_proj_with_mqa",)),
        rope=RopeLayout.NEIGHBOURS,
        latent=True,
        mixture=_BIASED,
    ),
    "gpt_oss": Family(
        "gpt-oss",
        classes="GptOss",
        mlp=Branch("mlp", "post_attention_layernorm", None, (), "", "DenseMLP"),  # every MLP is a mixture
        windows=Windows.BY_LAYER_TYPE,
        rounds_normed=False,
        angles_once=True,
        mixture=Mixture(class_ending="MLP", router="router", transposed=True),
    ),
    "starcoder2": Family(
        "Starcoder2",
        classes="Starcoder2",
        gated=False,
        mlp=_mlp(inputs=("c_fc",), output="c_proj"),
        windows=Windows.ALL,
    ),
    "glm": Family("GLM-4", classes="Glm", rope=RopeLayout.NEIGHBOURS, mlp=_FUSED_MLP),
    "glm4": Family(
        "GLM-4-0414",
        classes="Glm4",
        rope=RopeLayout.NEIGHBOURS,
        attention=_attention(after="post_self_attn_layernorm"),
        mlp=_mlp(after="post_mlp_layernorm", inputs=("gate_up_proj",)),
    ),
    "stablelm": Family("StableLM", classes="StableLm", without="use_parallel_residual"),
}
"""By ``config.model_type``."""


def find_family(config: PretrainedConfig) -> Family | None:
    """The row of the table for a model; ``None`` where it has none.

    Raises:
        UnsupportedModelError: it is no decoder-only language model that transformers has.
    """
    model_type = str(getattr(config, "model_type", None))
    family = FAMILIES.get(model_type)
    if family is not None:
        return None if family.without and getattr(config, family.without, False) else family
    if getattr(config, "is_encoder_decoder", False):
        raise UnsupportedModelError(
            f"model family '{model_type}' is not supported: an encoder-decoder model is not a decoder-only language "
            "model"
        )
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES  # imported with models

    if model_type not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        code, none = "it needs code of the checkpoint, which is never run", "transformers has no language model of it"
        raise UnsupportedModelError(
            f"model family '{model_type}' is not supported: {code if getattr(config, 'auto_map', None) else none}"
        )
    return None


def require_row(config: PretrainedConfig) -> Family:
    """The row of the table for a model that has to run natively.

    Raises:
        UnsupportedModelError: it has none.
    """
    family = find_family(config)
    if family is None:
        rows = ", ".join(each.name for each in FAMILIES.values())
        raise UnsupportedModelError(
            f"a '{config.model_type}' model runs by transformers' own modules only; low-bit weights and GGUF files are "
            f"for {rows}"
        )
    return family
