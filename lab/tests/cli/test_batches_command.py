"""The command ``selfspec bench batches``."""

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from helpers.checkpoints import save_checkpoint
from selfspec.cli.command_line import app
from selfspec_lab.bench import options


def run(*arguments: str) -> Result:
    result: Any = CliRunner().invoke(app, ["bench", "batches", *arguments])
    return result


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--sizes", "1,x"), "--sizes takes whole numbers separated by commas, not '1,x'"),
        (("--sizes", "0"), "sizes are numbers of prompts, 1 or more"),
        (("--methods", "layerskp"), "did you mean 'layerskip'?"),
        (("--repeats", "0"), "repeats must be at least 1, not 0"),
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


def test_batches_of_a_tiny_model(tmp_path: Path) -> None:
    checkpoint = save_checkpoint(tmp_path / "model")
    out = tmp_path / "report.json"
    options = ("--methods", "layerskip", "--sizes", "1,3", "--repeats", "2", "--max-new-tokens", "6", "--out", str(out))
    result = run("--model", str(checkpoint), *options)
    assert result.exit_code == 0, result.stderr
    report = json.loads(out.read_text(encoding="utf-8"))
    assert set(report["batches"]) == {"autoregressive", "layerskip"}
    for figures in report["batches"].values():
        assert set(figures) == {"1", "3"}
        for each in figures.values():
            assert each["identical"]
            low, high = each["tokens_per_second_spread"]
            assert 0 < low <= each["tokens_per_second"] <= high
            low, high = each["over_plain_spread"]
            assert 0 < low <= each["over_plain"] <= high
    assert report["batches"]["autoregressive"]["1"]["speedup"] == 1.0
    assert report["batches"]["autoregressive"]["3"]["over_plain"] == 1.0
    assert report["batches"]["layerskip"]["3"]["over_plain_spread"] != [1.0, 1.0]
    assert report["batches"]["layerskip"]["3"]["acceptance_rate"] > 0
