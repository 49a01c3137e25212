"""Adapters in folders: which are read, and which are refused by name before a model is loaded."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from helpers.adapters import adapted, lora, native, peft, save
from helpers.models import build
from selfspec import Engine
from selfspec.errors import AdapterError, InvalidParameterError
from selfspec.loading.adapter_files import CONFIG, WEIGHTS, AdapterFiles, name_adapters, read_adapter

TASK = "CAUSAL_LM"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An adapter of a few layers."""
    return save(adapted(native("llama"), lora(4, ["q_proj", "up_proj"])), tmp_path_factory.mktemp("adapter"))


def changed(folder: Path, to: Path, change: Callable[[dict[str, Any]], None]) -> Path:
    """A copy of an adapter with another config."""
    shutil.copytree(folder, to)
    config = json.loads((to / CONFIG).read_text())
    change(config)
    (to / CONFIG).write_text(json.dumps(config))
    return to


def test_factors_and_scales_are_read(folder: Path) -> None:
    files = read_adapter("a", folder)
    down, up, scale = files.factors["model.layers.1.self_attn.q_proj"]
    assert (tuple(down.shape), tuple(up.shape), scale) == ((4, 128), (128, 4), 2.0)
    assert len(files.factors) == 12


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (lora(4, ["q_proj"], use_dora=True), r"'a' scales weights by their norms \(DoRA\)"),
        (lora(4, ["q_proj"], modules_to_save=["lm_head"]), "'a' replaces whole modules"),
        (
            lora(4, ["embed_tokens"]),
            "'a' changes 'model.embed_tokens.base_layer.weight', which is no factor of a linear layer",
        ),
        (lora(4, ["lm_head"]), "'a' changes 'lm_head.base_layer.weight'"),
        (lora(4, ["q_proj"], bias="lora_only"), "'a' has biases"),
        (lora(4, ["q_proj"], alora_invocation_tokens=[3]), "'a' begins at certain tokens"),
        (peft.IA3Config(task_type=TASK), "'a' is of type IA3, and only LORA"),
        (peft.PromptTuningConfig(num_virtual_tokens=4, task_type=TASK), "'a' is of type PROMPT_TUNING"),
    ],
    ids=["dora", "modules_to_save", "embedding", "head", "bias", "alora", "ia3", "prompt"],
)
def test_other_kinds_are_refused(config: Any, message: str, tmp_path: Path) -> None:
    made = adapted(build("llama-tied-biases"), config)
    with pytest.raises(AdapterError, match=message):
        read_adapter("a", save(made, tmp_path))


def test_an_adapter_that_changes_the_weights_is_refused(folder: Path, tmp_path: Path) -> None:
    given = changed(folder, tmp_path / "a", lambda config: config.update(init_lora_weights="pissa"))
    with pytest.raises(AdapterError, match=r"changes the model's weights \(init_lora_weights 'pissa'\)"):
        read_adapter("a", given)


def test_an_adapter_of_other_shapes_is_refused(folder: Path) -> None:
    with pytest.raises(AdapterError, match=r"'a' is of another model: for 'model.layers.0.*', which has 64 inputs"):
        Engine(build("llama"), adapters={"a": folder})


def test_a_model_by_another_name_is_refused_where_both_are_names_on_the_hub(folder: Path) -> None:
    files = read_adapter("a", folder)
    named = [AdapterFiles("a", base, files.factors, files.digest) for base in ("one/big-7B", "two/Big-7b", "one/other")]
    model: Any = native("llama")
    before, model.config._name_or_path = model.config._name_or_path, "owner/big-7b"
    try:
        assert all(list(Engine(model, adapters={"a": each}).adapters) == ["a"] for each in named[:2])
        with pytest.raises(AdapterError, match="is of the model 'one/other', and this is 'owner/big-7b'"):
            Engine(model, adapters={"a": named[2]})
    finally:
        model.config._name_or_path = before


def test_a_model_whose_layers_run_by_their_own_modules_has_no_adapters(folder: Path) -> None:
    with pytest.raises(AdapterError, match="only attention and MLPs that run as fused blocks"):
        Engine(native("llama"), runtime="eager", adapters={"a": folder})


@pytest.mark.parametrize("file", [CONFIG, WEIGHTS])
def test_missing_and_corrupt_files(folder: Path, file: str, tmp_path: Path) -> None:
    given = tmp_path / "a"
    shutil.copytree(folder, given)
    (given / file).write_bytes(b"{")
    with pytest.raises(AdapterError, match=f"cannot read adapter 'a' from '{given}'"):
        read_adapter("a", given)
    (given / file).unlink()
    with pytest.raises(AdapterError, match=f"'{given}' has no {file}"):
        read_adapter("a", given)


def test_half_an_adapter(folder: Path, tmp_path: Path) -> None:
    given = tmp_path / "a"
    shutil.copytree(folder, given)
    tensors: dict[str, torch.Tensor] = load_file(given / WEIGHTS)
    tensors.pop("base_model.model.model.layers.3.mlp.up_proj.lora_B.weight")
    save_file(tensors, given / WEIGHTS)
    with pytest.raises(AdapterError, match=r"only one factor of 'model.layers.3.mlp.up_proj'"):
        read_adapter("a", given)


def test_no_folder() -> None:
    with pytest.raises(AdapterError, match="adapter 'a': there is no folder '/no/such/adapter'"):
        read_adapter("a", "/no/such/adapter")


def test_factors_stay_when_the_file_is_written_again(folder: Path, tmp_path: Path) -> None:
    """As by a training that goes on; a chat that changes its method fits them to the model again."""
    given = shutil.copytree(folder, tmp_path / "a")
    down, up, _ = read_adapter("a", given).factors["model.layers.1.self_attn.q_proj"]
    before = down.clone(), up.clone()
    content = (given / WEIGHTS).read_bytes()
    with (given / WEIGHTS).open("r+b") as file:  # in place, as safetensors writes
        file.seek(len(content) // 8)
        file.write(bytes(len(content) - len(content) // 8))
    assert torch.equal(down, before[0])
    assert torch.equal(up, before[1])


def test_a_folder_of_the_home_folder(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As for a model: of NAME=~/DIR not every shell expands the folder."""
    monkeypatch.setenv("HOME", str(folder.parent))
    assert read_adapter("a", f"~/{folder.name}").digest == read_adapter("a", folder).digest
    with pytest.raises(AdapterError, match="cannot read adapter 'a' from '~no-such-user/a'"):
        read_adapter("a", "~no-such-user/a")


def test_names_on_the_command_line(tmp_path: Path) -> None:
    strange = tmp_path / "x=y"
    strange.mkdir()
    given = ["fr=/adapters/french", "/adapters/law/", "owner/medicine", str(strange)]
    assert name_adapters(given) == {
        "fr": "/adapters/french",
        "law": "/adapters/law/",
        "medicine": "owner/medicine",
        "x=y": str(strange),
    }
    with pytest.raises(InvalidParameterError, match="two adapters have the name 'law'"):
        name_adapters(["/a/law", "/b/law"])
    with pytest.raises(InvalidParameterError, match=r"--adapter takes DIR or NAME=DIR, not '=/a'"):
        name_adapters(["=/a"])
