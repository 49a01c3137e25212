"""The command ``selfspec bench overhead`` and its options."""

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from helpers.checkpoints import save_checkpoint
from helpers.models import build
from selfspec.cli.command_line import app
from selfspec.errors import InvalidSettingError
from selfspec_lab.bench import options
from selfspec_lab.cli.bench_options import parse_method_settings, parse_names


def run(*arguments: str) -> Result:
    result: Any = CliRunner().invoke(app, ["bench", "overhead", *arguments])
    return result


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--methods", "layerskp"), "did you mean 'layerskip'?"),
        (("--methods", "uniform,"), "there is no method ''"),
        (("--repeats", "0"), "repeats must be at least 1, not 0"),
        (("--max-new-tokens", "1"), "max_new_tokens must be at least 2"),
        (("--force-acceptance", "1.5"), "must be from 0 to 1, not 1.5"),
        (("--force-acceptance", "nan"), "must be from 0 to 1, not nan"),
        (("--widen", "0"), "whole number from 1 to 64"),
        (("--dtype", "float63"), "unknown dtype 'float63'"),
        (("--device", "gpu"), "device 'gpu' cannot be used"),
        (("--runtime", "magic"), "there is no runtime 'magic'"),
        (("--out", "nowhere/result.json"), "the folder of --out 'nowhere/result.json' is missing"),
        (("--out", "."), "--out '.' is a folder"),
        (("--set", "exit_layer=3"), "--set takes METHOD.KEY=VALUE"),
        (("--set", "layerskip.exit_layr=3"), "did you mean 'exit_layer'?"),
        (("--set", "layerskip.exit_layer=0"), "exit_layer must be at least 1"),
        (("--set", "nothing.exit_layer=3"), "there is no method 'nothing'"),
        (("--methods", "uniform", "--set", "layerskip.exit_layer=3"), "not among the methods to measure"),
    ],
)
def test_mistakes_are_found_before_the_model_is_loaded(
    arguments: tuple[str, ...], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(options, "load_model", lambda *_, **__: pytest.fail("the model was loaded"))
    result = run(*arguments)
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.startswith("error: ")
    assert message in result.stderr
    assert result.stderr.count("\n") == 1


def test_settings_of_several_methods() -> None:
    cascade = "cascade(suffix, low-bit)"
    assert parse_names(f"suffix,{cascade} , low-bit") == ("suffix", cascade, "low-bit")
    assert parse_method_settings([f"{cascade}.nested=true", f"{cascade}.low-bit.group=64"]) == {
        cascade: {"nested": "true", "low-bit.group": "64"}
    }
    assert parse_method_settings(["a.x=1", "b.y=2.5", "a.z=c.d=e"]) == {
        "a": {"x": "1", "z": "c.d=e"},
        "b": {"y": "2.5"},
    }
    assert parse_method_settings(["my.own:Method.x=1"]) == {"my.own:Method": {"x": "1"}}
    for wrong in (["x=1"], [".x=1"], ["a.=1"], ["a.x"], ["a.x=1", "a.x=2"]):
        with pytest.raises(InvalidSettingError):
            parse_method_settings(wrong)


def test_the_command_writes_json_to_stdout_and_to_a_file(tmp_path: Path) -> None:
    model, out = str(save_checkpoint(tmp_path / "model")), tmp_path / "result.json"
    measured = ("--model", model, "--device", "cpu", "--repeats", "1", "--max-new-tokens", "4", "--no-compile")
    result = run(*measured, "--methods", "layerskip", "--widen", "2", "--json", "--out", str(out))
    assert result.exit_code == 0, result.stderr
    report = json.loads(result.stdout)
    assert json.loads(out.read_text()) == report
    assert report["options"]["widen"] == 2
    assert report["options"]["parameters"] > 2 * sum(weight.numel() for weight in build("llama").parameters())
    assert "repeat 1 of 1, prompt 3 of 3" in result.stderr


def test_the_command_says_what_failed(tmp_path: Path) -> None:
    model = str(save_checkpoint(tmp_path / "model"))
    measured = ("--model", model, "--device", "cpu", "--repeats", "1", "--max-new-tokens", "4", "--no-compile")
    result = run(*measured, "--methods", "layerskip", "--set", "layerskip.exit_layer=6")
    assert result.exit_code == 1
    assert "exit layer 6 is out of range" in " ".join(result.stdout.split())
    assert result.stderr.endswith("failed: layerskip\n")
