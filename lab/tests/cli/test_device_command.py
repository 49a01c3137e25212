"""The command ``selfspec bench device``, on a CPU, which is a device too."""

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from helpers.checkpoints import save_checkpoint
from selfspec.cli.command_line import app
from selfspec_lab.bench import options


def run(*arguments: str) -> Result:
    result: Any = CliRunner().invoke(app, ["bench", "device", *arguments])
    return result


@pytest.fixture
def out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the report goes."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "device.json"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--minutes", "0"), "minutes must be above 0, not 0.0"),
        (("--methods", "layerskp"), "did you mean 'layerskip'?"),
        (("--device", "nonsense"), "device 'nonsense' cannot be used"),
        (("--out", "."), "--out '.' is a folder"),
    ],
)
def test_mistakes_are_found_before_the_model_is_loaded(
    arguments: tuple[str, ...], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(options, "load_model", lambda *_, **__: pytest.fail("the model was loaded"))
    result = run(*arguments)
    assert (result.exit_code, result.stdout) == (2, "")
    assert message in result.stderr


def test_the_report_of_a_device(out: Path, tmp_path: Path) -> None:
    checkpoint = save_checkpoint(tmp_path / "model")
    options = ("--methods", "auto,layerskip", "--repeats", "2", "--max-new-tokens", "8", "--out", str(out))
    result = run("--model", str(checkpoint), *options)
    assert result.exit_code == 0, result.stderr
    report = json.loads(out.read_text(encoding="utf-8"))
    assert report["device"]["type"] == report["device"]["name"] == "cpu"
    assert report["stamp"]["versions"]["torch"]
    trial = report["trial"]
    assert not trial["chose_the_runtime"]
    assert {each["name"]: each["reason"] for each in trial["runtimes"]}["eager"] is None
    assert any(line.endswith("(chosen)") for line in trial["lines"].values())
    assert set(report["row_seconds"]) == {"own", "8 bits", "4 bits"}
    assert all(seconds > 0 for seconds in report["row_seconds"]["own"].values())
    assert report["repeats_done"] == 2
    assert report["transformers"]["identical"] is True
    for figures in (report["plain"], report["transformers"], *report["methods"].values()):
        assert figures["tokens_per_second"] > 0
    for name in ("auto", "layerskip"):
        figures = report["methods"][name]
        assert (figures["error"], figures["identical"], figures["texts"]) == (None, True, 6)
        assert sum(figures["drafted_by"].values()) > 0
    assert report["methods"]["layerskip"]["acceptance_rate"] > 0
    assert "autoregressive: " in result.stdout
    assert "has the whole report" in result.stdout


def test_what_has_no_time_is_said_so(out: Path, tmp_path: Path) -> None:
    checkpoint = save_checkpoint(tmp_path / "model")
    options = ("--methods", "auto", "--minutes", "0.0001", "--max-new-tokens", "4", "--out", str(out), "--json")
    result = run("--model", str(checkpoint), *options)
    assert result.exit_code == 0, result.stderr
    report = json.loads(result.stdout)
    assert report == json.loads(out.read_text(encoding="utf-8"))
    assert report["repeats_done"] == 0
    assert report["plain"]["tokens_per_second"] is None
    assert report["methods"]["auto"]["error"] == "there was no time for it"
