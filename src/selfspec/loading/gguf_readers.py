"""Readers of a header, of which rows of the table are put together: each gives some values of a config, by name."""

from collections.abc import Callable
from typing import Any

import numpy as np

from selfspec.loading.gguf_family import Header
from selfspec.loading.gguf_settings import damaged

Reader = Callable[[Header], dict[str, Any]]

MOST_EXPERTS = 2**14
"""No model has nearly as many. Tables of a model are as long, so that a damaged file may not choose them freely."""


def reads(*readers: Reader, **always: Any) -> Reader:
    """What several readers give, and values that are always the same; of one name the last counts."""

    def read(header: Header) -> dict[str, Any]:
        return {**{name: value for each in readers for name, value in each(header).items()}, **always}

    return read


def integers(missing: int | None = None, zero: int | None = 0, /, **keys: str) -> Reader:
    """Whole numbers; ``missing`` stands for those that a header does not have (``None``: it must), ``zero`` for 0."""
    return lambda header: {name: header.settings.integer(key, missing) or zero for name, key in keys.items()}


def numbers(missing: float | None = None, zero: float | None = 0.0, /, **keys: str) -> Reader:
    """The same of other numbers."""
    return lambda header: {name: header.settings.number(key, missing) or zero for name, key in keys.items()}


def has(**tensors: str) -> Reader:
    """Whether some layer has a tensor."""
    return lambda header: {name: header.has(tensor) for name, tensor in tensors.items()}


def has_qkv_bias(name: str) -> Reader:
    """Whether projections of the attention's input have biases, by what a config calls that."""
    return lambda header: {name: header.has_qkv_bias}


def passes_over(*names: str) -> Reader:
    """Settings that change nothing."""

    def read(header: Header) -> dict[str, Any]:
        for name in names:
            header.settings.get(name)
        return {}

    return read


def experts(name: str = "num_local_experts", used: str = "num_experts_per_tok") -> Reader:
    """How many experts there are and how many a row uses, by what a config calls these."""

    def read(header: Header) -> dict[str, Any]:
        count, own = (header.settings.integer(f"expert_{each}count", most=MOST_EXPERTS) for each in ("", "used_"))
        if not 0 < own <= count:
            raise damaged(f"this GGUF file uses {own} of {count} experts")
        return {name: count, used: own}

    return read


def sparse_by_router(header: Header) -> dict[str, Any]:
    """Which layers have experts: those with a router."""
    routed = header.layers_with("ffn_gate_inp.weight")
    return {"mlp_layer_types": ["sparse" if each else "dense" for each in routed]}


def sparse_after_dense(header: Header) -> dict[str, Any]:
    """The same: all but the first ones."""
    dense = header.settings.integer("leading_dense_block_count")
    return {"mlp_layer_types": ["dense" if layer < dense else "sparse" for layer in range(header.layers)]}


def multipliers(header: Header) -> dict[str, Any]:
    """What Granite multiplies by."""
    read = numbers(
        0.0,
        1.0,
        embedding_multiplier="embedding_scale",
        residual_multiplier="residual_scale",
        logits_scaling="logit_scale",
    )
    return {**read(header), **numbers(0.0, header.head_dim**-0.5, attention_multiplier="attention.scale")(header)}


def windows(*, default: int | None, period: int, first: bool = False) -> Reader:
    """Every ``period``-th layer attends to everything, the others through a window, if the file says nothing else.

    Args:
        default: the window where the file does not say it; ``None`` where it must.
        period: of the layers without a window.
        first: these begin with the first layer, not with the ``period``-th.
    """

    def read(header: Header) -> dict[str, Any]:
        settings, name = header.settings, "attention.sliding_window_pattern"
        window, pattern = settings.integer("attention.sliding_window", default), settings.get(name)
        if isinstance(pattern, (list, tuple, np.ndarray)):  # which can have entries of blocks after the last layer
            windowed = list(map(bool, settings.by_layer(name)))
        else:
            every = settings.integer(name, period)
            windowed = [every == 0 or (layer + (not first)) % every != 0 for layer in range(header.layers)]
        if len(windowed) not in (header.layers, settings.integer("block_count")):
            raise damaged(
                f"{settings.key(name)} of this GGUF file has {len(windowed)} entries for {header.layers} layers"
            )
        if not window:
            return {"layer_types": ["full_attention"] * header.layers}
        types = ["sliding_attention" if each else "full_attention" for each in windowed[: header.layers]]
        return {"sliding_window": window, "layer_types": types}

    return read


biases = has_qkv_bias("attention_bias")
"""Whether projections of attention have biases."""

biases_and_mlp = reads(biases, has(mlp_bias="ffn_up.bias"))
"""The same, and those of MLPs."""

picture_positions = passes_over("rope.dimension_sections")
"""The sections of a rope for pictures: the positions of text are the same in all of them."""

expert_width = integers(moe_intermediate_size="expert_feed_forward_length")
"""The inner width of an expert."""

qwen2_moe = reads(
    experts("num_experts"),
    expert_width,
    integers(shared_expert_intermediate_size="expert_shared_feed_forward_length"),
    has_qkv_bias("qkv_bias"),
    norm_topk_prob=False,  # llama.cpp never does it
)
"""A mixture with a shared expert behind a gate."""
