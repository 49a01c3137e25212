"""GGUF files of tiny models: transformers' own reader gets every number back, and what cannot be said is refused."""

import shutil
import tempfile
from collections import namedtuple
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel

from helpers.models import VARIANTS, VOCABULARY, build
from selfspec import Engine
from selfspec.errors import InvalidParameterError, SelfSpecError, UnsupportedModelError
from selfspec_lab.bench import gguf_writer
from selfspec_lab.bench.gguf_names import ARCHITECTURES, check_writable
from selfspec_lab.bench.gguf_writer import gguf_bytes, write_gguf
from selfspec_lab.bench.llama_cpp import WeightsFile
from selfspec_lab.widening import widen_model

gguf: Any = pytest.importorskip("gguf")
pytest.importorskip("accelerate")

READ_BACK = ("llama", "llama-tied-biases", "llama-ungrouped", "llama-multi-query", "llama-linear-rope")


def read_back(path: Path, like: PreTrainedModel) -> PreTrainedModel:
    """The file as transformers reads it, in the form of another model."""
    reader: Any = AutoModelForCausalLM
    model: PreTrainedModel = reader.from_pretrained(
        path.parent, gguf_file=path.name, config=like.config, dtype=like.dtype
    )
    return model


def assert_same_weights(found: PreTrainedModel, expected: PreTrainedModel) -> None:
    weights = found.state_dict()
    for name, tensor in expected.state_dict().items():
        assert torch.equal(weights[name], tensor.cpu()), name


@pytest.mark.parametrize("name", READ_BACK)
def test_transformers_reads_the_same_weights(name: str, tmp_path: Path) -> None:
    model = build(name)
    write_gguf(model, tmp_path / "model.gguf")
    assert_same_weights(read_back(tmp_path / "model.gguf", model), model)


@pytest.mark.parametrize("name", ["qwen2", "qwen3"])
def test_the_other_families(name: str, tmp_path: Path) -> None:
    model = build(name)
    write_gguf(model, tmp_path / "model.gguf")
    assert_same_weights(read_back(tmp_path / "model.gguf", model), model)


def test_mistral_is_written_as_a_llama(tmp_path: Path) -> None:
    model = build("mistral")
    write_gguf(model, tmp_path / "model.gguf")
    reader: Any = AutoModelForCausalLM
    config = LlamaConfig(**{**model.config.to_dict(), "model_type": "llama"})
    found = reader.from_pretrained(tmp_path, gguf_file="model.gguf", config=config, dtype=torch.float32)
    assert_same_weights(found, model)


@pytest.mark.parametrize("name", ["llama", "llama-tied-biases"])
def test_the_file_says_how_the_model_is_built(name: str, tmp_path: Path) -> None:
    model: Any = build(name)
    write_gguf(model, tmp_path / "model.gguf")
    reader: Any = AutoModelForCausalLM
    found = reader.from_pretrained(tmp_path, gguf_file="model.gguf", dtype=torch.float32).config
    for key in ("vocab_size", "num_key_value_heads", "head_dim", "intermediate_size", "tie_word_embeddings"):
        assert getattr(found, key) == getattr(model.config, key), key


@pytest.mark.parametrize(("dtype", "kind"), [(torch.bfloat16, "BF16"), (torch.float16, "F16"), (torch.float32, "F32")])
def test_matrices_keep_their_dtype_and_vectors_are_float32(dtype: torch.dtype, kind: str, tmp_path: Path) -> None:
    config = VARIANTS["llama-tied-biases"]()
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    write_gguf(model, tmp_path / "model.gguf")
    tensors = gguf.GGUFReader(tmp_path / "model.gguf").tensors
    assert {tensor.tensor_type.name for tensor in tensors if len(tensor.shape) > 1} == {kind}
    assert {tensor.tensor_type.name for tensor in tensors if len(tensor.shape) == 1} == {"F32"}
    assert_same_weights(read_back(tmp_path / "model.gguf", model), model)
    size = (tmp_path / "model.gguf").stat().st_size
    assert size <= gguf_bytes(model) < size + 2**20 + 2**17


