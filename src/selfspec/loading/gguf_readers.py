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


def passes_over(*names: str) -> Reader:
    """Settings that change nothing."""

    def read(header: Header) -> dict[str, Any]:
        for name in names:
            header.settings.get(name)
        return {}

    return read


_SIZES = {
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), "expert_count"),
    **dict.fromkeys(("num_experts_per_tok", "top_k_experts", "moe_k", "moe_topk"), "expert_used_count"),
    "moe_intermediate_size": "expert_feed_forward_length",
    "shared_expert_intermediate_size": "expert_shared_feed_forward_length",
}
"""Settings of a mixture of experts, by all names that configs have for them."""

_OPTIONAL_SIZES = {
    **dict.fromkeys(("num_shared_experts", "n_shared_experts"), "expert_shared_count"),
    **dict.fromkeys(
        ("first_k_dense_replace", "num_dense_layers", "moe_layer_start_index"), "leading_dense_block_count"
    ),
}
"""The same of those that are 0 where a file does not have them."""

_TENSORS = {
    **dict.fromkeys(("attention_bias", "use_bias", "qkv_bias", "use_qkv_bias"), ("attn_q.bias", "attn_qkv.bias")),
    "mlp_bias": ("ffn_up.bias",),
    **dict.fromkeys(("use_qk_norm", "qk_layernorm"), ("attn_q_norm.weight",)),
}
"""What a config says of tensors that a model may have, by all names: whether layers have one of these."""


def usual(header: Header, known: Callable[[str], bool], *, may_be_dense: bool) -> dict[str, Any]:
    """What means the same in all families whose configs have a name for it.

    Args:
        header: of the file.
        known: whether a name is one of the family's config, of which the family reads no value itself.
        may_be_dense: whether a model of the family may have no experts.
    """
    settings = header.settings
    values: dict[str, Any] = {name: any(map(header.has, tensors)) for name, tensors in _TENSORS.items() if known(name)}
    if not any(map(known, _SIZES)) or (may_be_dense and not settings.integer("expert_count", 0)):
        return values
    count, own = (settings.integer(f"expert_{each}count", most=MOST_EXPERTS) for each in ("", "used_"))
    if not 0 < own <= count:
        raise damaged(f"this GGUF file uses {own} of {count} experts")
    values |= {name: settings.integer(key) for name, key in _SIZES.items() if known(name)}
    return values | {name: settings.integer(key, 0) for name, key in _OPTIONAL_SIZES.items() if known(name)}


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


picture_positions = passes_over("rope.dimension_sections")
"""The sections of a rope for pictures: the positions of text are the same in all of them."""
