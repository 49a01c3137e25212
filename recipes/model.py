"""A small Llama written for training: sublayers are plain functions of (hidden states, weights).

To skip a sublayer is to skip a call, and two compiled functions serve all layers for any subset. Matrices of one kind
are stacked over the layers, so the optimizer handles them as one batch.
Sublayer ``2i`` is the attention branch of layer ``i``, sublayer ``2i + 1`` its MLP branch; the norms belong to them.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional


@dataclass(frozen=True, slots=True)
class Shape:
    """Size of the model; every number is a count of elements."""

    vocabulary: int = 4096
    layers: int = 16
    hidden: int = 256
    heads: int = 4
    key_value_heads: int = 2
    mlp: int = 512
    max_positions: int = 2048
    rope_theta: float = 10_000.0
    epsilon: float = 1e-5

    @property
    def head(self) -> int:
        """Elements of one attention head."""
        return self.hidden // self.heads

    @property
    def key_value(self) -> int:
        """Elements of the keys (and as many of the values) of one token in one layer."""
        return self.key_value_heads * self.head

    @property
    def sublayers(self) -> int:
        """Number of sublayers, two per layer."""
        return 2 * self.layers

    @property
    def middle(self) -> range:
        """Sublayers that may be skipped: all except those of the first and the last layer."""
        return range(2, self.sublayers - 2)


MATRICES = ("qkv", "out", "gate_up", "down")
"""Weights that Muon updates; the others are the embedding and the norms' gains."""


def initial_weights(shape: Shape, seed: int) -> dict[str, Tensor]:
    """Draw initial weights. The branches' outputs are zero at first, so all subsets start equal.

    Returns:
        float32 tensors: ``embedding [vocabulary, hidden]``, ``final_norm [hidden]`` and, stacked over the layers,
        ``attention_norm`` and ``mlp_norm [layers, hidden]``, ``qkv [layers, hidden + 2 key_value, hidden]``,
        ``out [layers, hidden, hidden]``, ``gate_up [layers, 2 mlp, hidden]``, ``down [layers, hidden, mlp]``.
    """
    generator = torch.Generator().manual_seed(seed)
    layers, hidden = shape.layers, shape.hidden

    def normal(*size: int) -> Tensor:
        return torch.randn(*size, generator=generator) * hidden**-0.5

    return {
        "embedding": normal(shape.vocabulary, hidden),
        "attention_norm": torch.ones(layers, hidden),
        "mlp_norm": torch.ones(layers, hidden),
        "final_norm": torch.ones(hidden),
        "qkv": normal(layers, hidden + 2 * shape.key_value, hidden),
        "out": torch.zeros(layers, hidden, hidden),
        "gate_up": normal(layers, 2 * shape.mlp, hidden),
        "down": torch.zeros(layers, hidden, shape.mlp),
    }


