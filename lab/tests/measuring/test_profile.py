"""The cost model: what ``selfspec profile`` measures, prints and keeps. Nothing here looks at a time."""

import dataclasses
import functools
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from typer.testing import CliRunner, Result

from helpers.checkpoints import save_checkpoint
from helpers.low_bit_model import random_model
from helpers.models import LAYERS, build
from selfspec import timing
from selfspec.cli.command_line import app
from selfspec.model.forward import Forward
from selfspec.runtimes.costs import store
from selfspec.runtimes.costs.parts import PartSeconds, measure_latencies, measure_parts
from selfspec.runtimes.precision import Precision
from selfspec.runtimes.target import Target
from selfspec_lab.measuring import StepBytes, keep_profile, measure_profile, part_bytes, read_profile


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr("selfspec_lab.measuring.bandwidth.CPU_COPY_BYTES", 2**16)
    monkeypatch.setattr("selfspec_lab.measuring.profile.ROW_COUNTS", (1, 4, 1024))
    few = functools.partial(measure_parts, contexts=(8, 64), repeats=1)
    monkeypatch.setattr("selfspec_lab.measuring.profile.measure_parts", few)
    return tmp_path / "cache"


def run(*arguments: str) -> Result:
    result: Any = CliRunner().invoke(app, ["profile", "--device", "cpu", *arguments])
    return result


class Counting(Target):
    """A target that runs nothing and notes the rows that it was to run; every row of a part takes a second."""

    def __init__(self) -> None:
        super().__init__(build("llama"))
        self.now = 0.0

    def embed(self, token_ids: torch.Tensor, forward: Forward | None = None) -> torch.Tensor:
        self.now += len(token_ids)
        return super().embed(token_ids, forward)

    def logits(self, hidden_states: torch.Tensor) -> torch.Tensor:
        self.now += len(hidden_states)
        return hidden_states

    def run(self, hidden_states: torch.Tensor, sublayers: Any, step: Any, capture: Any = ()) -> Any:
        assert len(hidden_states) == step.rows
        for index in sublayers:
            self.now += len(hidden_states) * (3.0 if index % 2 else 2.0 + step.parts[0].start)


def test_parts_are_measured_for_several_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    target = Counting()
    monkeypatch.setattr(timing, "time", SimpleNamespace(perf_counter=lambda: target.now))
    parts = measure_parts(target, contexts=(8, 64), rows=5)
    assert parts == PartSeconds((8, 64), (5 * 10.0, 5 * 66.0), 15.0, 5.0, 5.0)
    assert parts.attention_line == pytest.approx((5.0, 10.0))
    assert measure_parts(target, rows=64).contexts[-1] + 64 <= target.context_limit
    one = measure_latencies(target, contexts=(8, 64))
    assert (one.attention_per_token, one.mlp, one.head) == (pytest.approx(1.0), 3.0, 1.0)


def test_bytes_by_part() -> None:
    model: Any = build("llama-tied-biases")
    target = Target(model)
    sizes = part_bytes(target, StepBytes(target))
    total = sum(weight.nbytes for weight in model.parameters())
    assert sizes["attention"] + sizes["mlp"] + sizes["head"] == total
    assert sizes["embedding"] == 128 * 64 * 4
    assert sizes["slot"] == LAYERS * 2 * 2 * 16 * 4


def test_profile_is_complete() -> None:
    target = Target(build("llama"))
    said: list[str] = []
    profile = measure_profile(target, said.append)
    assert json.loads(json.dumps(profile, allow_nan=False)) == profile
    assert list(profile["rows"]) == ["1", "4"]
    for parts in profile["rows"].values():
        assert len(parts["contexts"]) == len(parts["attention"])
        assert all(parts[part] > 0 for part in ("mlp", "head", "rest", "attention_base"))
    assert profile["latencies"]["mlp"] == profile["rows"]["1"]["mlp"]
    for name in ("tokens_per_second", "bandwidth_fraction"):
        low, high = profile["plain"][f"{name}_spread"]
        assert 0 < low <= profile["plain"][name] <= high
    assert said[0] == "parts of a forward of 1 rows"


def test_a_kept_profile_is_found_again_for_the_same_model_alone(folder: Path) -> None:
    target = Target(build("llama"))
    latencies = measure_latencies(target, contexts=(8, 64))
    assert read_profile(target) is None
    path = keep_profile(target, {"latencies": latencies.to_dict()})
    assert path is not None
    assert path.is_relative_to(folder / "selfspec")
    assert [each.name for each in path.parent.iterdir()] == [path.name]
    assert store.read_latencies(Target(build("llama"))) == latencies
    for other in (Target(build("llama-ungrouped")), Target(build("llama"), "eager")):
        assert store.read_latencies(other) is None


def test_latencies_that_a_method_measured_are_remembered(folder: Path) -> None:
    """They do not count as a profile, replace its latencies, and go when a new profile is kept."""
    target = Target(build("llama"))
    latencies = measure_latencies(target, contexts=(8, 64), repeats=1)
    others = dataclasses.replace(latencies, mlp=2 * latencies.mlp)
    path = store.keep_latencies(target, latencies)
    assert path is not None
    assert path.is_relative_to(folder / "selfspec")
    assert store.read_latencies(Target(build("llama"))) == latencies
    assert read_profile(target) is None
    assert store.read_latencies(Target(build("llama"), "eager")) is None
    keep_profile(target, {"latencies": others.to_dict()})
    assert not path.exists()
    assert store.read_latencies(target) == others
    store.keep_latencies(target, latencies)
    assert store.read_latencies(target) == latencies
    path.write_text("{")
    assert store.read_latencies(target) == others


def test_latencies_of_low_bit_weights_are_kept_by_precision(folder: Path) -> None:
    target, precision = Target(random_model()), Precision.of(4)
    kept = store.kept_latencies(target, precision)
    assert store.kept_latencies(target, precision) == kept
    assert store.kept_latencies(target, Precision.of(8)) != kept
    files = list((folder / "selfspec").rglob("*.json"))
    assert len(files) == 2
    for file in files:
        file.write_text("{")
    assert store.kept_latencies(target, precision).mlp > 0
    assert store.read_latencies(target) is None, "those of low-bit weights are not the target's"


@pytest.mark.parametrize("damage", ["", "{", "[]", '{"key": {}}', '{"kept": {}}'])
def test_damaged_files_count_for_nothing(damage: str) -> None:
    target = Target(build("llama"))
    path = keep_profile(target, {"latencies": {}})
    assert path is not None
    assert store.read_latencies(target) is None  # no latencies in it
    path.write_text(damage)
    assert read_profile(target) is None


def test_a_folder_that_cannot_be_written_to_is_no_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert keep_profile(Target(build("llama")), {}) is None


def test_the_command_measures_once(tmp_path: Path) -> None:
    model = str(save_checkpoint(tmp_path / "model"))
    first, second = run("--model", model, "--json"), run("--model", model, "--json")
    assert first.exit_code == 0, first.stderr
    assert "saved in" in first.stderr
    assert "--refresh" in second.stderr
    assert first.stdout == second.stdout
    assert json.loads(first.stdout)["benchmark"] == "profile"
    text = run("--model", model).stdout
    assert "of the copy bandwidth" in text
    assert "attention" in text
    anew = run("--model", model, "--json", "--refresh")
    assert anew.stdout != first.stdout
    refused = run("--model", model, "--runtime", "magic")
    assert (refused.exit_code, refused.stdout) == (2, "")
