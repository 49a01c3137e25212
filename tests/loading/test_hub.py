"""Models on the hub without a network: nothing is waited for, and what was downloaded before is loaded."""

import json
import shutil
import socket
import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import constants
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from helpers.mtp_checkpoints import save_with_head
from selfspec import errors, load_model
from selfspec.loading import find_gguf_file, hub, load_config
from selfspec.loading.adapter_files import read_adapter
from selfspec.loading.hub import reaching_hub
from selfspec.model.mtp_modules import read_mtp

NAME = "someone/some-model"
COMMIT = "0123456789abcdef" * 2 + "01234567"


@pytest.fixture
def closed_port(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """A hub that refuses every connection, and an empty cache of downloads; requests to it would fail the test."""
    with closing(socket.socket()) as taken:
        taken.bind(("127.0.0.1", 0))
        monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{taken.getsockname()[1]}")
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(hub, "getproxies", dict)
        monkeypatch.setattr("time.sleep", _refuse_to_wait)
        yield


def _refuse_to_wait(seconds: float) -> None:
    pytest.fail(f"waited {seconds} seconds for a hub that cannot be reached")


@pytest.fixture
def downloaded(closed_port: None, checkpoint: str, tmp_path: Path) -> Path:
    """The model's files where the hub's client keeps them."""
    return keep(checkpoint, tmp_path)


def keep(checkpoint: str | Path, tmp_path: Path) -> Path:
    """A folder as a model of the hub that was downloaded."""
    kept = tmp_path / "cache" / "models--someone--some-model"
    shutil.copytree(checkpoint, kept / "snapshots" / COMMIT)
    (kept / "refs").mkdir()
    (kept / "refs" / "main").write_text(COMMIT)
    return kept


def test_a_downloaded_model_loads_at_once_without_a_network(downloaded: Path) -> None:
    model, tokenizer = load_model(NAME, device="cpu")
    assert model.num_parameters() > 0
    assert tokenizer.encode("abc")
    assert load_config(NAME).model_type == model.config.model_type
    assert not constants.is_offline_mode(), "the next load asks the hub again"


@pytest.mark.parametrize("name", [NAME, f"{NAME}:Q4_K_M"])
def test_without_a_network_a_model_that_is_not_there_fails_at_once(closed_port: None, name: str) -> None:
    with pytest.raises(errors.ModelLoadError, match=r"127\.0\.0\.1:\d+") as raised:
        load_model(name, device="cpu")
    assert "to disable it" not in str(raised.value).lower()
    assert not constants.is_offline_mode()


def test_without_a_network_a_file_and_an_adapter_say_what_is_missing(closed_port: None) -> None:
    with pytest.raises(errors.ModelLoadError, match=r"cannot be reached"):
        find_gguf_file(f"{NAME}:Q4_K_M")
    with pytest.raises(errors.AdapterError, match=r"cannot download .* cannot be reached"):
        read_adapter("tone", "someone/some-adapter")


def test_a_name_that_takes_long_to_look_up_is_not_waited_for(
    closed_port: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    released = threading.Event()

    def look_up(*_: Any, **__: Any) -> None:
        released.wait()
        raise OSError("no such name")

    monkeypatch.setattr(hub, "SECONDS", 0.05)
    monkeypatch.setattr(socket, "create_connection", look_up)
    with reaching_hub():
        assert constants.is_offline_mode()
    released.set()


def test_a_host_that_needs_no_proxy_is_no_proxy(closed_port: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub, "getproxies", lambda: {"no": "localhost", "ftp": "http://proxy"})
    with reaching_hub():
        assert constants.is_offline_mode()


def test_a_head_that_was_downloaded_is_read_without_asking_the_hub(closed_port: None, tmp_path: Path) -> None:
    folder = save_with_head("glm4_moe", tmp_path / "model")
    part = (folder / "model.safetensors").rename(folder / "model-00001-of-00001.safetensors")
    index = {"metadata": {}, "weight_map": dict.fromkeys(load_file(part), part.name)}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    kept = keep(folder, tmp_path)
    with reaching_hub():
        model = AutoModelForCausalLM.from_pretrained(NAME)
    assert read_mtp(model).projection.weight.isfinite().all()
    (kept / "refs" / "main").unlink()
    with pytest.raises(errors.SelfSpecError, match="multi-token-prediction head"), reaching_hub():
        read_mtp(model)


def test_a_hub_that_answers_is_asked(closed_port: None, monkeypatch: pytest.MonkeyPatch) -> None:
    with closing(socket.create_server(("127.0.0.1", 0))) as listening:
        monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{listening.getsockname()[1]}")
        with reaching_hub():
            assert not constants.is_offline_mode()


@pytest.mark.parametrize("kept", [True, False])
def test_behind_a_proxy_and_offline_by_choice_nothing_is_tried(
    closed_port: None, monkeypatch: pytest.MonkeyPatch, kept: bool
) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", kept)
    monkeypatch.setattr(hub, "getproxies", lambda: {"http": "http://proxy"})
    tried: list[Any] = []
    monkeypatch.setattr(socket, "create_connection", lambda *found, **_: tried.append(found))
    with reaching_hub():
        assert constants.is_offline_mode() is kept
    assert constants.is_offline_mode() is kept
    assert not tried
