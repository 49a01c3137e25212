"""Writes a checkpoint that ``transformers`` loads: config, bfloat16 weights, tokenizer."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save
from tokenizers import Tokenizer
from torch import Tensor

from model import Shape
from tokenizer import BOS, EOS, PAD, wrap_tokenizer


def to_hugging_face(weights: dict[str, Tensor], shape: Shape) -> dict[str, Tensor]:
    """Rename and split the stacked weights into those of ``LlamaForCausalLM``, in bfloat16.

    Args:
        weights: tensors named as by `model.initial_weights`.
        shape: size of the model.
    """
    named = {"model.embed_tokens.weight": weights["embedding"], "model.norm.weight": weights["final_norm"]}
    for layer in range(shape.layers):
        queries, keys, values = weights["qkv"][layer].split((shape.hidden, shape.key_value, shape.key_value))
        gate, up = weights["gate_up"][layer].chunk(2)
        parts = {
            "input_layernorm": weights["attention_norm"][layer],
            "self_attn.q_proj": queries,
            "self_attn.k_proj": keys,
            "self_attn.v_proj": values,
            "self_attn.o_proj": weights["out"][layer],
            "post_attention_layernorm": weights["mlp_norm"][layer],
            "mlp.gate_proj": gate,
            "mlp.up_proj": up,
            "mlp.down_proj": weights["down"][layer],
        }
        named |= {f"model.layers.{layer}.{name}.weight": part for name, part in parts.items()}
    return {name: weight.detach().to("cpu", torch.bfloat16, copy=True).contiguous() for name, weight in named.items()}


def read_checkpoint(folder: Path) -> tuple[dict[str, list[Tensor]], Shape, Tokenizer]:
    """Read a checkpoint written by `write_checkpoint` as float32 weights for `model.Llama`."""
    config = json.loads((folder / "config.json").read_text())
    shape = Shape(
        vocabulary=config["vocab_size"],
        layers=config["num_hidden_layers"],
        hidden=config["hidden_size"],
        heads=config["num_attention_heads"],
        key_value_heads=config["num_key_value_heads"],
        mlp=config["intermediate_size"],
        max_positions=config["max_position_embeddings"],
        rope_theta=config["rope_theta"],
        epsilon=config["rms_norm_eps"],
    )
    named = {name: weight.float() for name, weight in load_file(folder / "model.safetensors").items()}

    def stacked(*parts: str) -> list[Tensor]:
        layers = range(shape.layers)
        return [torch.cat([named[f"model.layers.{layer}.{part}.weight"] for part in parts]) for layer in layers]

    weights = {
        "embedding": [named["model.embed_tokens.weight"]],
        "final_norm": [named["model.norm.weight"]],
        "attention_norm": stacked("input_layernorm"),
        "mlp_norm": stacked("post_attention_layernorm"),
        "qkv": stacked("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
        "out": stacked("self_attn.o_proj"),
        "gate_up": stacked("mlp.gate_proj", "mlp.up_proj"),
        "down": stacked("mlp.down_proj"),
    }
    return weights, shape, Tokenizer.from_file(str(folder / "tokenizer.json"))


def hugging_face_config(shape: Shape, tokenizer: Tokenizer) -> dict[str, object]:
    """Return the contents of ``config.json``."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "attention_bias": False,
        "mlp_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": tokenizer.token_to_id(BOS),
        "eos_token_id": tokenizer.token_to_id(EOS),
        "pad_token_id": tokenizer.token_to_id(PAD),
        "head_dim": shape.head,
        "hidden_act": "silu",
        "hidden_size": shape.hidden,
        "initializer_range": shape.hidden**-0.5,
        "intermediate_size": shape.mlp,
        "max_position_embeddings": shape.max_positions,
        "num_attention_heads": shape.heads,
        "num_hidden_layers": shape.layers,
        "num_key_value_heads": shape.key_value_heads,
        "rms_norm_eps": shape.epsilon,
        "rope_theta": shape.rope_theta,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        "use_cache": True,
        "vocab_size": shape.vocabulary,
    }


def write_checkpoint(folder: Path, weights: dict[str, Tensor], shape: Shape, tokenizer: Tokenizer) -> None:
    """Write the files of a checkpoint into ``folder``, each moved into place once all of them are written."""
    draft = folder.with_name(folder.name + ".part")
    shutil.rmtree(draft, ignore_errors=True)
    draft.mkdir(parents=True)
    config = hugging_face_config(shape, tokenizer)
    generation = {key: config[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id")}
    (draft / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    (draft / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n")
    (draft / "model.safetensors").write_bytes(save(to_hugging_face(weights, shape), metadata={"format": "pt"}))
    wrap_tokenizer(tokenizer, shape.max_positions).save_pretrained(draft)
    folder.mkdir(parents=True, exist_ok=True)
    for path in draft.iterdir():
        path.replace(folder / path.name)
    draft.rmdir()
