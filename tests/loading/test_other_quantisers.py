"""Models that torchao or bitsandbytes quantised: their own modules run, and nothing is lost."""

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, LlamaForCausalLM, PreTrainedModel

from helpers.low_bit_model import random_model
from selfspec import Engine, errors, quantise
from selfspec.runtimes.target import Target, fingerprint

PROMPTS = [list(range(7, 27)), [3, 9] * 12, [5]]
METHODS = {"uniform": {"skip_ratio": 0.3}, "suffix": {}, "clasp": {}}


def small_model() -> LlamaForCausalLM:
    """Widths are multiples of 64, which the layers of both packages take."""
    return random_model(intermediate_size=192, num_key_value_heads=2)


def plain_text(model: Any, prompt: list[int], count: int) -> list[int]:
    ids = torch.tensor([prompt])
    options = {"max_new_tokens": count, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    output = model.generate(ids, attention_mask=torch.ones_like(ids), **options)
    return output[0, len(prompt) :].tolist()


def by_torchao(name: str) -> LlamaForCausalLM:
    quantization = pytest.importorskip("torchao.quantization", reason="torchao is not installed")
    configs: dict[str, Any] = {
        "int8": quantization.Int8WeightOnlyConfig,
        "int4": functools.partial(
            quantization.IntxWeightOnlyConfig, weight_dtype=torch.int4, granularity=quantization.PerGroup(32)
        ),
        "float8": quantization.Float8WeightOnlyConfig,
        "dynamic": quantization.Int8DynamicActivationInt8WeightConfig,
        "dynamic-groups": quantization.Int8DynamicActivationIntxWeightConfig,
    }
    model = small_model()
    quantization.quantize_(model, configs[name]())
    return model


def by_bitsandbytes(folder: Path, **options: Any) -> PreTrainedModel:
    pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed")
    from transformers import BitsAndBytesConfig

    small_model().save_pretrained(folder)
    config: Any = BitsAndBytesConfig(**options)
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
        folder, quantization_config=config, dtype=torch.float32, device_map="cpu"
    )
    return model.eval()


def check_lossless(model: Any) -> None:
    """Every method writes what transformers' ``generate`` writes with the same modules, alone and in batches."""
    target = Target(model)
    assert target.fused_count == 0
    assert len(fingerprint(target)["weights"]) == 16
    wanted = [plain_text(model, prompt, 24) for prompt in PROMPTS]
    for method, settings in {"autoregressive": {}, **METHODS}.items():
        engine = Engine(model, method=method, settings=settings)
        found = [engine.generate(prompt, max_new_tokens=24, ignore_eos=True) for prompt in PROMPTS]
        assert [list(each.token_ids) for each in found] == wanted
        together = engine.generate(PROMPTS, max_new_tokens=24, ignore_eos=True)
        assert [list(each.token_ids) for each in together] == wanted
        if method in METHODS:
            assert sum(each.drafted for each in found) > 0
            assert sum(each.accepted for each in found) > 0


@pytest.mark.parametrize("name", ["int8", "int4", "float8"])
def test_torchao_weights_alone(name: str) -> None:
    model = by_torchao(name)
    assert type(model.model.layers[0].mlp.up_proj.weight) is not nn.Parameter
    check_lossless(model)


@pytest.mark.parametrize("kind", ["nf4", "fp4"])
def test_bitsandbytes_at_4_bits(kind: str, tmp_path: Path) -> None:
    model: Any = by_bitsandbytes(tmp_path, load_in_4bit=True, bnb_4bit_quant_type=kind)
    assert type(model.model.layers[0].mlp.up_proj).__name__ == "Linear4bit"
    check_lossless(model)


@pytest.mark.parametrize("name", ["dynamic", "dynamic-groups"])
def test_torchao_with_activations_is_refused(name: str) -> None:
    with pytest.raises(errors.UnsupportedModelError, match=r"q_proj' quantises its inputs .*torchao.*weight-only"):
        Engine(by_torchao(name))


def test_bitsandbytes_at_8_bits_is_refused(tmp_path: Path) -> None:
    with pytest.raises(errors.UnsupportedModelError, match="Linear8bitLt"):
        Engine(by_bitsandbytes(tmp_path, load_in_8bit=True))


@pytest.mark.filterwarnings("ignore")
def test_torchs_dynamic_quantisation_is_refused() -> None:
    model = torch.ao.quantization.quantize_dynamic(small_model(), {nn.Linear}, dtype=torch.qint8)
    with pytest.raises(errors.UnsupportedModelError, match=r"q_proj' quantises its inputs .*torch's dynamic Linear"):
        Engine(model)


def test_they_are_not_quantised_again() -> None:
    with pytest.raises(errors.UnsupportedModelError, match=r"quantised already \(Int8Tensor\)"):
        quantise(by_torchao("int8"), "int4")
