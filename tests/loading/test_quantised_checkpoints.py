"""Checkpoints of GPTQ, AWQ, compressed-tensors and bitsandbytes in their own numbers: weights, text, memory."""

import functools
from typing import Any

import pytest
import torch

from helpers.kernels import needs_kernels
from helpers.models import SMALLEST_GAP
from helpers.quantised_checkpoints import Kind, dequantised, save_quantised
from selfspec import Engine, load_model
from selfspec.runtimes.packed import LowBitLinear
from selfspec.runtimes.target import Target

pytestmark = needs_kernels

BFLOAT16 = torch.bfloat16
V2: dict[str, Any] = {"checkpoint_format": "gptq_v2"}
PACKED: dict[str, Any] = {"format": "pack-quantized", "quantization_status": "compressed"}
INTS: dict[str, Any] = {"format": "int-quantized", "quantization_status": "compressed"}
GRIDS = {
    "gptq": Kind("gptq"),
    "gptq-symmetric": Kind("gptq", symmetric=True),
    "gptq-order": Kind("gptq", group=32, shuffled=True),
    "gptq-order-64": Kind("gptq", group=64, symmetric=True, shuffled=True),
    "gptq-2": Kind("gptq", bits=2, group=64),
    "gptq-3": Kind("gptq", bits=3),
    "gptq-3-order": Kind("gptq", bits=3, group=32, shuffled=True, settings=V2),
    "gptq-8": Kind("gptq", bits=8, group=0),
    "gptq-v2": Kind("gptq", settings=V2, dtype=BFLOAT16),
    "gptq-8-v2": Kind("gptq", bits=8, group=32, settings=V2),
    "gptq-channel": Kind("gptq", group=0, symmetric=True),
    "awq": Kind("awq"),
    "awq-32": Kind("awq", group=32),
    "compressed-4": Kind("compressed-tensors", symmetric=True, dtype=BFLOAT16, settings=PACKED),
    "compressed-4-zeros": Kind("compressed-tensors", group=64, dtype=BFLOAT16, settings=PACKED),
    "compressed-4-order": Kind("compressed-tensors", group=32, shuffled=True, settings=PACKED),
    "compressed-8": Kind("compressed-tensors", bits=8, group=0, symmetric=True, settings=PACKED),
    "compressed-int8": Kind("compressed-tensors", bits=8, group=0, symmetric=True, settings=INTS),
    "compressed-int8-zeros": Kind("compressed-tensors", bits=8, dtype=BFLOAT16, settings=INTS),
    "compressed-naive-4": Kind("compressed-tensors", group=32, settings={"format": "naive-quantized"}),
    "bitsandbytes-8": Kind("bitsandbytes", bits=8, settings={"load_in_8bit": True}),
}
TABLES = {
    "nf4": Kind("bitsandbytes", settings={"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}),
    "nf4-nested": Kind("bitsandbytes", settings={"load_in_4bit": True, "bnb_4bit_use_double_quant": True}),
}
PROMPTS = [[3, 9, 14, 3, 9, 14, 3, 9], list(range(7, 27)), [5]]
NEW_TOKENS = 24


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return functools.cache(lambda name: save_quantised(tmp_path_factory.mktemp(name), {**GRIDS, **TABLES}[name]))


def by_transformers(model: Any, prompt: list[int], *, clear: bool = False) -> tuple[int, ...]:
    """What ``generate`` writes; ``clear`` checks that rounding decides no choice."""
    ids = torch.tensor([prompt])
    options = {"max_new_tokens": NEW_TOKENS, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    found = model.generate(
        ids, attention_mask=torch.ones_like(ids), output_logits=True, return_dict_in_generate=True, **options
    )
    best = torch.cat(found.logits).topk(2).values
    assert not clear or float((best[:, 0] - best[:, 1]).min()) > SMALLEST_GAP, "take another prompt"
    return tuple(found.sequences[0, len(prompt) :].tolist())


def written(model: Any, method: str = "autoregressive", **settings: Any) -> list[tuple[int, ...]]:
    engine = Engine(model, method=method, settings=settings)
    return [engine.generate(prompt, max_new_tokens=NEW_TOKENS, ignore_eos=True).token_ids for prompt in PROMPTS]


@pytest.mark.parametrize("name", GRIDS)
def test_weights_and_text_are_those_of_the_checkpoint(name: str, folder: Any) -> None:
    kind = GRIDS[name]
    model, _ = load_model(folder(name), dtype="float32")
    wanted = dequantised(folder(name), kind)
    layers = {path: module for path, module in model.named_modules() if isinstance(module, LowBitLinear)}
    assert len(layers) == 21
    for path, layer in layers.items():
        assert torch.equal(layer.packed.unpack(), wanted.get_parameter(f"{path}.weight")), path
        assert (layer.order is not None) == kind.shuffled
    for path, parameter in model.named_parameters():
        if not path.endswith("tiles"):
            assert torch.equal(parameter, wanted.get_parameter(path)), path
    texts = [by_transformers(wanted, prompt, clear=True) for prompt in PROMPTS]
    assert written(model) == texts
    assert [by_transformers(model, prompt) for prompt in PROMPTS] == texts
    assert Target(model).fused_count == 6


@pytest.mark.parametrize("name", ["gptq-order", "awq", "compressed-int8-zeros", "gptq-3"])
@pytest.mark.parametrize("activations", ["exact", "int8"])
def test_every_method_writes_plain_text_in_bfloat16(name: str, activations: str, folder: Any) -> None:
    model, _ = load_model(folder(name), dtype="bfloat16", activations=activations)
    texts = written(model)
    assert written(model, "suffix") == written(model, "uniform", skip_ratio=0.5) == texts
    together = Engine(model).generate(PROMPTS, max_new_tokens=NEW_TOKENS, ignore_eos=True)
    assert [each.token_ids for each in together] == texts
