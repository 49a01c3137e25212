"""Widening: the same text from a larger model, by name, from a folder, and through the command line."""

import copy
import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, PreTrainedModel
from typer.testing import CliRunner, Result

from helpers.checkpoints import save_checkpoint
from helpers.models import VARIANTS, build, prompt
from selfspec import Engine
from selfspec.cli.command_line import app
from selfspec.errors import InvalidParameterError, ModelLoadError, OutOfMemoryError, UnsupportedModelError
from selfspec.loading import count_parameters, resolve_name
from selfspec_lab import widening
from selfspec_lab.prompts import PROMPTS
from selfspec_lab.widened_folder import save_widened
from selfspec_lab.widening import check_memory, load_model, widen_model, widened_config

LLAMAS = [name for name in VARIANTS if name.startswith("llama")]


def run(*arguments: str) -> Result:
    result: Any = CliRunner().invoke(app, list(arguments))
    return result


def logits(model: Any, token_ids: list[int]) -> torch.Tensor:
    with torch.inference_mode():
        scores: torch.Tensor = model(torch.tensor([token_ids]), use_cache=False).logits[0]
    return scores


# The same function


@pytest.mark.parametrize("factor", [2, 3])
@pytest.mark.parametrize("name", LLAMAS)
def test_logits_stay_the_same(name: str, factor: int) -> None:
    token_ids = prompt(40)
    widened = widen_model(build(name), factor)
    assert not widened.training
    torch.testing.assert_close(logits(widened, token_ids), logits(build(name), token_ids), rtol=1e-4, atol=1e-4)


def test_every_width_is_repeated_and_the_head_dimension_is_not() -> None:
    source, widened = build("llama-tied-biases"), widen_model(build("llama-tied-biases"), 3)
    config: Any = widened.config
    assert (config.hidden_size, config.intermediate_size) == (192, 288)
    assert (config.num_attention_heads, config.num_key_value_heads, config.head_dim) == (12, 6, 16)
    assert config.num_hidden_layers == source.config.num_hidden_layers
    assert not config.tie_word_embeddings
    shapes = {name: tuple(weight.shape) for name, weight in widened.named_parameters()}
    assert shapes["model.embed_tokens.weight"] == shapes["lm_head.weight"] == (128, 192)
    assert shapes["model.layers.0.self_attn.k_proj.weight"] == (96, 192)
    assert shapes["model.layers.0.self_attn.o_proj.bias"] == (192,)
    assert shapes["model.layers.5.mlp.down_proj.weight"] == (192, 288)
    assert count_parameters(config) == sum(weight.numel() for weight in widened.parameters())
    assert widened.get_input_embeddings().weight is not widened.get_output_embeddings().weight


def test_tiny_widened_8_times_has_the_size_worked_out_by_hand() -> None:
    config = AutoConfig.from_pretrained(resolve_name("tiny"))
    hidden, mlp, queries, keys = 8 * 256, 8 * 512, 8 * 4 * 64, 8 * 2 * 64
    layer = 2 * hidden * queries + 2 * hidden * keys + 3 * hidden * mlp + 2 * hidden
    assert count_parameters(widened_config(config, 8)) == 16 * layer + 2 * 4096 * hidden + hidden


def test_the_source_is_left_alone() -> None:
    source = build("llama")
    before = {name: weight.clone() for name, weight in source.state_dict().items()}
    config = source.config.to_dict()
    widen_model(source, 2, dtype=torch.bfloat16)
    assert source.config.to_dict() == config
    assert all(torch.equal(weight, before[name]) for name, weight in source.state_dict().items())


def test_weights_are_made_in_the_target_dtype_and_powers_of_two_round_once() -> None:
    source: Any = build("llama")
    widened: Any = widen_model(source, 4, dtype=torch.bfloat16)
    assert {weight.dtype for weight in widened.parameters()} == {torch.bfloat16}
    assert widened.config.dtype == torch.bfloat16
    small = source.model.layers[1].mlp.gate_proj.weight.bfloat16()
    large = widened.model.layers[1].mlp.gate_proj.weight
    assert torch.equal(large, small.repeat(4, 4) / 4)