def test_the_file_of_a_widened_model_on_the_fused_runtime(tmp_path: Path) -> None:
    torch.manual_seed(0)
    config = LlamaConfig(
        **{"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2},
        **{"num_key_value_heads": 1, "vocab_size": 64, "max_position_embeddings": 64, "tie_word_embeddings": True},
    )
    narrow = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    wide = widen_model(narrow, 3, device=torch.device("cpu"))
    before = {name: tensor.clone() for name, tensor in wide.state_dict().items()}
    Engine(wide, runtime="fused", method="autoregressive").generate([1, 2, 3], max_new_tokens=4)
    write_gguf(wide, tmp_path / "model.gguf")
    found = read_back(tmp_path / "model.gguf", wide).state_dict()
    assert before.keys() == found.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in before.items())


def test_the_head_of_the_file(tmp_path: Path) -> None:
    write_gguf(build("llama-llama3-rope"), tmp_path / "model.gguf")
    reader = gguf.GGUFReader(tmp_path / "model.gguf")
    head = {name: field.contents() for name, field in reader.fields.items()}
    assert head["general.architecture"] == "llama"
    assert head["llama.vocab_size"] == VOCABULARY
    assert head["tokenizer.ggml.model"] == "no_vocab"
    assert head["llama.rope.freq_base"] == 1000.0
    assert head["llama.attention.head_count_kv"] == 2
    factors = next(tensor for tensor in reader.tensors if tensor.name == "rope_freqs.weight").data
    assert factors.shape == (8,)
    assert factors[0] == pytest.approx(1.0)  # fast frequencies stay, slow ones are divided by the factor
    assert factors[-1] == pytest.approx(8.0)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("gemma2", "families llama, mistral, qwen2, qwen3, not for gemma2"),
        ("mixtral", "not for mixtral"),
        ("llama-yarn-rope", "rope of type yarn"),
        ("llama-dynamic-rope", "rope of type dynamic"),
        ("mistral-window", "a window of 16 positions, for a context of 17"),
        ("qwen2-window", "a window of 16 positions"),
        ("qwen3-window", "biases in a Qwen3 attention"),
    ],
)
def test_what_cannot_be_written_is_refused(name: str, message: str) -> None:
    with pytest.raises(UnsupportedModelError, match=message):
        check_writable(build(name), 17)


def test_a_window_that_nothing_reaches_does_no_harm() -> None:
    check_writable(build("mistral-window"), 16)
    assert set(ARCHITECTURES) == {"llama", "mistral", "qwen2", "qwen3"}


def test_a_full_disk_is_noticed_before_anything_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = namedtuple("usage", "free")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(1000))
    with pytest.raises(InvalidParameterError, match=r"only 0 MiB are free in .* set TMPDIR"):
        write_gguf(build("llama"), tmp_path / "model.gguf")
    assert not (tmp_path / "model.gguf").exists()


def test_a_disk_that_fills_up_is_explained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(gguf.GGUFWriter, "write_tensor_data", full)
    with pytest.raises(InvalidParameterError, match="No space left on device; make room"):
        write_gguf(build("llama"), tmp_path / "model.gguf")


def test_without_the_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "gguf", None)
    with pytest.raises(SelfSpecError, match=r"needs gguf; run: pip install 'selfspec\[gguf\]'"):
        write_gguf(build("llama"), tmp_path / "model.gguf")


def test_the_temporary_folder_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with WeightsFile(build("llama"), 64) as weights:
        assert weights.path.is_file()
        assert weights.path.is_relative_to(tmp_path)
    assert list(tmp_path.iterdir()) == []

    def broken(*_: Any) -> None:
        raise RuntimeError("broken")

    monkeypatch.setattr(gguf_writer, "_add_config", broken)
    with pytest.raises(RuntimeError, match="broken"):
        WeightsFile(build("llama"), 64)
    assert list(tmp_path.iterdir()) == []
