"""Low-rank changes of a model, written as PEFT writes a LoRA adapter."""

import json
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import save_file

from selfspec_lab.training.early_exit import LowRank


def write_adapter(changes: Mapping[str, LowRank], base: str, folder: Path) -> None:
    """Writes changes, by the names of the layers that they change, in bfloat16.

    Args:
        changes: all of one rank.
        base: name of the model that they are of.
        folder: which exists.
    """
    tensors: dict[str, torch.Tensor] = {}
    for name, change in changes.items():
        for factor, part in (("A", change.down), ("B", change.up)):
            tensors[f"base_model.model.{name}.lora_{factor}.weight"] = part.detach().to(torch.bfloat16)
    rank = len(next(iter(changes.values())).down)
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": rank,
        "lora_alpha": rank,
        "lora_dropout": 0.0,
        "target_modules": sorted({name.rpartition(".")[2] for name in changes}),
        "bias": "none",
    }
    (folder / "adapter_config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