def rotary_tables(shape: Shape, length: int, device: torch.device | str, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Cosines and sines of the rotary positions 0 ... length - 1, ``[length, head]`` each."""
    frequencies = shape.rope_theta ** -(torch.arange(0, shape.head, 2, dtype=torch.float32) / shape.head)
    angles = torch.outer(torch.arange(length, dtype=torch.float32), frequencies).repeat(1, 2)
    return angles.cos().to(device, dtype), angles.sin().to(device, dtype)


def rms_norm(hidden_states: Tensor, gain: Tensor, epsilon: float) -> Tensor:
    """Root-mean-square norm over the last dimension, computed in float32; same shape and dtype as its input."""
    wide = hidden_states.float()
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + epsilon)).to(hidden_states.dtype) * gain


def attention_sublayer(
    hidden_states: Tensor, gain: Tensor, qkv: Tensor, out: Tensor, cosines: Tensor, sines: Tensor, epsilon: float
) -> Tensor:
    """Add one attention branch to the residual stream.

    Args:
        hidden_states: ``[rows, length, hidden]``.
        gain: the branch's norm, ``[hidden]``.
        qkv: query, key and value projections stacked, ``[hidden + 2 key_value, hidden]``.
        out: output projection, ``[hidden, hidden]``.
        cosines: ``[length, head]``, from `rotary_tables`.
        sines: likewise.
        epsilon: the norm's.

    Returns:
        ``[rows, length, hidden]``.
    """
    rows, length, hidden = hidden_states.shape
    head = cosines.shape[-1]
    heads, groups = hidden // head, (qkv.shape[0] - hidden) // (2 * head)
    projected = functional.linear(rms_norm(hidden_states, gain, epsilon), qkv)
    projected = projected.view(rows, length, heads + 2 * groups, head).transpose(1, 2)
    queries, keys, values = projected.split((heads, groups, groups), dim=1)
    queries, keys = rotate(queries, cosines, sines), rotate(keys, cosines, sines)
    mixed = causal_attention(queries, keys, values)
    return hidden_states + functional.linear(mixed.transpose(1, 2).reshape(rows, length, hidden), out)


def causal_attention(queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """Causal attention in blocks of queries, each over the keys up to its end and no further.

    On a CPU its backward pass takes about half the time of ``scaled_dot_product_attention``'s: it consists of plain
    matrix products, and the heads that share keys and values are one product.

    Args:
        queries: ``[rows, heads, length, head]``.
        keys: ``[rows, groups, length, head]``; every group serves ``heads / groups`` heads.
        values: likewise.

    Returns:
        ``[rows, heads, length, head]``.
    """
    rows, heads, length, head = queries.shape
    shared, block = heads // keys.shape[1], max(64, length // 8)
    keys, values = keys.flatten(0, 1), values.flatten(0, 1)
    queries = queries.reshape(len(keys), shared, length, head)
    mixed = []
    for start in range(0, length, block):
        end = min(start + block, length)
        folded = queries[:, :, start:end].flatten(1, 2)
        scores = torch.bmm(folded, keys[:, :end].mT).view(len(keys), shared, end - start, end)
        seen = torch.arange(end, device=keys.device) <= torch.arange(start, end, device=keys.device)[:, None]
        shares = torch.where(seen, scores.float() * head**-0.5, float("-inf")).softmax(-1).to(values.dtype)
        mixed.append(torch.bmm(shares.flatten(1, 2), values[:, :end]).view(len(keys), shared, end - start, head))
    return torch.cat(mixed, dim=2).view(rows, heads, length, head)


def mlp_sublayer(hidden_states: Tensor, gain: Tensor, gate_up: Tensor, down: Tensor, epsilon: float) -> Tensor:
    """Add one MLP branch to the residual stream ``[rows, length, hidden]``; same shape out.

    Args:
        hidden_states: the residual stream.
        gain: the branch's norm, ``[hidden]``.
        gate_up: gate and up projections one below the other, ``[2 mlp, hidden]``.
        down: ``[hidden, mlp]``.
        epsilon: the norm's.
    """
    gate, up = functional.linear(rms_norm(hidden_states, gain, epsilon), gate_up).chunk(2, dim=-1)
    return hidden_states + functional.linear(functional.silu(gate) * up, down)


class Llama:
    """Runs any subset of the sublayers over given weights.

    Attributes:
        shape: size of the model.
        weights: tensors named as by `initial_weights`, the stacked ones as a list with one tensor for each layer.
    """

    def __init__(self, shape: Shape, weights: dict[str, list[Tensor]], compiled: bool) -> None:
        """Bind the weights; ``compiled`` runs the sublayers through ``torch.compile``."""
        self.shape = shape
        self.weights = weights
        self._attention = torch.compile(attention_sublayer, dynamic=False) if compiled else attention_sublayer
        self._mlp = torch.compile(mlp_sublayer, dynamic=False) if compiled else mlp_sublayer
        self._tables: dict[int, tuple[Tensor, Tensor]] = {}

    def embed(self, tokens: Tensor) -> Tensor:
        """Embed token ids ``[rows, length]``; returns the residual stream before sublayer 0."""
        return functional.embedding(tokens, self.weights["embedding"][0])

    def run(self, hidden_states: Tensor, sublayers: Iterable[int]) -> Tensor:
        """Run the given sublayers, in order, over the residual stream ``[rows, length, hidden]``."""
        cosines, sines = self._rotary(hidden_states)
        weights, epsilon = self.weights, self.shape.epsilon
        for sublayer in sublayers:
            layer = sublayer // 2
            if sublayer % 2 == 0:
                gain, qkv, out = weights["attention_norm"][layer], weights["qkv"][layer], weights["out"][layer]
                hidden_states = self._attention(hidden_states, gain, qkv, out, cosines, sines, epsilon)
            else:
                gain, gate_up, down = weights["mlp_norm"][layer], weights["gate_up"][layer], weights["down"][layer]
                hidden_states = self._mlp(hidden_states, gain, gate_up, down, epsilon)
        return hidden_states

    def logits(self, hidden_states: Tensor) -> Tensor:
        """Final norm and tied LM head: ``[..., hidden]`` to ``[..., vocabulary]``."""
        normed = rms_norm(hidden_states, self.weights["final_norm"][0], self.shape.epsilon)
        return functional.linear(normed, self.weights["embedding"][0])

    def _rotary(self, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
        length = hidden_states.shape[1]
        if length not in self._tables:
            self._tables[length] = rotary_tables(self.shape, length, hidden_states.device, hidden_states.dtype)
        return self._tables[length]


def rotate(states: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
    """Turn ``[..., length, head]`` by rotary tables."""
    first, second = states.chunk(2, dim=-1)
    return states * cosines + torch.cat((-second, first), dim=-1) * sines