# What is refused


@pytest.mark.parametrize("factor", [0, 65, -1, 2.0, True, "2"])
def test_factor_must_be_a_number_in_range(factor: Any) -> None:
    with pytest.raises(InvalidParameterError, match="whole number from 1 to 64"):
        widen_model(build("llama"), factor)


def test_other_families_are_refused_by_name() -> None:
    with pytest.raises(UnsupportedModelError, match="only Llama models can be widened, not 'qwen3'"):
        widen_model(build("qwen3"), 2)


def test_quantised_models_are_refused() -> None:
    config: Any = copy.deepcopy(build("llama").config)
    config.quantization_config = {"bits": 4}
    with pytest.raises(UnsupportedModelError, match="a quantised model cannot be widened"):
        widened_config(config, 2)


def test_too_large_a_model_is_refused_with_both_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    config = build("llama").config
    needed = 2 * count_parameters(widened_config(config, 8))
    monkeypatch.setattr(widening, "free_bytes", lambda _: needed - 1)
    with pytest.raises(OutOfMemoryError, match=f"takes {needed:,} bytes in bfloat16, but {needed - 1:,} are free"):
        check_memory(config, 8, torch.bfloat16, torch.device("cpu"))
    monkeypatch.setattr(widening, "free_bytes", lambda _: needed)
    check_memory(config, 8, torch.bfloat16, torch.device("cpu"))
    monkeypatch.setattr(widening, "free_bytes", lambda _: None)
    check_memory(config, 64, torch.float32, torch.device("cpu"))


def test_free_memory_is_a_plausible_number() -> None:
    free = widening.free_bytes(torch.device("cpu"))
    assert free is None or 2**20 < free < 2**50


# Folders and names


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_checkpoint(tmp_path_factory.mktemp("checkpoint"))


def greedy(model: PreTrainedModel, method: str = "autoregressive", **settings: Any) -> tuple[int, ...]:
    engine = Engine(model, None, method, settings=settings)
    return engine.generate(prompt(12), max_new_tokens=24, ignore_eos=True).token_ids


def test_folder_and_name_give_the_same_model(checkpoint: Path, tmp_path: Path) -> None:
    out = tmp_path / "new" / "wide"
    result = run("models", "widen", str(checkpoint), str(out), "--factor", "3", "--dtype", "float32")
    assert result.exit_code == 0, result.stderr
    assert not [path for path in out.parent.iterdir() if path != out]
    written, tokenizer = load_model(out, device="cpu")
    named, _ = load_model(checkpoint, device="cpu", widen=3)
    assert written.state_dict().keys() == named.state_dict().keys()
    assert all(torch.equal(weight, named.state_dict()[name]) for name, weight in written.state_dict().items())
    assert tokenizer.encode("abc") == load_model(checkpoint, device="cpu")[1].encode("abc")
    assert (out / "generation_config.json").is_file()
    assert "widened 3 times" in (out / "README.md").read_text(encoding="utf-8")
    assert greedy(written) == greedy(load_model(checkpoint, device="cpu")[0])


def test_widened_models_are_drafted_for_too(checkpoint: Path) -> None:
    model, _ = load_model(checkpoint, device="cpu", widen=2)
    engine = Engine(model, None, "layerskip", settings={"exit_layer": 3, "draft_length": 4})
    result = engine.generate(prompt(12), max_new_tokens=24, ignore_eos=True)
    assert result.token_ids == greedy(load_model(checkpoint, device="cpu")[0])
    assert result.drafted > result.accepted > 0


