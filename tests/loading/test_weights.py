"""Low-bit weights where a model is loaded, in Python and in the shell."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from helpers.checkpoints import save_checkpoint
from helpers.commands import run
from helpers.kernels import needs_kernels
from helpers.low_bit_model import random_model
from helpers.models import VARIANTS
from selfspec import Engine, errors, load_model, quantise
from selfspec.runtimes.formats import LOW_BITS
from selfspec.runtimes.packed import LowBitLinear
from selfspec.runtimes.precision import Precision
from selfspec.runtimes.target import Target

pytestmark = needs_kernels

WEIGHTS = pytest.mark.parametrize("weights", ["int8", "int4"])
PROMPT = list(range(7, 27))


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = save_checkpoint(tmp_path_factory.mktemp("checkpoint"))
    random_model(torch.bfloat16).save_pretrained(folder)
    return str(folder)


@WEIGHTS
@torch.inference_mode()
def test_a_loaded_model_is_one_that_was_quantised(checkpoint: str, weights: str) -> None:
    loaded, _ = load_model(checkpoint, weights=weights)
    assert not any(type(module) is torch.nn.Linear for module in loaded.modules())
    assert loaded.dtype == torch.bfloat16
    ids = torch.tensor([PROMPT])
    wanted = quantise(load_model(checkpoint)[0], weights)
    assert torch.equal(loaded(ids).logits, wanted(ids).logits)


def test_low_bit_weights_need_triton_on_a_device(checkpoint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert load_model(checkpoint, weights="int4")[0].device.type == "cpu"
    monkeypatch.setattr("selfspec.loading.loader.parse_device", lambda _: torch.device("cuda"))
    monkeypatch.setattr("selfspec.loading.loader.has_triton", lambda: False)
    with pytest.raises(errors.DeviceError, match=r"not on 'cuda'; use device cpu, or run: .*selfspec\[triton\]"):
        load_model(checkpoint, weights="int4", device="cuda")


def test_a_family_without_kernels_is_refused_before_weights_are_read(tmp_path: Path) -> None:
    VARIANTS["mixtral"]().save_pretrained(tmp_path)  # there are no weights in this folder
    with pytest.raises(errors.UnsupportedModelError, match=r"Mixtral .* native form"):
        load_model(tmp_path, weights="int8")


def test_an_adapter_is_refused_by_the_name_of_its_model(tmp_path: Path) -> None:
    content = {"peft_type": "LORA", "base_model_name_or_path": "some/model"}
    (tmp_path / "adapter_config.json").write_text(json.dumps(content), encoding="utf-8")
    with pytest.raises(errors.UnsupportedModelError, match=r"adapter of the model 'some/model'.* --adapter "):
        load_model(tmp_path)


@WEIGHTS
def test_the_command_line_writes_what_an_engine_writes(checkpoint: str, weights: str) -> None:
    engine = Engine.from_pretrained(checkpoint, "suffix", weights=weights)
    assert any(isinstance(module, LowBitLinear) for module in engine.target.model.modules())
    wanted = engine.generate("abcabc", max_new_tokens=12, ignore_eos=True).token_ids
    arguments = ("--model", checkpoint, "--weights", weights, "--method", "suffix", "--max-new-tokens", "12")
    result = run("generate", "abcabc", *arguments, "--ignore-eos", "--json")
    assert json.loads(result.stdout)["token_ids"] == list(wanted)


def test_a_wrong_name_in_the_shell(checkpoint: str) -> None:
    result: Any = run("generate", "abc", "--model", checkpoint, "--weights", "int3")
    assert result.exit_code != 0
    assert "there are no weights 'int3'; choose int8, int4" in result.stderr


def test_an_inspection_says_how_the_weights_are_held(checkpoint: str) -> None:
    options = ("--model", checkpoint, "--weights", "int4", "--max-new-tokens", "8")
    shown = run("inspect", "--method", "uniform", "abcabc", *options, "--json")
    assert json.loads(shown.stdout)["dtype"] == "4 bits and 8 bits (bfloat16)", shown.stderr


def test_info_says_what_weights_and_those_of_drafts_take(checkpoint: str) -> None:
    own, low = (
        json.loads(run("info", "--model", checkpoint, *options, "--json").stdout)
        for options in ((), ("--weights", "int8"))
    )
    target = Target(load_model(checkpoint)[0])
    assert own["low_bit_bytes"] == {f"{bits} bits": target.low_bit_bytes(Precision.of(bits)) for bits in LOW_BITS}
    assert low["weights"] == "8 bits (bfloat16)"
    assert low["parameters"] == own["parameters"]
    assert low["bytes"]["total"] < 0.6 * own["bytes"]["total"]
    assert "themselves" in low["low_bit_bytes"]["8 bits"]
    text = run("info", "--model", checkpoint).stdout
    assert f"8 bits {own['low_bit_bytes']['8 bits']:,}, 6 bits" in text


def test_info_says_why_there_are_no_low_bit_weights(tmp_path: Path) -> None:
    folder = save_checkpoint(tmp_path, "mixtral")
    shown = run("info", "--model", str(folder)).stdout
    assert re.search(r"low bit bytes +none: sublayer 0 of this Mixtral model has no native form", shown)
