"""What a family of models in GGUF files is, what its config is read from, and settings that many of them have."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from selfspec.loading.gguf_deepseek import has_sigmoids
from selfspec.loading.gguf_file import GgufTensor
from selfspec.loading.gguf_settings import Settings, damaged, refused

Rows = npt.NDArray[np.int64]

MOST_EXPERTS = 2**14
"""No model has nearly as many. Tables of a model are as long, so that a damaged file may not choose them freely."""

FEED_FORWARD = {
    **{f"feed_forward.{name}_proj": f"ffn_{name}" for name in ("gate", "up", "down")},
    "feed_forward.router": "ffn_gate_inp",
    "feed_forward.experts.gate_up_proj": "ffn_gate_up_exps",
    "feed_forward.experts.down_proj": "ffn_down_exps",
}
"""Names in GGUF of the modules of MLPs and mixtures that transformers calls ``feed_forward``."""


@dataclass(frozen=True)
class Header:
    """What the settings of a config are read from.

    Attributes:
        settings: the model's own keys.
        tensors: the tensors of the file.
        layers: number of layers, without those that predict later tokens.
        hidden: width of the residual stream.
        heads: attention heads.
        groups: heads of keys and values.
        head_dim: size of a head.
    """

    settings: Settings
    tensors: Mapping[str, GgufTensor]
    layers: int
    hidden: int
    heads: int
    groups: int
    head_dim: int

    def layers_with(self, name: str) -> list[bool]:
        """Whether each layer has a tensor of this name."""
        return [f"blk.{layer}.{name}" in self.tensors for layer in range(self.layers)]

    def has(self, name: str) -> bool:
        """Whether some layer has a tensor of this name."""
        return any(self.layers_with(name))

    @property
    def has_qkv_bias(self) -> bool:
        """Whether the projections of the attention's input have biases."""
        return self.has("attn_q.bias") or self.has("attn_qkv.bias")


@dataclass(frozen=True)
class GgufFamily:
    """A family of models in GGUF.

    Attributes:
        model_type: its name in transformers.
        read_own: reads the settings of its own in transformers' words. Raises ``ModelLoadError`` for those that are
            missing or make no sense, ``UnsupportedModelError`` where transformers' family computes something else.
        norm: the attribute of its config for what norms add to a variance.
        rms: norms divide by a root of mean squares, and subtract no mean.
        modules: names in GGUF by those of modules in transformers, where it differs from others.
        interleaved: llama.cpp stores its rotated projections with the two halves of a head interleaved.
        whole: last names of modules whose weights its code reads by itself, so that they are numbers of the dtype.
        in_turns: parameters of experts have gate and up of an entry side by side.
        transposed: what the names of modules have whose weights have inputs before outputs; empty for none.
        norms_plus_one: files have one added to the weights of norms.
        partial_rope: whether its models can rotate a part of a head.
        rope_by_layer_type: whether each type of layers has a rope of its own.
        local_base: of the rope of layers with a window, where a file does not say it; ``None`` for that of the others.
        rounds_yarn: whether the bounds of YaRN's ramp are whole numbers, as those of llama.cpp always are.
        attends: its models have attention.
        rotates: its models have a rope.
        change_rope: reads further settings of it.
        latent: attention is to latents.
        varies: layers may have no heads of keys or no MLP.
        own_heads: reads itself how many heads each layer has, and how large values are.
        order_outputs: gives, for a config, the outputs of tensors in transformers' order, by name, where it differs.
        order_inputs: the same of inputs.
    """

    model_type: str
    read_own: Callable[[Header], dict[str, Any]] = lambda _: {}
    norm: str = "rms_norm_eps"
    rms: bool = True
    modules: Mapping[str, str] = field(default_factory=dict)
    interleaved: bool = False
    whole: frozenset[str] = frozenset()
    in_turns: bool = False
    transposed: str = ""
    norms_plus_one: bool = False
    partial_rope: bool = False
    rope_by_layer_type: bool = False
    local_base: float | None = None
    rounds_yarn: bool = True
    attends: bool = True
    rotates: bool = True
    change_rope: Callable[[Settings, dict[str, Any]], dict[str, Any]] = lambda _, rope: rope
    latent: bool = False
    varies: bool = False
    own_heads: bool = False
    order_outputs: Callable[[Any], Mapping[str, Rows]] = lambda _: {}
    order_inputs: Callable[[Any], Mapping[str, Rows]] = lambda _: {}


