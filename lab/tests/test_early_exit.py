"""Early exits for a model of one's own: the exit comes nearer to the last layer, which stays as it was."""

import copy
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from typer.testing import CliRunner, Result

from helpers.checkpoints import save_checkpoint
from helpers.models import LAYERS, VOCABULARY, build, prompt
from selfspec import Engine, load_model
from selfspec.errors import InvalidParameterError, ModelLoadError, UnsupportedModelError
from selfspec_lab.cli.train import train
from selfspec_lab.training.early_exit import EarlyExit, ExitTraining
from selfspec_lab.training.progress import Point, train_resumable

TRAINING = ExitTraining(2, steps=60, rows=4, length=32, rank=16, rate=5e-3, dropout=0.05)
TOKENS = torch.randint(VOCABULARY, (96,), generator=torch.Generator().manual_seed(0))
"""Few enough to be learned by heart."""


def logits(model: Any, token_ids: list[int]) -> torch.Tensor:
    with torch.inference_mode():
        scores: torch.Tensor = model(torch.tensor([token_ids]), use_cache=False).logits[0]
    return scores


def test_the_exit_learns_what_the_last_layer_chooses() -> None:
    original: Any = build("llama")
    exits = EarlyExit(copy.deepcopy(original), TRAINING)
    before, losses = exits.measure(TOKENS), []
    assert torch.equal(logits(exits.model, prompt(20)), logits(original, prompt(20)))
    exits.train(TOKENS, lambda _, loss: losses.append(loss))
    assert len(losses) == TRAINING.steps
    assert sum(losses[-5:]) < 0.7 * sum(losses[:5])
    after = exits.measure(TOKENS)
    assert after["agreement"] > before["agreement"] + 0.1
    assert after["perplexity"] < 1.2 * before["perplexity"]
    with exits.unchanged():
        torch.testing.assert_close(logits(exits.model, prompt(20)), logits(original, prompt(20)))
    changed = logits(exits.model, prompt(20))
    merged = exits.merge()
    torch.testing.assert_close(logits(merged, prompt(20)), changed)
    assert not torch.allclose(changed, logits(original, prompt(20)))


def train_steps(model: Any, work: Path | None, report: Callable[[Point], None] = lambda _: None) -> EarlyExit:
    """A short training of a copy of a model, measured every second step."""
    exits = EarlyExit(copy.deepcopy(model), replace(TRAINING, steps=6, rows=2))
    train_resumable(exits, TOKENS, TOKENS, 2, work, report)
    return exits


def test_an_interrupted_training_ends_as_one_that_was_not(tmp_path: Path) -> None:
    model = build("llama")

    def interrupt(point: Point) -> None:
        if point["step"] == 4:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train_steps(model, tmp_path, interrupt)
    seen: list[Point] = []
    resumed, whole = train_steps(model, tmp_path, seen.append), train_steps(model, None)
    assert [point["step"] for point in seen] == [6]
    for name, change in whole.changes.items():
        assert torch.equal(change.up, resumed.changes[name].up)
        assert change.up.any()
    points = [json.loads(line) for line in (tmp_path / "curve.jsonl").read_text(encoding="utf-8").splitlines()]
    assert [point["step"] for point in points] == [0, 2, 4, 6]
    assert points[-1]["tokens"] == 6 * 2 * TRAINING.length
    other = EarlyExit(copy.deepcopy(model), replace(TRAINING, rank=4))
    with pytest.raises(InvalidParameterError, match="of another model or --rank"):
        train_resumable(other, TOKENS, TOKENS, 2, tmp_path, seen.append)
    deeper = EarlyExit(copy.deepcopy(model), replace(TRAINING, exit_layer=3, rows=2))
    with pytest.raises(InvalidParameterError, match="has another exit_layer; name another --work"):
        train_resumable(deeper, TOKENS, TOKENS, 2, tmp_path, seen.append)


def test_the_teacher_has_all_layers() -> None:
    original: Any = build("llama")
    exits = EarlyExit(copy.deepcopy(original), replace(TRAINING, dropout=1.0, steps=1))
    seen: list[tuple[bool, torch.Tensor]] = []
    learn = exits._learn

    def watched(inputs: torch.Tensor) -> float:
        drops = bool(exits._drops)
        with exits.unchanged():
            seen.append((drops, logits(exits.model, prompt(20))))
        return learn(inputs)

    exits._learn = watched  # type: ignore[method-assign]
    exits.train(TOKENS, lambda *_: None)
    assert all(drops for drops, _ in seen)
    torch.testing.assert_close(seen[0][1], logits(original, prompt(20)))


