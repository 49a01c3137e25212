"""The folder of a head: its own tensors beside those of its model, which stay in the model's file.

``model.safetensors.index.json`` names the file of each tensor, as it does for checkpoints of several files.
"""

from __future__ import annotations

import json
import os
import shutil
import textwrap
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save
from torch import Tensor
from torch.nn import functional

from model import Llama, rms_norm
from mtp import PASSES, Head, from_checkpoint, to_checkpoint

_WEIGHTS, _HEAD = "model.safetensors", "mtp.safetensors"
_OF_THE_MODEL = {"README.md", "evaluation.json", "training.json", _WEIGHTS}


def measure_head(llama: Llama, head: dict[str, Tensor], tokens: Tensor) -> list[float]:
    """Share of the model's greedy choices that each pass of a head makes, on a text, int64 ``[rows, length]``."""
    embedding = llama.weights["embedding"][0]
    equal = [0] * PASSES
    weights = {name: part.to(embedding) for name, part in head.items()}
    for row in tokens.split(1):
        states = llama.run(llama.embed(row), range(llama.shape.sublayers))
        states = rms_norm(states, llama.weights["final_norm"][0], llama.shape.epsilon)
        wanted = functional.linear(states, embedding).argmax(-1)
        outputs = Head(llama.shape, weights, embedding).passes(states[:, :-1], row[:, 1:], PASSES)
        for own, output in enumerate(outputs):
            equal[own] += int((functional.linear(output, embedding).argmax(-1) == wanted[:, 1 + own :]).sum())
    return [count / (len(tokens) * (tokens.shape[1] - 1 - own)) for own, count in enumerate(equal)]


def read_head(folder: Path) -> dict[str, Tensor]:
    """The weights of a head that `write_head` wrote, float32, named as by `mtp.initial_head`."""
    return from_checkpoint(load_file(folder / _HEAD))


def write_head(
    out: Path, model: Path, llama: Llama, head: dict[str, Tensor], training: dict[str, Any], figures: dict[str, Any]
) -> None:
    """Write the files of a head, and what they need of its model's folder.

    Args:
        out: folder, which is made; its index has the place of the model's file relative to it.
        model: folder of the model's checkpoint.
        llama: the model.
        head: float32 weights, named as by `mtp.initial_head`.
        training: for ``training.json``.
        figures: for ``evaluation.json``: agreement of each pass by domain.
    """
    shutil.copytree(model, out, ignore=shutil.ignore_patterns(*_OF_THE_MODEL))
    tensors = to_checkpoint(head, llama.shape)
    (out / _HEAD).write_bytes(save(tensors, metadata={"format": "pt"}))
    with safe_open(model / _WEIGHTS, framework="pt") as file:
        shared = dict.fromkeys(file.keys(), Path(os.path.relpath(model / _WEIGHTS, out)).as_posix())
    index = {"metadata": {}, "weight_map": {**shared, **dict.fromkeys(tensors, _HEAD)}}
    for name, content in (
        ("model.safetensors.index.json", index),
        ("training.json", training),
        ("evaluation.json", figures),
    ):
        (out / name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    (out / "README.md").write_text(_card(model.name, head, training, figures), encoding="utf-8")


def _card(model: str, head: dict[str, Tensor], training: dict[str, Any], figures: dict[str, Any]) -> str:
    size = sum(part.numel() for part in head.values())
    passes = [f"token {1 + own}" for own in range(PASSES)]
    rows = [f"| {name} | " + " | ".join(f"{each:.3f}" for each in shares) + " |" for name, shares in figures.items()]
    return f"""---
language: en
library_name: transformers
pipeline_tag: text-generation
---

# tiny-mtp: `{model}` with a multi-token-prediction head

The weights of [`{model}`](../{model}/README.md), unchanged and in its file, and a head of {size / 1e6:.1f} million
parameters that drafts for it (`--method mtp`).

## Recipe

The model is frozen. The head learns the distributions that it gives, in {len(passes)} passes, each of which reads the
normed outputs of the one before (EAGLE-3, arXiv 2503.01840).
{textwrap.fill(f"{_texts(training)}. `recipes/` makes it again.", 120)}

## Held-out agreement

Share of the model's greedy choices that the head makes at held-out positions, for each token of a draft.

| domain | {" | ".join(passes)} |
| --- |{" --- |" * len(passes)}
{chr(10).join(rows)}

## Limits

Those of `{model}`: form without substance.
"""


def _texts(training: dict[str, Any]) -> str:
    form = "{steps:,} steps of {tokens_per_step:,} tokens {texts}, seed {seed}, torch {torch}"
    if (before := training.get("before")) is None:
        return "It took " + form.format(texts="of the model's training text", **training)
    own = form.format(texts="that the model for the most part wrote itself", **training)
    return f"{_texts(before)}; then {own}"


def held_out_rows(stream: Tensor, length: int, most: int) -> Tensor:
    """The first rows of a stream of tokens, ``[rows, length]``, at most as many."""
    rows = min(most, len(stream) // length)
    return stream[: rows * length].view(rows, length)


def record(steps: int, tokens_per_step: int, seed: int, head: Path | None = None) -> dict[str, Any]:
    """What ``training.json`` says of a head, which may go on with another of a folder."""
    before = {} if head is None else {"before": json.loads((head / "training.json").read_text())}
    return {
        "recipe": "tiny-mtp",
        "steps": steps,
        "tokens_per_step": tokens_per_step,
        "seed": seed,
        "torch": torch.__version__,
        **before,
    }