def biases(header: Header) -> dict[str, Any]:
    """Whether projections of attention have biases."""
    return {"attention_bias": header.has_qkv_bias}


def biases_and_mlp(header: Header) -> dict[str, Any]:
    """The same, and those of MLPs."""
    return {**biases(header), "mlp_bias": header.has("ffn_up.bias")}


def experts(header: Header, name: str = "num_local_experts") -> dict[str, Any]:
    """How many experts there are, by what a config calls that, and how many a row uses."""
    count = header.settings.integer("expert_count", most=MOST_EXPERTS)
    used = header.settings.integer("expert_used_count", most=MOST_EXPERTS)
    if not 0 < used <= count:
        raise damaged(f"this GGUF file uses {used} of {count} experts")
    return {name: count, "num_experts_per_tok": used}


def multipliers(header: Header) -> dict[str, Any]:
    """What Granite multiplies by."""
    settings = header.settings
    return {
        "embedding_multiplier": settings.number("embedding_scale", 0.0) or 1.0,
        "residual_multiplier": settings.number("residual_scale", 0.0) or 1.0,
        "logits_scaling": settings.number("logit_scale", 0.0) or 1.0,
        "attention_multiplier": settings.number("attention.scale", 0.0) or header.head_dim**-0.5,
    }


def pass_over_sections(header: Header) -> None:
    """Reads the sections of a rope for pictures: the positions of text are the same in all of them."""
    header.settings.get("rope.dimension_sections")


def windows(header: Header, *, default: int | None, period: int, first: bool = False) -> dict[str, Any]:
    """Every ``period``-th layer attends to everything, the others through a window, if the file says nothing else.

    Args:
        header: of the file, whose list of layers can have entries of blocks after the last layer, too.
        default: the window where the file does not say it; ``None`` where it must.
        period: of the layers without a window.
        first: these begin with the first layer, not with the ``period``-th.
    """
    settings, name = header.settings, "attention.sliding_window_pattern"
    window, pattern = settings.integer("attention.sliding_window", default), settings.get(name)
    if isinstance(pattern, (list, tuple, np.ndarray)):
        windowed = list(map(bool, settings.by_layer(name)))
    else:
        period = settings.integer(name, period)
        windowed = [period == 0 or (layer + (not first)) % period != 0 for layer in range(header.layers)]
    if len(windowed) not in (header.layers, settings.integer("block_count")):
        raise damaged(f"{settings.key(name)} of this GGUF file has {len(windowed)} entries for {header.layers} layers")
    if not window:
        return {"layer_types": ["full_attention"] * header.layers}
    types = ["sliding_attention" if each else "full_attention" for each in windowed[: header.layers]]
    return {"sliding_window": window, "layer_types": types}


def qwen2_moe(header: Header) -> dict[str, Any]:
    """A mixture with a shared expert behind a gate."""
    settings = header.settings
    return {
        **experts(header, "num_experts"),
        "moe_intermediate_size": settings.integer("expert_feed_forward_length"),
        "shared_expert_intermediate_size": settings.integer("expert_shared_feed_forward_length"),
        "norm_topk_prob": False,  # llama.cpp never does it
        "qkv_bias": header.has_qkv_bias,
    }


def require_sigmoids(header: Header) -> None:
    """Refuses a router with a softmax."""
    if not has_sigmoids(header.settings):
        raise refused("the router of this GGUF file has a softmax, not the sigmoids of its family")
