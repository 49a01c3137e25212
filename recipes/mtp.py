"""A multi-token-prediction head for a trained checkpoint: one more layer, which learns what the frozen model writes.

Row ``p`` reads the model's state after its final norm at position ``p`` and the token at ``p + 1``, and predicts the
token at ``p + 2`` through the model's own LM head. Applied again, it reads its own normed output in place of the
model's: pass ``j`` predicts the token at ``p + 1 + j``, and its rows attend to the rows of the first pass, and to those
of later passes that led to them (the training-time test of EAGLE-3, arXiv 2503.01840).
"""

from __future__ import annotations

import math
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional
from tqdm import tqdm

from data import MIXTURE, Mixer
from model import Llama, Shape, mlp_sublayer, rms_norm, rotary_tables, rotate
from optimizer import orthogonalize
from own_texts import OwnTexts
from phases import Stage
from training import STEPS_BETWEEN_CHECKPOINTS, save_checkpoint

MATRICES = ("fc", "qkv", "out", "gate_up", "down")
"""Weights of the head that Muon updates."""

PASSES = 3
"""Tokens of a draft that are trained."""
_PEAK, _PEAK_AGAIN = 0.015, 0.004
"""Learning rate of the matrices, of a new head and of one that goes on; that of the norms is a tenth."""


def initial_head(llama: Llama) -> dict[str, Tensor]:
    """The weights before the first step: the model's last layer, which reads its state and hardly the token.

    Returns:
        float32 tensors: ``fc [hidden, 2 hidden]`` (token, then state), ``norm_embedding``, ``norm_hidden`` and ``norm
        [hidden]``, and the layer's ``attention_norm``, ``qkv``, ``out``, ``mlp_norm``, ``gate_up`` and ``down``.
    """
    hidden, weights = llama.shape.hidden, llama.weights
    generator = torch.Generator().manual_seed(0)
    token = torch.randn(hidden, hidden, generator=generator) * 0.5 * hidden**-0.5
    names = ("attention_norm", "qkv", "out", "mlp_norm", "gate_up", "down")
    head = {"fc": torch.cat([token, torch.eye(hidden)], dim=1), "norm": weights["final_norm"][0]}
    head |= {"norm_embedding": torch.ones(hidden), "norm_hidden": torch.ones(hidden)}
    return {name: part.detach().float().clone() for name, part in (head | {n: weights[n][-1] for n in names}).items()}


