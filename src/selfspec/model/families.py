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


_LLAMA_ATTENTION, _LLAMA_MLP = _attention(), _mlp()
_SANDWICH_ATTENTION = _attention(after="post_attention_layernorm")
_SANDWICH_MLP = _mlp(before="pre_feedforward_layernorm", after="post_feedforward_layernorm")


@dataclass(frozen=True)
class Refusal:
    """An option of a family that is not supported: the config attribute that must be off, and why."""

    option: str
    reason: str


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
    refusals: tuple[Refusal, ...] = ()
    norms: Norms = Norms.RMS
    rounds_normed: bool = True
    rope: RopeLayout = RopeLayout.HALVES
    gated: bool = True
    softcap: str | None = None

    def owns(self, module: object, branch: Branch) -> bool:
        """Whether a branch's module is of this family's own class, as transformers has it."""
        kind = type(module)
        own = kind.__module__.startswith("transformers.models.")
        return own and kind.__name__ == f"{self.classes}{branch.class_ending}"


_PARALLEL = "attention and MLP run in parallel on one residual, so that they cannot be skipped one by one"
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
        refusals=(Refusal("use_bidirectional_attention", "it attends in both directions"),),
    ),
    "mixtral": Family("Mixtral", classes="Mixtral", windows=Windows.ALL),
    "qwen3_moe": Family("Qwen3-MoE", classes="Qwen3Moe", windows=Windows.ALL),
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
    "stablelm": Family(
        "StableLM", classes="StableLm", norms=Norms.LAYER, refusals=(Refusal("use_parallel_residual", _PARALLEL),)
    ),
}
"""By ``config.model_type``."""

_REFUSALS: dict[str, str] = {
    "mamba": "a state-space model has no attention sublayers and no cache that can be rolled back",
    "mamba2": "a state-space model has no attention sublayers and no cache that can be rolled back",
    "falcon_mamba": "a state-space model has no attention sublayers and no cache that can be rolled back",
    "jamba": "a hybrid state-space model has no cache that can be rolled back",
    "rwkv": "a recurrent model has no cache that can be rolled back",
    "recurrent_gemma": "a recurrent model has no cache that can be rolled back",
    "gpt_neox": _PARALLEL,
    "gptj": _PARALLEL,
    "phi": _PARALLEL,
    "falcon": _PARALLEL,
    "cohere": _PARALLEL,
    "cohere2": _PARALLEL,
    "gemma3": "this is the image-and-text model; load its text part (model_type gemma3_text)",
}


def find_family(config: PretrainedConfig) -> Family:
    """The row of the table for a model.

    Raises:
        UnsupportedModelError: the family is not in the table, or the config sets an option that its row refuses.
    """
    model_type = str(getattr(config, "model_type", None))
    if model_type in FAMILIES:
        family = FAMILIES[model_type]
        _check_options(config, family)
        return family
    reason = _REFUSALS.get(model_type)
    if reason is None and getattr(config, "is_encoder_decoder", False):
        reason = "an encoder-decoder model is not a decoder-only language model"
    supported = ", ".join(family.name for family in FAMILIES.values())
    raise UnsupportedModelError(
        f"model family '{model_type}' is not supported{f': {reason}' if reason else ''}; supported are {supported}"
    )


def _check_options(config: PretrainedConfig, family: Family) -> None:
    for refusal in family.refusals:
        if getattr(config, refusal.option, False):
            raise UnsupportedModelError(
                f"this {family.name} model is not supported: {refusal.reason} (config.{refusal.option} is set); take a "
                f"{family.name} model without it"
            )
