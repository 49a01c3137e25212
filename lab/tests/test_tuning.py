"""The search of Draft & Verify, which writes profiles, and ``selfspec tune``."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import Result

from helpers import commands
from helpers.models import LAYERS, SUBLAYERS, build, plain_text, prompt
from selfspec import Engine
from selfspec.errors import InvalidPromptError, MissingPackageError
from selfspec.methods import layer_search
from selfspec.methods.fixed import SelfSpec
from selfspec.methods.skipping import evenly_skipped
from selfspec.model.kept import KeptSet
from selfspec_lab import tuning
from selfspec_lab.tuning import Trial, check_request, read_prompts, tune

UNIFORM = evenly_skipped(LAYERS, 0.2)


def make_engine() -> tuple[Engine, SelfSpec]:
    engine = Engine(build("llama"), method="self-spec")
    assert isinstance(engine.method, SelfSpec)
    return engine, engine.method


def speed_of(skipped: tuple[int, ...]) -> float:
    """As if skipping sublayers 3, 5, 6 and 8 were fast and skipping any other slow."""
    return 20.0 + sum(5.0 if index in (3, 5, 6, 8) else -3.0 for index in skipped)


def trials(monkeypatch: pytest.MonkeyPatch, iterations: int, seed: int = 0) -> list[Trial]:
    monkeypatch.setattr(tuning, "_measure", lambda _, skipped, *__: Trial(skipped, speed_of(skipped), 1.0))
    return list(tune(make_engine()[0], ["text"], iterations=iterations, seed=seed))


def test_the_search_finds_the_fastest_set(monkeypatch: pytest.MonkeyPatch) -> None:
    found = trials(monkeypatch, 25)  # of 256 sets
    assert found[0].skipped == UNIFORM
    assert max(found, key=lambda trial: trial.tokens_per_second).skipped == (3, 5, 6, 8)
    assert len({len(trial.skipped) for trial in found}) > 3, "any number may be skipped"
    assert len({trial.skipped for trial in found}) == 25


def test_the_search_depends_on_its_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    assert trials(monkeypatch, 6) == trials(monkeypatch, 6) != trials(monkeypatch, 6, seed=1)


def test_the_search_weighs_deviations_as_the_authors_code_does(monkeypatch: pytest.MonkeyPatch) -> None:
    kappas = []
    original = layer_search.suggest_point

    def spied(*arguments: Any) -> Any:
        kappas.append(arguments[4])
        return original(*arguments)

    monkeypatch.setattr(layer_search, "suggest_point", spied)
    trials(monkeypatch, 4)
    assert kappas == [2.576] * 3


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    file = tmp_path / "prompts.txt"
    file.write_text("def double(number):\n\nclass Tree:\n", encoding="utf-8")
    return file


def run(model: str, prompts: Path, out: Path, *arguments: str, method: str = "self-spec") -> Result:
    options = ["--model", model, "--prompts", str(prompts), "--out", str(out), "--max-new-tokens", "12"]
    return commands.run("tune", method, *options, *arguments)


def test_tune_writes_a_profile_that_generates_losslessly(checkpoint: str, prompts: Path) -> None:
    out = prompts.with_name("profile")
    result = run(checkpoint, prompts, out, "--iterations", "4")
    assert result.exit_code == 0, result.stderr
    assert result.stdout == ""
    assert "4 sets measured" in result.stderr
    assert f"profile written to {out}" in result.stderr
    engine, method = make_engine()
    engine.load_state(out)
    assert method.profile.found["iterations"] == 4
    assert method.profile.found["tokens_per_second"] > 0
    assert {"selfspec", "torch", "transformers", "scikit-learn", "device"} == set(method.profile.found["versions"])
    generated = engine.generate(prompt(17), max_new_tokens=24)
    assert generated.token_ids == plain_text("llama", prompt(17), 24)
    assert {record.kept for record in generated.rounds} == {KeptSet.skipping(method.profile.skipped, SUBLAYERS)}
    assert generated.accepted > 0


def test_a_profile_starts_with_the_threshold_of_the_settings(checkpoint: str, prompts: Path) -> None:
    run(checkpoint, prompts, prompts.with_name("profile"), "--iterations", "2")
    engine, method = make_engine()
    engine.load_state(prompts.with_name("profile"))
    assert method.state().values["threshold"] == method.settings.threshold


@pytest.mark.parametrize(("measured", "code"), [(3, 130), (0, 130)], ids=["after some sets", "before any"])
def test_ctrl_c_keeps_the_best_so_far(
    checkpoint: str, prompts: Path, monkeypatch: pytest.MonkeyPatch, measured: int, code: int
) -> None:
    calls: list[tuple[int, ...]] = []

    def measure(_: Engine, skipped: tuple[int, ...], *__: Any) -> Trial:
        if len(calls) > measured:  # the first call warms up
            raise KeyboardInterrupt
        calls.append(skipped)
        return Trial(skipped, float(len(calls) == 3), 1.0)

    monkeypatch.setattr(tuning, "_measure", measure)
    out = prompts.with_name("profile")
    result = run(checkpoint, prompts, out, "--iterations", "9")
    assert result.exit_code == code
    assert "interrupted" in result.stderr
    assert out.exists() == bool(measured)
    if measured:
        engine, method = make_engine()
        engine.load_state(out)
        assert (method.profile.skipped, method.profile.found["iterations"]) == (calls[2], measured)


@pytest.mark.parametrize(
    ("content", "arguments", "message"),
    [
        (b" \n\n", (), "has no prompts"),
        (b"caf\xe9", (), "is not UTF-8: byte 0xe9 at offset 3"),
        (None, (), "cannot read prompts file"),
        (b"text", ("--iterations", "0"), "iterations must be at least 1, not 0"),
        (b"text", ("--max-new-tokens", "1"), "max_new_tokens must be at least 2"),
        (b"text", ("--out", "missing/profile"), "there is no folder 'missing'"),
        (b"text", ("--out", "."), "is a folder"),
    ],
)
def test_bad_input_is_refused_before_a_model_is_loaded(
    tmp_path: Path, content: bytes | None, arguments: tuple[str, ...], message: str
) -> None:
    prompts = tmp_path / "prompts.txt"
    if content is not None:
        prompts.write_bytes(content)
    result = run("./no-such-model", prompts, tmp_path / "profile", *arguments)
    assert result.exit_code == 2
    assert message in result.stderr
    assert "Traceback" not in result.stderr


def test_only_self_spec_is_tuned(prompts: Path) -> None:
    result = run("./no-such-model", prompts, prompts.with_name("profile"), method="swift")
    assert result.exit_code == 2
    assert "'swift' has no profile to tune" in result.stderr


def test_prompts_of_json_lines(tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    texts = ["two\nlines", "a line\u2028separator", "last"]
    lines = [json.dumps({"prompt": text, "id": index}, ensure_ascii=False) for index, text in enumerate(texts)]
    file.write_bytes("\r\n\r\n".join(lines).encode())
    assert read_prompts(file) == texts
    for line, message in (("{", "is not JSON"), ('{"text": "a"}', "has no prompt"), ('["a"]', "has no prompt")):
        file.write_text(f"{lines[0]}\n{line}\n", encoding="utf-8")
        with pytest.raises(InvalidPromptError, match=f"line 2 of .*{message}"):
            read_prompts(file)


def test_prompts_of_plain_lines(prompts: Path) -> None:
    assert read_prompts(prompts) == ["def double(number):", "class Tree:"]


def test_tune_measures_uniform_skipping_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "sklearn"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "sklearn", None)
    check_request("self-spec", 1, 8, tmp_path / "profile")
    with pytest.raises(MissingPackageError, match=r"selfspec\[search\]"):
        check_request("self-spec", 2, 8, tmp_path / "profile")