class Head:
    """Runs a head over the states of its model.

    Args:
        shape: size of the model.
        weights: tensors named as by ``initial_head``.
        embedding: the model's, ``[vocabulary, hidden]``.
    """

    def __init__(self, shape: Shape, weights: dict[str, Tensor], embedding: Tensor) -> None:
        self.shape, self.weights, self.embedding = shape, weights, embedding

    def passes(self, states: Tensor, tokens: Tensor, count: int) -> list[Tensor]:
        """Apply the head several times.

        Args:
            states: the model's states after its final norm, ``[rows, length, hidden]``.
            tokens: the token after each, ``[rows, length]``.
            count: passes.

        Returns:
            the normed outputs of each pass; pass ``j`` (from 0) has ``length - j`` of them, of positions ``j`` on.
        """
        keys: list[Tensor] = []
        values: list[Tensor] = []
        outputs = []
        for own in range(count):
            states = self._run(states, tokens[:, own:], own, keys, values)
            outputs.append(states)
            states = states[:, :-1]
        return outputs

    def _run(self, states: Tensor, tokens: Tensor, own: int, keys: list[Tensor], values: list[Tensor]) -> Tensor:
        weights, epsilon = self.weights, self.shape.epsilon
        embedded = rms_norm(functional.embedding(tokens, self.embedding), weights["norm_embedding"], epsilon)
        joined = torch.cat([embedded, rms_norm(states, weights["norm_hidden"], epsilon)], dim=-1)
        stream = functional.linear(joined, weights["fc"])
        stream = stream + functional.linear(self._attend(stream, own, keys, values), weights["out"])
        stream = mlp_sublayer(stream, weights["mlp_norm"], weights["gate_up"], weights["down"], epsilon)
        return rms_norm(stream, weights["norm"], epsilon)

    def _attend(self, stream: Tensor, own: int, keys: list[Tensor], values: list[Tensor]) -> Tensor:
        """Attention of the rows of a pass; its keys and values are added to those of the passes before."""
        shape, (rows, length, _) = self.shape, stream.shape
        normed = rms_norm(stream, self.weights["attention_norm"], shape.epsilon)
        projected = functional.linear(normed, self.weights["qkv"])
        groups, shared = shape.key_value_heads, shape.heads // shape.key_value_heads
        projected = projected.view(rows, length, shape.heads + 2 * groups, shape.head).transpose(1, 2)
        query, key, value = projected.split((shape.heads, groups, groups), dim=1)
        cosines, sines = rotary_tables(shape, length + own, stream.device, stream.dtype)
        query, key = rotate(query, cosines[own:], sines[own:]), rotate(key, cosines[own:], sines[own:])
        keys.append(key.repeat_interleave(shared, dim=1))
        values.append(value.repeat_interleave(shared, dim=1))
        seen = torch.ones(length, length, dtype=torch.bool).tril_()
        scores = [(query @ keys[0][:, :, :length].mT).masked_fill(~seen, -math.inf)]
        chain = [(keys[i][:, :, :length], values[i][:, :, :length]) for i in range(1, own + 1)]  # by first row
        scores += [(query * k).sum(-1, keepdim=True) for k, _ in chain]
        shares = (torch.cat(scores, dim=-1).float() * shape.head**-0.5).softmax(-1).to(value.dtype)
        mixed = shares[..., :length] @ values[0][:, :, :length]
        for index, (_, v) in enumerate(chain):
            mixed = mixed + shares[..., length + index : length + index + 1] * v
        return mixed.transpose(1, 2).reshape(rows, length, shape.hidden)


def train_head(
    llama: Llama,
    texts: Mixer | OwnTexts,
    stage: Stage,
    path: Path,
    steps: int | None = None,
    start: dict[str, Tensor] | None = None,
) -> dict[str, Tensor]:
    """Train a head of a frozen model to have its distribution; returns float32 weights.

    Later passes count less: drafts end at their first wrong token. An interrupted run goes on from the checkpoint at
    ``path``. ``steps`` replaces those of the stage, ``start`` the first weights (``initial_head``).
    """
    steps = steps or stage.steps
    masters, peak = (start, _PEAK_AGAIN) if start else (initial_head(llama), _PEAK)
    run = {"seed": texts.seed, "steps": steps, "model": float(sum(part.double().sum() for part in masters.values()))}
    moments = {name: torch.zeros_like(master) for name, master in masters.items()}
    squares = {name: torch.zeros_like(master) for name, master in masters.items()}
    done = 0
    if path.exists():
        saved = torch.load(path)
        if saved["run"] != run:
            raise ValueError(f"{path} is of another model, --seed or --steps; give those or another --work folder")
        masters, moments, squares, done = (saved[name] for name in ("masters", "moments", "squares", "step"))
    embedding = llama.weights["embedding"][0]
    progress = tqdm(range(done, steps), "tiny-mtp", steps, initial=done, mininterval=20)
    agreed = [0.0] * PASSES
    for step in progress:
        inputs, _ = texts.batch(step, stage.rows, stage.length, MIXTURE)
        with torch.no_grad():
            states = rms_norm(
                llama.run(llama.embed(inputs), range(llama.shape.sublayers)),
                llama.weights["final_norm"][0],
                llama.shape.epsilon,
            )
            given = functional.linear(states, embedding).float().log_softmax(-1)
        weights = {name: master.to(embedding.dtype, copy=True).requires_grad_() for name, master in masters.items()}
        outputs = Head(llama.shape, weights, embedding).passes(states[:, :-1], inputs[:, 1:], PASSES)
        loss = torch.zeros(())
        for own, output in enumerate(outputs):
            wanted = given[:, 1 + own :]
            drafted = functional.linear(output, embedding).float().log_softmax(-1)
            divergence = (wanted.exp() * (wanted - drafted)).sum(-1).mean()
            loss = loss + divergence * 0.8**own
            share = (wanted.argmax(-1) == drafted.detach().argmax(-1)).float().mean().item()
            agreed[own] += (share - agreed[own]) * 0.05
        loss.backward()
        rate = min(1.0, (step + 1) / 20, 1.2 * (steps - step) / steps)
        for name, master in masters.items():
            gradient = weights[name].grad.float()
            if name in MATRICES:
                _muon(master, gradient, moments[name], rate * peak)
            else:
                _adam(master, gradient, moments[name], squares[name], rate * peak * 0.1, step + 1)
        if (step + 1) % STEPS_BETWEEN_CHECKPOINTS == 0 or step + 1 == steps:
            state = {"masters": masters, "moments": moments, "squares": squares}
            save_checkpoint({"run": run, "step": step + 1, **state}, path)
        progress.set_postfix({"loss": f"{loss.item():.3f}", "agreed": [f"{share:.3f}" for share in agreed]})
    return masters


