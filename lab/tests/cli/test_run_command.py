"""The command ``selfspec bench run`` and its progress."""

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from helpers.checkpoints import save_checkpoint
from selfspec.cli.command_line import app
from selfspec_lab.bench.run.measurement import Measurement
from selfspec_lab.cli.bench_progress import RunningSpeedups


def line(candidate: str, seconds: float, key: str = "a", tokens: int = 11, error: str | None = None) -> Measurement:
    return Measurement(key, "a", candidate, 0, 0, 0, error, 5, tuple(range(tokens)), True, 0.1, seconds)


def test_running_speedups_pair_prompts() -> None:
    running = RunningSpeedups()
    running.add(line("x", 1.0))
    assert running.speedups == {}
    running.add(line("autoregressive", 2.0))
    assert running.speedups == {"x": 2.0}
    running.add(line("y", 4.0))
    running.add(line("x", 1.0, key="b"))
    running.add(line("autoregressive", 1.0, key="b"))
    running.add(line("z", 1.0, error="broken"))
    assert running.speedups == pytest.approx({"x": 1.5, "y": 0.5})


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--methods", "layerskp"), "did you mean 'layerskip'?"),
        (("--peers", "vllm"), "there is no peer 'vllm'"),
        (("--suite", "minni"), "did you mean 'mini'?"),
        (("--suite", "gsm8k:nowhere.jsonl"), "nowhere.jsonl"),
        (("--limit", "0"), "limit"),
        (("--peers", "llama-cpp", "--temperature", "0.5"), "the peer llama-cpp cannot be measured: "),
        (("--temperature", "-1"), "temperature must be a finite number of at least 0"),
        (("--temperature", "nan"), "temperature must be"),
        (("--context", "0"), "context must be at least 1 token"),
        (("--repeats", "0"), "repeats must be at least 1"),
        (("--set", "layerskip.exit_layr=3"), "did you mean 'exit_layer'?"),
        (("--resume", "--overwrite"), "choose one"),
        (("--out", "file.txt"), "is a file; name a folder"),
        (("--out", "file.txt/below"), "which is a file; name another folder"),
    ],
)
def test_mistakes_are_found_before_the_model_is_loaded(
    arguments: tuple[str, ...], message: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def load(*_: Any, **__: Any) -> Any:
        raise AssertionError("loaded a model")

    monkeypatch.setattr("selfspec_lab.bench.options.load_model", load)
    monkeypatch.chdir(tmp_path)
    Path("file.txt").write_text("x")
    out = () if "--out" in arguments else ("--out", "out")
    result: Any = CliRunner().invoke(app, ["bench", "run", *out, *arguments])
    assert result.exit_code == 2, result.output
    assert message in result.output
    assert result.output.count("\n") == 1


def test_the_command_measures_writes_a_report_and_compares(tmp_path: Path) -> None:
    model = save_checkpoint(tmp_path / "model")
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("def f(x):\nOnce upon a time\n")

    def run(out: str, *more: str) -> Any:
        command = ["bench", "run", "--model", str(model), "--suite", f"prompts:{prompts}", "--methods", "uniform"]
        rest = ["--max-new-tokens", "8", "--repeats", "1", "--out", str(tmp_path / out), "--device", "cpu"]
        return CliRunner().invoke(app, [*command, *rest, *more])

    first: Any = run("first", "--peers", "none")
    assert first.exit_code == 0, first.output
    for name in ("run.json", "results.jsonl", "summary.json", "report.md", "report.html"):
        assert (tmp_path / "first" / name).stat().st_size > 0
    summary = json.loads((tmp_path / "first" / "summary.json").read_text(encoding="utf-8"))
    assert summary["candidates"]["uniform"]["overall"]["speedup"] > 0
    assert summary["candidates"]["uniform"]["overall"]["acceptance_rate"] > 0
    assert run("first", "--peers", "none").exit_code == 2
    assert run("second").exit_code == 0
    compared: Any = CliRunner().invoke(app, ["bench", "report", str(tmp_path / "first"), str(tmp_path / "second")])
    assert compared.exit_code == 0, compared.output
    assert "uniform" in compared.output
    (tmp_path / "first" / "report.md").unlink()
    again: Any = CliRunner().invoke(app, ["bench", "report", str(tmp_path / "first")])
    assert again.exit_code == 0, again.output
    assert (tmp_path / "first" / "report.md").is_file()