def test_a_command_of_the_library_takes_the_folder(checkpoint: Path, tmp_path: Path) -> None:
    wide = tmp_path / "wide"
    refused = run("models", "widen", str(checkpoint), str(wide), "--factor", "0")
    assert (refused.exit_code, refused.stdout) == (2, "")
    assert "whole number from 1 to 64" in refused.stderr
    assert run("models", "widen", str(checkpoint), str(wide), "--factor", "2").exit_code == 0
    options = ("--device", "cpu", "--max-new-tokens", "12", "--json")
    small, large = (run("generate", "abc", "--model", str(model), *options) for model in (checkpoint, wide))
    assert large.exit_code == 0, large.stderr
    assert json.loads(large.stdout)["token_ids"] == json.loads(small.stdout)["token_ids"]


def test_large_models_are_written_in_shards(checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, tokenizer = load_model(checkpoint, device="cpu", widen=2)
    whole = type(model).save_pretrained
    monkeypatch.setattr(
        type(model), "save_pretrained", lambda self, folder: whole(self, folder, max_shard_size="500KB")
    )
    save_widened(model, tokenizer, tmp_path / "out", source="x", factor=2)
    assert len(list((tmp_path / "out").glob("model-*.safetensors"))) > 1
    assert greedy(load_model(tmp_path / "out", device="cpu")[0]) == greedy(model)


def test_folders_with_something_in_them_are_refused(checkpoint: Path, tmp_path: Path) -> None:
    (tmp_path / "note.txt").write_text("mine")
    for place, message in ((tmp_path, "is not empty"), (tmp_path / "note.txt", "is a file")):
        result = run("models", "widen", str(checkpoint), str(place), "--factor", "2")
        assert result.exit_code == 2
        assert message in result.stderr
        assert result.stderr.count("\n") == 1
    assert [path.name for path in tmp_path.iterdir()] == ["note.txt"]


def test_a_failed_write_leaves_nothing_behind(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, tokenizer = load_model(checkpoint, device="cpu", widen=2)

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(type(model), "save_pretrained", full)
    with pytest.raises(ModelLoadError, match="No space left on device"):
        save_widened(model, tokenizer, tmp_path / "out", source="x", factor=2)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("name", "message"), [("gemma3", "not 'gemma3_text'"), ("llama", "free on cpu")])
def test_what_cannot_be_widened_is_found_out_before_the_weights_are_read(
    name: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = save_checkpoint(tmp_path / "model", name)
    os.truncate(folder / "model.safetensors", 10)
    monkeypatch.setattr(widening, "free_bytes", lambda _: 1)
    with pytest.raises((UnsupportedModelError, OutOfMemoryError), match=message):
        load_model(folder, device="cpu", widen=2)


def test_models_lists_the_bundled_ones() -> None:
    listed = json.loads(run("models", "list", "--json").stdout)
    assert listed["tiny"]["layers"] == 16
    assert listed["tiny"]["parameters"] == listed["tiny-early-exit"]["parameters"]
    assert "tiny-early-exit: layers 16, hidden size 256" in run("models", "list").stdout


# The bundled checkpoint


@pytest.mark.trained
@pytest.mark.parametrize("factor", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_tiny_writes_the_same_text(factor: int) -> None:
    tokens = 16
    small, tokenizer = load_model("tiny", dtype="float32", device="cpu")
    wide, _ = load_model("tiny", dtype="float32", device="cpu", widen=factor)
    plain = Engine(small, tokenizer, method="autoregressive")
    drafting = Engine(wide, tokenizer, "uniform")
    for prompts in PROMPTS.values():
        expected = plain.generate(prompts[0], max_new_tokens=tokens).token_ids
        prompt_ids = torch.tensor([plain.encode(prompts[0])])
        written: Any = wide.generate(prompt_ids, max_new_tokens=tokens, do_sample=False)  # type: ignore[operator]
        assert tuple(written[0, prompt_ids.shape[1] :].tolist()) == expected
        drafted = drafting.generate(prompts[0], max_new_tokens=tokens)
        assert drafted.token_ids == expected
        assert drafted.drafted > drafted.accepted > 0