@pytest.mark.parametrize("exit_layer", [0, LAYERS])
def test_an_exit_that_leaves_no_layers_is_refused(exit_layer: int) -> None:
    with pytest.raises(InvalidParameterError, match=f"choose 1 to {LAYERS - 1} of {LAYERS}"):
        EarlyExit(copy.deepcopy(build("llama")), ExitTraining(exit_layer))


def test_a_model_without_linear_layers_is_refused() -> None:
    model: Any = copy.deepcopy(build("llama"))
    for layer in model.model.layers:
        layer.self_attn = layer.mlp = torch.nn.Identity()
    with pytest.raises(UnsupportedModelError, match="no ordinary linear layers"):
        EarlyExit(model, TRAINING)


def run(*arguments: str) -> Result:
    result: Any = CliRunner().invoke(train, ["early-exit", *arguments])
    return result


def test_the_command_writes_a_checkpoint(tmp_path: Path) -> None:
    texts = tmp_path / "texts.txt"
    texts.write_text("def mean(values):\n    return sum(values) / len(values)\n" * 16, encoding="utf-8")
    short = ("--model", "tiny", "--texts", str(texts), "--steps", "2", "--rows", "1", "--length", "16", "--rank", "2")
    result = run(*short, "--out", str(tmp_path / "out"))
    assert result.exit_code == 0, result.output
    figures = json.loads((tmp_path / "out" / "training.json").read_text(encoding="utf-8"))
    assert figures["training"]["steps"] == 2
    assert 0 < figures["after"]["perplexity"] < 1.5 * figures["before"]["perplexity"]
    model, tokenizer = load_model(tmp_path / "out")
    original, _ = load_model("tiny")
    assert model.dtype == original.dtype
    result = Engine(model, tokenizer, method="layerskip").generate("def mean(", max_new_tokens=8)
    assert result.drafted > 0


def test_the_command_writes_an_adapter(tmp_path: Path) -> None:
    """In float32 the model with it writes what the merged model writes."""
    texts, out = tmp_path / "texts.txt", tmp_path / "out"
    texts.write_text("def mean(values):\n    return sum(values) / len(values)\n" * 16, encoding="utf-8")
    short = ("--model", "tiny", "--texts", str(texts), "--steps", "2", "--rows", "1", "--length", "16", "--rank", "2")
    assert run(*short, "--adapter", "--out", str(out)).exit_code == 0
    assert {file.name for file in out.iterdir()} == {
        "adapter_config.json",
        "adapter_model.safetensors",
        "training.json",
    }
    model, tokenizer = load_model("tiny", dtype="float32")
    engine = Engine(model, tokenizer, method="layerskip", adapters={"exit": out})
    found = engine.generate("def mean(", max_new_tokens=24, adapter="exit")
    assert found.drafted > 0
    weights = load_file(out / "adapter_model.safetensors")
    with torch.no_grad():
        for name, up in weights.items():
            if ".lora_B." in name:
                layer = model.get_submodule(name.removeprefix("base_model.model.").removesuffix(".lora_B.weight"))
                layer.weight += up.float() @ weights[name.replace("lora_B", "lora_A")].float()
    assert Engine(model, tokenizer).generate("def mean(", max_new_tokens=24).token_ids == found.token_ids


@pytest.mark.parametrize(
    ("text", "error", "message"),
    [("short", InvalidParameterError, "give more texts"), (None, InvalidParameterError, "cannot read")],
)
def test_texts_that_do_not_do_are_named(text: str | None, error: type[Exception], message: str, tmp_path: Path) -> None:
    folder = save_checkpoint(tmp_path / "model")
    if text is not None:
        (tmp_path / "texts.txt").write_text(text, encoding="utf-8")
    result = run("--model", str(folder), "--texts", str(tmp_path / "texts.txt"), "--out", str(tmp_path / "out"))
    assert isinstance(result.exception, error)
    assert message in str(result.exception)
    assert not (tmp_path / "out").exists()


def test_a_folder_with_files_is_not_written_to(tmp_path: Path) -> None:
    result = run("--model", "tiny", "--texts", "none.txt", "--out", str(Path(__file__).parent))
    assert isinstance(result.exception, ModelLoadError)
    assert "not empty" in str(result.exception)
