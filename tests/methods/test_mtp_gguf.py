"""Multi-token-prediction heads of GGUF files: the same text and drafts as from the checkpoint's safetensors."""

from pathlib import Path
from typing import Any

import pytest
import torch
from gguf import GGMLQuantizationType
from safetensors.torch import load_file

from helpers.gguf_families import save_with_gguf_head
from helpers.kernels import needs_kernels
from helpers.mtp_checkpoints import LAYERS, VOCABULARY, load, save_with_head
from selfspec import Engine
from selfspec.errors import ModelLoadError, UnsupportedModelError
from selfspec.loading import gguf_model
from selfspec.loading.gguf_file import GgufFile
from selfspec.model.mtp_modules import has_head, read_mtp

PREFIXES = (f"model.layers.{LAYERS}.", "mtp.")
PROMPT = torch.randint(VOCABULARY, (24,), generator=torch.Generator().manual_seed(5)).tolist()
FAMILIES = pytest.mark.parametrize("family", ["glm4_moe", "deepseek_v3", "qwen3_next"])


def write(family: str, folder: Path, **options: Any) -> tuple[Any, Path]:
    """A checkpoint's model, and the GGUF file of model and head."""
    made = load(save_with_head(family, folder))
    tensors = load_file(folder / "model.safetensors")
    head = {name: tensor for name, tensor in tensors.items() if name.startswith(PREFIXES)}
    return made, save_with_gguf_head(made, head, folder / "model.gguf", **options)


def read(path: Path, dtype: torch.dtype = torch.float32) -> Any:
    with pytest.MonkeyPatch.context() as patch:  # the file has no tokenizer
        patch.setattr(gguf_model, "read_tokenizer", lambda _: None)
        return gguf_model.read_gguf(path, dtype, packed=True)[0]


def generate(model: Any) -> Any:
    settings = {"draft_length": 3, "threshold": 0.0}
    return Engine(model, method="mtp", settings=settings).generate(PROMPT, max_new_tokens=40)


@FAMILIES
def test_a_head_drafts_what_the_checkpoints_head_drafts(family: str, tmp_path: Path) -> None:
    checkpoint, path = write(family, tmp_path)
    model = read(path)
    assert has_head(model)
    own, wanted = (dict(read_mtp(each).model.named_parameters()) for each in (model, checkpoint))
    assert own.keys() == wanted.keys()
    for name, values in wanted.items():
        assert torch.equal(own[name], values), name
    found, expected = generate(model), generate(checkpoint)
    assert found.token_ids == expected.token_ids
    assert [(each.drafted, each.accepted) for each in found.rounds] == [
        (each.drafted, each.accepted) for each in expected.rounds
    ]
    assert found.accepted > 5


@needs_kernels
def test_a_head_of_few_bits_drafts(tmp_path: Path) -> None:
    _, path = write("glm4_moe", tmp_path, quantised=GGMLQuantizationType.Q8_0)
    model = read(path)
    plain = Engine(model, method="autoregressive").generate(PROMPT, max_new_tokens=40)
    found = generate(model)
    assert found.token_ids == plain.token_ids
    assert found.accepted > 5


def test_a_file_that_only_names_a_head_has_none(tmp_path: Path) -> None:
    _, whole = write("glm4_moe", tmp_path / "whole")
    block = tuple(name for name in GgufFile.open(whole).tensors if name.startswith(f"blk.{LAYERS}."))
    model = read(write("glm4_moe", tmp_path / "without", leave_out=block)[1])
    assert block
    assert not has_head(model)
    with pytest.raises(UnsupportedModelError, match="no multi-token-prediction head"):
        Engine(model, method="mtp")


def test_a_tensor_that_is_missing_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match=f"blk.{LAYERS}.nextn.enorm.weight of the multi-token-prediction head"):
        read(write("glm4_moe", tmp_path, leave_out=(f"blk.{LAYERS}.nextn.enorm.weight",))[1])
