"""What a family of models in GGUF files is, and what its config is read from."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from selfspec.loading.gguf_header import GgufTensor
from selfspec.loading.gguf_settings import Settings

Rows = npt.NDArray[np.int64]

NORM_AFTER_ATTENTION = {"post_attention_layernorm": "post_attention_norm"}
"""In most families the norm of this name is before the MLP."""


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


@dataclass(frozen=True)
class GgufFamily:
    """A family of models in GGUF.

    Attributes:
        model_type: its name in transformers.
        read_own: reads the settings of its own in transformers' words. Raises ``ModelLoadError`` for those that are
            missing or make no sense, ``UnsupportedModelError`` where transformers' family computes something else.
        norm: the attribute of its config for what norms add to a variance.
        rms: norms divide by a root of mean squares, and subtract no mean.
        modules: names in GGUF by those of modules in transformers, where they differ from those of ``gguf_names``.
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
        may_be_dense: its models may have no experts, though its config has names for their sizes.
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
    may_be_dense: bool = False
    varies: bool = False
    own_heads: bool = False
    order_outputs: Callable[[Any], Mapping[str, Rows]] = lambda _: {}
    order_inputs: Callable[[Any], Mapping[str, Rows]] = lambda _: {}
