"""LoRA adapters with random weights, saved by PEFT, and what PEFT itself generates with them."""

import copy
import functools
from pathlib import Path
from typing import Any

import pytest
import torch

from helpers.checkpoints import CHAT_TEMPLATE, make_tokenizer
from helpers.models import VARIANTS, make

peft: Any = pytest.importorskip("peft")


@functools.cache
def native(family: str) -> Any:
    """A model of a family with heads of 32 dimensions, which the kernels take. Shared by all tests."""
    return make(VARIANTS[family](hidden_size=128, head_dim=32), family)


def save_native(folder: Path, family: str = "llama") -> Path:
    """The same with a tokenizer, as a folder that ``load_model`` takes."""
    native(family).save_pretrained(folder)
    make_tokenizer(chat_template=CHAT_TEMPLATE).save_pretrained(folder)
    return folder


@functools.cache
def plain_text(family: str, prompt: tuple[int, ...], length: int) -> tuple[int, ...]:
    """What transformers writes without an adapter."""
    return peft_text(native(family), list(prompt), length)


def lora(rank: int = 4, targets: list[str] | str = "all-linear", **options: Any) -> Any:
    """A configuration of LoRA; all linear layers of attention and MLPs if no targets are named."""
    return peft.LoraConfig(r=rank, lora_alpha=2 * rank, target_modules=targets, task_type="CAUSAL_LM", **options)


def adapted(model: Any, config: Any, seed: int = 0, size: float = 0.1) -> Any:
    """A copy of a model with an adapter whose weights are random."""
    made = peft.get_peft_model(copy.deepcopy(model), config)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in made.named_parameters():
            if "lora_" in name or "ia3" in name or "modules_to_save" in name:
                weight.copy_(size * torch.randn(weight.shape, generator=generator))
    return made.eval()


def save(model: Any, folder: Path) -> Path:
    """Saves the adapter of a model."""
    model.save_pretrained(folder)
    return folder


def peft_text(model: Any, prompt: list[int], length: int, **options: Any) -> tuple[int, ...]:
    """What PEFT's own ``generate`` writes, greedily, the adapter not merged."""
    ids = torch.tensor([prompt])
    common = {"attention_mask": torch.ones_like(ids), "max_new_tokens": length, "do_sample": False, "pad_token_id": 0}
    return tuple(model.generate(input_ids=ids, **common, **options)[0, len(prompt) :].tolist())
