"""Fused blocks, and final norm with LM head, described for a native forward: data beside them, made of them."""

import ctypes
from collections.abc import Sequence
from ctypes import Structure
from functools import partial
from typing import Any, TypeAlias, TypeVar

from torch.nn import functional

from selfspec.model.decoder import Decoder
from selfspec.model.families import Family
from selfspec.model.sublayers import AttentionSublayer, Sublayer
from selfspec.runtimes.activations import ClampedGlu
from selfspec.runtimes.fused import FusedAttention, FusedBlock, FusedMLP, LayerNorm, RowNorm
from selfspec.runtimes.kernels import find
from selfspec.runtimes.latent import CompiledLatentAttention, compile_latent_attention
from selfspec.runtimes.mixtures import CompiledMixture, compile_mixture
from selfspec.runtimes.products import CompiledProduct, Function, has_kernels
from selfspec.runtimes.structures import (
    AttentionWeights,
    Heads,
    LatentWeights,
    Linear,
    MixtureWeights,
    MlpWeights,
    NativeHead,
    NativeSublayer,
    Norm,
)

W = TypeVar("W", bound=Structure)
Weights: TypeAlias = AttentionWeights | MlpWeights | MixtureWeights | LatentWeights
_FIELDS = {AttentionWeights: "attention", MlpWeights: "mlp", MixtureWeights: "mixture", LatentWeights: "latent"}


def compile_block(sublayer: Sublayer, family: Family, layer: int) -> Sublayer:
    """The form of a sublayer of a decoder layer that kernels run, or itself where there is none.

    A fused block with kernels for the products of few rows, a mixture of experts, or attention to latents.
    """
    if isinstance(sublayer, AttentionSublayer) and family.latent:
        return compile_latent_attention(sublayer, family, layer)
    if not isinstance(sublayer, (FusedAttention, FusedMLP)):
        return compile_mixture(sublayer, family)
    if not has_kernels(list(sublayer.parameters())):
        return sublayer
    return sublayer.replaced(products=tuple(map(CompiledProduct, sublayer.products)))


def describe_block(
    block: Any, weights: Weights, windows: Sequence[int | None], kinds: Sequence[str | None]
) -> NativeSublayer:
    """A fused block for the C++ code, by the sliding windows and the layer types of ropes of the whole forward.

    Block and weights (``describe_weights``) have to outlive it.
    """
    before, after = map(describe_norm, block.norms)
    attends = isinstance(block, AttentionSublayer)
    return NativeSublayer(
        before=before,
        after=after,
        multiplier=block.multiplier,
        view=windows.index(block.window) if attends else 0,
        turn=kinds.index(block.rope) if attends and block.turns else -1,
        hidden=block.products[0].shape[1],
        **{_FIELDS[type(weights)]: ctypes.pointer(weights)},
    )


def describe_weights(block: Sublayer) -> Weights | None:
    """The weights of a block that ``compile_block`` made; ``None`` where the kernels lack something of it."""
    if not isinstance(block, FusedBlock) or not _known(*block.norms):
        return None
    if not all(isinstance(product, CompiledProduct) for product in block.products):
        return None
    if isinstance(block, CompiledLatentAttention):
        return _describe_latent_attention(block)
    if isinstance(block, FusedAttention):
        return _describe_attention(block)
    assert isinstance(block, (FusedMLP, CompiledMixture))
    activation = native_activation(block.activate)
    if activation is None:
        return None
    gated = isinstance(block, CompiledMixture) or block.gated
    clamps = (block.activate.alpha, block.activate.limit) if isinstance(block.activate, ClampedGlu) else ()
    mlps = [
        MlpWeights(gate_up.linear, down.linear, down.shape[1], activation, gated, *clamps)
        for gate_up, down in zip(block.products[::2], block.products[1::2], strict=True)
    ]
    if isinstance(block, FusedMLP):
        return mlps[0]
    return _filled(
        MixtureWeights,
        block,
        router=block.router.linear,
        experts=mlps[0],
        shared=mlps[1] if mlps[1:] else MlpWeights(),
        bias=None if block.bias is None else block.bias.data_ptr(),
    )


def _describe_attention(block: FusedAttention) -> AttentionWeights | None:
    constants = find().constants
    fits = block.head_dim % constants["DIM_STEP"] == 0 and block.head_dim <= constants["MOST_DIM"]
    if not fits or block.heads % block.key_heads or not _known(*block.head_norms):
        return None
    query_norm, key_norm = map(describe_norm, block.head_norms or (None, None))
    return _filled(
        AttentionWeights,
        block,
        inputs=block.products[0].linear,
        output=block.products[1].linear,
        query_norm=query_norm,
        key_norm=key_norm,
        sizes=Heads(block.heads, block.key_heads, block.head_dim),
        softcap=block.softcap or 0.0,
        sinks=None if block.sinks is None else block.sinks.data_ptr(),
        layer=block.index,
    )


def _describe_latent_attention(block: CompiledLatentAttention) -> LatentWeights | None:
    constants, width = find().constants, block.latent + block.turned
    products = block.products if block.rank else (block.products[0], None, block.products[1])
    if width % constants["DIM_STEP"] or width > constants["MOST_DIM"]:
        return None
    inputs, queries, output = (Linear() if each is None else each.linear for each in products)
    return _filled(
        LatentWeights,
        block,
        inputs=inputs,
        queries=queries,
        output=output,
        expanding=block.expanding.data_ptr(),
        query_norm=describe_norm(block.query_norm),
        latent_norm=describe_norm(block.latent_norm),
        layer=block.index,
    )


def _filled(kind: type[W], block: FusedBlock, **given: Any) -> W:
    """A structure with these fields; the others are the block's attributes of the same names."""
    names = (name for name, *_ in kind._fields_ if name not in given)
    return kind(**given, **{name: getattr(block, name) for name in names})


def native_activation(function: Function) -> int | None:
    """The number by which ``rows.h`` knows an activation; ``None`` for one that it does not know."""
    from transformers.activations import GELUTanh, ReLUSquaredActivation  # imports transformers' models

    if function is functional.silu:
        return find().constants["SILU"]
    if isinstance(function, ClampedGlu):
        return find().constants["CLAMPED_GLU"]
    kernel = function.act if isinstance(function, GELUTanh) else None
    if isinstance(kernel, partial) and kernel.func is functional.gelu:
        return find().constants["GELU_TANH"]
    return find().constants["RELU_SQUARED"] if isinstance(function, ReLUSquaredActivation) else None


def _known(*norms: Any) -> bool:
    """Whether the kernels compute each of the norms."""
    return all(norm is None or isinstance(norm, RowNorm) for norm in norms)


def describe_head(norm: Function, head: Function, decoder: Decoder) -> NativeHead | None:
    """Final norm, LM head and scaled logits for the C++ code, if it knows them. Their tensors have to outlive it."""
    if not isinstance(norm, RowNorm) or not isinstance(head, CompiledProduct):
        return None
    return NativeHead(
        describe_norm(norm),
        head.linear,
        hidden=head.shape[1],
        outputs=head.shape[0],
        divisor=decoder.logits_divisor,
        softcap=decoder.logits_softcap or 0.0,
    )


def describe_norm(norm: Any) -> Norm:
    """A norm, or that there is none, for the C++ code."""
    if norm is None:
        return Norm()
    kind = find().constants["LAYER_NORM" if isinstance(norm, LayerNorm) else "RMS_NORM"]
    bias = None if norm.bias is None else norm.bias.data_ptr()
    return Norm(norm.weight.data_ptr(), bias, norm.epsilon, kind, norm.rounds, norm.added)
