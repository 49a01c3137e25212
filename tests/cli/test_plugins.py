"""Commands and checkpoints of other packages: found by entry points, and what is said where they are missing."""

import sys
from collections.abc import Iterator
from importlib.metadata import EntryPoint, EntryPoints
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from selfspec.cli import plugins
from selfspec.cli.command_line import app
from selfspec.errors import ModelLoadError
from selfspec.loading import bundled_models, catalog, resolve_name
from selfspec.methods import registry
from selfspec.methods.registry import LAB_METHODS

MODULE = '''
import typer

def greet(name: str, loud: bool = False) -> None:
    """Prints a greeting."""
    typer.echo(f"HELLO {name}" if loud else f"hello {name}")

several = typer.Typer(help="Several greetings.")
several.command()(greet)
several.command("bye")(lambda: typer.echo("bye"))
CHECKPOINT = "somewhere"
'''


def install(monkeypatch: pytest.MonkeyPatch, **groups: dict[str, str]) -> None:
    """Makes these the only entry points of the three groups."""
    for module, group in ((plugins, "commands"), (catalog, "models"), (registry, "methods")):
        found = EntryPoints(EntryPoint(name, value, group) for name, value in groups.get(group, {}).items())
        monkeypatch.setattr(module, "entry_points", lambda *, group, found=found: found)


@pytest.fixture(autouse=True)
def _fresh_checkpoints(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Entry points are looked up anew, and a module with commands can be imported."""
    (tmp_path / "greetings.py").write_text(MODULE)
    (tmp_path / "broken_greetings.py").write_text("import a_package_that_nobody_has")
    monkeypatch.syspath_prepend(tmp_path)
    bundled_models.cache_clear()
    yield
    bundled_models.cache_clear()
    for name in ("greetings", "broken_greetings"):
        sys.modules.pop(name, None)


def run(*arguments: str) -> Result:
    result: Any = CliRunner().invoke(app, list(arguments))
    return result


def test_a_function_and_an_application_become_commands(monkeypatch: pytest.MonkeyPatch) -> None:
    commands = {"greet": "greetings:greet", "greetings": "greetings:several", "models greet": "greetings:greet"}
    install(monkeypatch, commands=commands)
    assert "Prints a greeting." in run("--help").stdout
    assert run("greet", "you", "--loud").stdout == "HELLO you\n"
    assert run("greetings", "bye").stdout == "bye\n"
    assert run("models", "greet", "you").stdout == "hello you\n"
    assert "greet" in run("models", "--help").stdout


def test_own_commands_cannot_be_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, commands={"methods": "greetings:greet"})
    assert "autoregressive" in run("methods").stdout
    assert "Prints a greeting." not in run("--help").stdout


@pytest.mark.parametrize(
    "arguments",
    [
        ("bench",),
        ("bench", "run", "--out", "x"),
        ("experiments", "list"),
        ("demo",),
        ("inspect", "Why?"),
        ("models", "widen", "a", "b"),
        ("profile",),
        ("tune", "self-spec"),
    ],
)
def test_commands_of_the_laboratory_say_what_to_install(
    arguments: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    install(monkeypatch)
    result = run(*arguments)
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.startswith("error: ")
    assert "pip install ./lab" in result.stderr
    assert result.stderr.count("\n") == 1
    assert run("--help").exit_code == 0


@pytest.mark.parametrize("method", LAB_METHODS)
def test_methods_of_the_laboratory_say_what_to_install(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch)
    result = run("generate", "abc", "--model", "./no-such-model", "--method", method)
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr == (
        f"error: the method '{method}' is part of selfspec-lab; run `pip install ./lab` in a checkout of selfspec\n"
    )


@pytest.mark.parametrize("name", ["tiny", "tiny-early-exit"])
def test_checkpoints_of_the_laboratory_say_what_to_install(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch)
    with pytest.raises(ModelLoadError, match=r"pip install \./lab"):
        resolve_name(name)
    result = run("generate", "abc", "--model", name)
    assert (result.exit_code, result.stdout) == (2, "")
    assert "pip install ./lab" in result.stderr
    assert result.stderr.count("\n") == 1


@pytest.mark.parametrize("value", ["broken_greetings:greet", "greetings:nothing", "no_such_module:greet"])
def test_a_command_that_cannot_be_loaded_is_listed_with_its_error(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, commands={"greet": value, "greetings": "greetings:several"})
    listed = run("--help")
    assert listed.exit_code == 0
    assert "Cannot be loaded" in listed.stdout
    assert "Several greetings." in listed.stdout
    result = run("greet", "you", "--loud")
    assert (result.exit_code, result.stdout) == (2, "")
    assert "the command 'greet' of another package cannot be loaded" in result.stderr
    assert "Error: " in result.stderr
    assert result.stderr.count("\n") == 1
    assert run("greetings", "bye").stdout == "bye\n"


def test_a_checkpoint_that_cannot_be_loaded_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "folders.py").write_text(f"from pathlib import Path\nWHOLE = Path({str(tmp_path)!r})")
    install(monkeypatch, models={"whole": "folders:WHOLE", "broken": "broken_greetings:CHECKPOINT"})
    assert bundled_models() == {"whole": tmp_path}
    assert "the checkpoint broken" in caplog.text
    assert "a_package_that_nobody_has" in caplog.text
    assert resolve_name("whole") == tmp_path