def _muon(master: Tensor, gradient: Tensor, moment: Tensor, rate: float) -> None:
    moment.lerp_(gradient, 0.05)
    update = orthogonalize(gradient.lerp(moment, 0.95)[None], dtype=torch.float32)[0]
    master.sub_(update, alpha=rate * max(1.0, len(master) / master.shape[1]) ** 0.5)


def _adam(master: Tensor, gradient: Tensor, moment: Tensor, square: Tensor, rate: float, step: int) -> None:
    moment.lerp_(gradient, 0.1)
    square.lerp_(gradient.square(), 0.05)
    denominator = (square / (1 - 0.95**step)).sqrt_().add_(1e-8)
    master.addcdiv_(moment, denominator, value=-rate / (1 - 0.9**step))


def from_checkpoint(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The float32 weights of a head's tensors, the other way around (`to_checkpoint`)."""
    parts = {name.removeprefix("mtp.").removesuffix(".weight"): part.float() for name, part in tensors.items()}
    layer = {name.removeprefix("layers.0."): part for name, part in parts.items()}
    return {
        "fc": parts["fc"],
        "norm_embedding": parts["pre_fc_norm_embedding"],
        "norm_hidden": parts["pre_fc_norm_hidden"],
        "norm": parts["norm"],
        "attention_norm": layer["input_layernorm"],
        "qkv": torch.cat([layer[f"self_attn.{name}_proj"] for name in "qkv"]),
        "out": layer["self_attn.o_proj"],
        "mlp_norm": layer["post_attention_layernorm"],
        "gate_up": torch.cat([layer["mlp.gate_proj"], layer["mlp.up_proj"]]),
        "down": layer["mlp.down_proj"],
    }


def to_checkpoint(head: dict[str, Tensor], shape: Shape) -> dict[str, Tensor]:
    """The tensors as Qwen3-Next names them, in bfloat16."""
    queries, keys, values = head["qkv"].split((shape.hidden, shape.key_value, shape.key_value))
    gate, up = head["gate_up"].chunk(2)
    parts = {
        "fc": head["fc"],
        "pre_fc_norm_embedding": head["norm_embedding"],
        "pre_fc_norm_hidden": head["norm_hidden"],
        "norm": head["norm"],
        "layers.0.input_layernorm": head["attention_norm"],
        "layers.0.self_attn.q_proj": queries,
        "layers.0.self_attn.k_proj": keys,
        "layers.0.self_attn.v_proj": values,
        "layers.0.self_attn.o_proj": head["out"],
        "layers.0.post_attention_layernorm": head["mlp_norm"],
        "layers.0.mlp.gate_proj": gate,
        "layers.0.mlp.up_proj": up,
        "layers.0.mlp.down_proj": head["down"],
    }
    return {f"mtp.{name}.weight": part.to(torch.bfloat16, copy=True).contiguous() for name, part in parts.items()}
