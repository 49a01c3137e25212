"""One table: how each Hugging Face decoder family splits into attention and MLP residual branches.

A layer of a supported family is two residual branches in sequence. Families differ in the positions of their norms and
in a few multipliers. Projections, rope, q/k norms and score caps are inside transformers' own attention and MLP
modules, which the eager runtime calls as they are. A row also names the linear layers that these modules must have
(``decoder.py`` checks them when a model is loaded), and what the fused blocks (``runtimes/fused.py``) need: the
modules' classes, the kind of norm, the layout of rope, whether the MLP has a gate.
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


class Norms(Enum):
    """What the norms of a family compute."""

    RMS = "RMS norm, times the weight"
    RMS_PLUS_ONE = "RMS norm, times one plus the weight"
    LAYER = "layer norm, with a bias"


class RopeLayout(Enum):
    """Which entries of a head rope rotates against each other."""

    HALVES = "an entry of the first half and the one at its place in the second half"
    INTERLEAVED = "two neighbours"


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
    """The mixture of experts that a branch's module may be: ``class_ending`` of its class, its module ``router``."""

    class_ending: str = "SparseMoeBlock"
    router: str = "gate"


_LLAMA_ATTENTION, _LLAMA_MLP = _attention(), _mlp()
_SANDWICH_ATTENTION = _attention(after="post_attention_layernorm")
_SANDWICH_MLP = _mlp(before="pre_feedforward_layernorm", after="post_feedforward_layernorm")


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
        rope_by_layer_type: each layer type has a rope of its own.
        rounds_normed: RMS norms round to the model's dtype before they multiply by their weight.
        rope: which entries of a head rope rotates against each other.
        gated: the MLP multiplies two projections of its input; off where it has one alone.
        softcap: attribute of an attention module that caps its scores.
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
    rope_by_layer_type: bool = False
    without: str | None = None
    norms: Norms = Norms.RMS
    rounds_normed: bool = True
    rope: RopeLayout = RopeLayout.HALVES
    gated: bool = True
    softcap: str | None = None
    mixture: Mixture | None = None

    def owns(self, module: object, class_ending: str) -> bool:
        """Whether a module is of this family's own class with this ending, as transformers has it."""
        kind = type(module)
        own = kind.__module__.startswith("transformers.models.")
        return own and kind.__name__ == f"{self.classes}{class_ending}"


FAMILIES: dict[str, Family] = {
    "llama": Family("Llama", classes="Llama"),
    "mistral": Family("Mistral", classes="Mistral", windows=Windows.ALL),
    "qwen2": Family("Qwen2", classes="Qwen2", windows=Windows.BY_LAYER_TYPE),
    "qwen3": Family("Qwen3", classes="Qwen3", windows=Windows.BY_LAYER_TYPE),
    "smollm3": Family("SmolLM3", classes="SmolLM3", windows=Windows.BY_LAYER_TYPE),
    "phi3": Family(
        "Phi-3",
        classes="Phi3",
        attention=_attention(inputs=("qkv_proj",)),
        mlp=_mlp(inputs=("gate_up_proj",)),
        windows=Windows.ALL,
    ),
    "olmo2": Family(
        "OLMo-2",
        classes="Olmo2",
        rounds_normed=False,
        attention=_attention(before=None, after="post_attention_layernorm"),
        mlp=_mlp(before=None, after="post_feedforward_layernorm"),
    ),
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
        norms=Norms.RMS_PLUS_ONE,
        rounds_normed=False,
        softcap="attn_logit_softcapping",
        attention=_SANDWICH_ATTENTION,
        mlp=_SANDWICH_MLP,
        windows=Windows.BY_LAYER_TYPE,
        sqrt_embedding=True,
    ),
    "gemma3_text": Family(
        "Gemma-3 (text)",
        classes="Gemma3",
        norms=Norms.RMS_PLUS_ONE,
        rounds_normed=False,
        attention=_SANDWICH_ATTENTION,
        mlp=_SANDWICH_MLP,
        windows=Windows.BY_LAYER_TYPE,
        sqrt_embedding=True,
        rope_by_layer_type=True,
        without="use_bidirectional_attention",
    ),
    "mixtral": Family("Mixtral", classes="Mixtral", windows=Windows.ALL, mixture=Mixture()),
    "qwen3_moe": Family("Qwen3-MoE", classes="Qwen3Moe", windows=Windows.ALL, mixture=Mixture()),
    "qwen2_moe": Family("Qwen2-MoE", classes="Qwen2Moe", windows=Windows.BY_LAYER_TYPE, mixture=Mixture()),
    "olmoe": Family("OLMoE", classes="Olmoe", without="clip_qkv", mixture=Mixture()),
    "granitemoe": Family(
        "Granite-MoE",
        classes="GraniteMoe",
        mlp=Branch("block_sparse_moe", "post_attention_layernorm", None, (), "", "MLP"),
        residual_multiplier="residual_multiplier",
        embedding_multiplier="embedding_multiplier",
        logits_divisor="logits_scaling",
        mixture=Mixture(class_ending="MoE", router="router"),
    ),
    "starcoder2": Family(
        "Starcoder2",
        classes="Starcoder2",
        norms=Norms.LAYER,
        gated=False,
        mlp=_mlp(inputs=("c_fc",), output="c_proj"),
        windows=Windows.ALL,
    ),
    "glm4": Family(
        "GLM-4-0414",
        classes="Glm4",
        rope=RopeLayout.INTERLEAVED,
        attention=_attention(after="post_self_attn_layernorm"),
        mlp=_mlp(after="post_mlp_layernorm", inputs=("gate_up_proj",)),
    ),
    "stablelm": Family("StableLM", classes="StableLm", norms=Norms.LAYER, without="use_parallel_residual"),
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
