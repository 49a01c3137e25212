"""Checkpoints of GPTQ, AWQ, compressed-tensors and bitsandbytes in their own numbers: weights, text, memory."""

import copy
import functools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import Qwen2Config, Qwen2ForCausalLM

from helpers.commands import run
from helpers.gguf_cases import built
from helpers.kernels import needs_kernels
from helpers.models import SMALLEST_GAP
from helpers.quantised_checkpoints import (
    SIZES,
    Kind,
    Tensors,
    dequantised,
    fits,
    pack_bits,
    random_llama,
    read_gptq,
    save_quantised,
)
from selfspec import Engine, load_model
from selfspec.errors import ModelLoadError, SelfSpecWarning
from selfspec.loading.quantised_model import read_quantised
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


@pytest.mark.in_turn(3)
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


# Weights that fit no grid, and those that are to be unpacked


@pytest.mark.parametrize("name", TABLES)
def test_a_table_of_numbers_is_unpacked_with_a_warning_that_says_the_memory(name: str, folder: Any) -> None:
    with pytest.warns(
        SelfSpecWarning, match=r"21 layers of .* are unpacked to float32 and take 1\.8 MB, since .* GGUF"
    ):
        model, _ = load_model(folder(name), dtype="float32")
    wanted = dequantised(folder(name), TABLES[name])
    for path, parameter in model.named_parameters():
        assert torch.equal(parameter, wanted.get_parameter(path)), path
    assert written(model) == [by_transformers(wanted, prompt, clear=True) for prompt in PROMPTS]


@pytest.mark.parametrize("name", ["gptq-order", "gptq-3", "awq", "compressed-int8-zeros", "nf4"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_unpacked_weights_are_ordinary_ones(name: str, dtype: torch.dtype, folder: Any) -> None:
    model, _ = load_model(folder(name), dtype=dtype, unpack=True)
    wanted = dequantised(folder(name), {**GRIDS, **TABLES}[name])
    for path, parameter in model.named_parameters():
        assert torch.equal(parameter, wanted.get_parameter(path).to(dtype)), path


def test_a_dtype_without_kernels_is_unpacked_with_a_warning(folder: Any) -> None:
    with pytest.warns(SelfSpecWarning, match="to float16 .* choose one of them"):
        model, _ = load_model(folder("gptq"), dtype="float16")
    assert Target(model).weights == "float16"


def test_groups_of_any_size_are_read(tmp_path: Path) -> None:
    kind = Kind("gptq", group=16)
    with pytest.warns(SelfSpecWarning, match="32 inputs"):
        model, _ = load_model(save_quantised(tmp_path, kind), dtype="float32")
    wanted = dequantised(tmp_path, kind)
    assert all(torch.equal(each, wanted.get_parameter(path)) for path, each in model.named_parameters())


def test_they_can_be_rounded_to_other_low_bit_weights(folder: Any) -> None:
    made, _ = load_model(folder("gptq"), dtype="float32", weights="int8")
    assert Target(made).weights == "8 bits (float32)"


# What comes with the weights


def test_auto_is_the_dtype_of_the_config_or_bfloat16_where_it_has_no_kernels(folder: Any) -> None:
    of_half, _ = load_model(folder("gptq"))
    assert of_half.dtype == of_half.config.dtype == BFLOAT16
    assert Target(of_half).weights == "GPTQ 4 bits (bfloat16, int8 activations)"
    assert Target(load_model(folder("gptq-v2"), dtype="float32")[0]).weights == "GPTQ 4 bits (float32)"


def test_info_says_what_the_weights_are(folder: Any) -> None:
    result = run("info", "--model", str(folder("compressed-int8")), "--json")
    assert json.loads(result.stdout)["weights"] == "compressed-tensors 8 bits (bfloat16, int8 activations)"


def test_biases_and_a_tied_head(tmp_path: Path) -> None:
    """As Qwen2 has them; writers of GPTQ add biases of zeros elsewhere."""
    sizes = {**SIZES, "tie_word_embeddings": True}
    torch.manual_seed(1)
    original = Qwen2ForCausalLM(Qwen2Config(**sizes)).eval()
    for name, parameter in original.named_parameters():
        if name.endswith("bias"):
            nn.init.normal_(parameter, std=0.1)

    def add_biases(tensors: Tensors) -> None:
        tensors["model.layers.0.mlp.up_proj.bias"] = torch.zeros(256)

    model: Any
    model, _ = load_model(save_quantised(tmp_path, Kind("gptq"), model=original, change=add_biases), dtype="float32")
    tensors = load_file(tmp_path / "model.safetensors")
    layer = model.model.layers[2].self_attn.k_proj
    assert torch.equal(layer.bias, tensors["model.layers.2.self_attn.k_proj.bias"].float())
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert written(model) == [by_transformers(model, prompt) for prompt in PROMPTS]


def test_a_head_of_its_own_that_the_config_calls_tied(tmp_path: Path) -> None:
    """As after a training of the head alone; transformers ties it only where it is equal."""

    def add_head(tensors: Tensors) -> None:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].flip(0)

    torch.manual_seed(1)
    original = Qwen2ForCausalLM(Qwen2Config(**{**SIZES, "tie_word_embeddings": True})).eval()
    model: Any
    model, _ = load_model(save_quantised(tmp_path, Kind("gptq"), model=original, change=add_head), dtype="float32")
    assert torch.equal(model.lm_head.weight, model.model.embed_tokens.weight.flip(0))
    assert not model.config.tie_word_embeddings
    assert written(model) == [by_transformers(model, prompt) for prompt in PROMPTS]


def test_buffers_that_checkpoints_hold(tmp_path: Path) -> None:
    """As Gemma 4 has them: what the states after a layer are multiplied by."""
    original, kind = copy.deepcopy(built("gemma4_text-alike")), Kind("gptq", group=32)

    def add_scalars(tensors: Tensors) -> None:
        for layer in range(6):
            tensors[f"model.layers.{layer}.layer_scalar"] = torch.full((1,), 0.75 + layer / 8, dtype=torch.float16)

    model: Any
    model, _ = load_model(save_quantised(tmp_path / "whole", kind, model=original, change=add_scalars))
    assert [float(layer.layer_scalar) for layer in model.model.layers] == [0.75 + layer / 8 for layer in range(6)]
    assert model(torch.tensor([PROMPTS[0]])).logits.isfinite().all()
    with pytest.raises(ModelLoadError, match="layer_scalar"):
        load_model(save_quantised(tmp_path / "lacking", kind, model=original))


CONVOLUTIONS = ("lfm2", "falcon_h1", "granitemoehybrid-dense", "qwen3_5_text")


@pytest.mark.parametrize("case", CONVOLUTIONS)
@pytest.mark.filterwarnings("error::selfspec.errors.SelfSpecWarning")
def test_models_with_convolutions_keep_their_numbers(case: str, tmp_path: Path) -> None:
    kind = Kind("gptq", group=32)
    model: Any
    model, _ = load_model(save_quantised(tmp_path, kind, model=copy.deepcopy(built(case))), dtype="float32")
    wanted, ids = dequantised(tmp_path, kind), torch.tensor([list(range(7, 27))])
    linear = {path: module for path, module in wanted.named_modules() if type(module) is nn.Linear}
    layers = {path for path, module in linear.items() if fits(kind, module) and path != "lm_head"}
    assert {path for path, module in model.named_modules() if isinstance(module, LowBitLinear)} == layers
    assert (model(ids).logits - wanted(ids).logits).abs().max() < 1e-3
    settings: dict[str, Any] = {"skip_ratio": 0.3, "confidence_threshold": 0.0}
    assert written(model, "uniform", **settings) == [by_transformers(model, prompt) for prompt in PROMPTS]


def test_heads_that_transformers_passes_over_are_passed_over(tmp_path: Path) -> None:
    def add_head(tensors: Tensors) -> None:
        tensors["mtp.norm.weight"] = torch.ones(64, dtype=torch.float16)

    original = copy.deepcopy(built("qwen3_5_text"))
    folder = save_quantised(tmp_path, Kind("gptq", group=32), model=original, change=add_head)
    model, _ = load_model(folder, dtype="float32")
    assert any(isinstance(module, LowBitLinear) for module in model.modules())


@pytest.mark.parametrize("case", ["mamba", "qwen3-moe"])
def test_other_layouts_than_linear_layers_are_left_to_transformers(case: str, tmp_path: Path) -> None:
    """Code of Mamba reads weights of a linear layer by itself; experts have names of their own."""
    folder = save_quantised(tmp_path, Kind("gptq", group=32), model=copy.deepcopy(built(case)))
    assert read_quantised(str(folder), torch.float32, packed=True) is None


def test_tensors_by_other_names_are_left_to_transformers(tmp_path: Path) -> None:
    """As of the text in a model with pictures."""

    def rename(tensors: Tensors) -> None:
        for name in [name for name in tensors if name.startswith("model.")]:
            tensors[name.replace("model.", "model.language_model.", 1)] = tensors.pop(name)

    folder = save_quantised(tmp_path, Kind("gptq"), change=rename)
    assert read_quantised(str(folder), torch.float32, packed=True) is None


@pytest.mark.skipif(torch.cuda.is_available(), reason="transformers leaves FP8 as it is where there is a GPU")
def test_fp8_with_scales_for_blocks_becomes_bfloat16_on_a_cpu(tmp_path: Path) -> None:
    pytest.importorskip("accelerate", reason="accelerate is not installed")
    original, written_as = random_llama(), {}
    save_quantised(tmp_path, Kind("gptq"), model=original)
    for name, parameter in original.named_parameters():
        weight = parameter.detach()
        if not name.endswith("proj.weight"):
            written_as[name] = weight.bfloat16()
            continue
        blocks = weight.unflatten(1, (-1, 128)).unflatten(0, (-1, min(128, len(weight))))
        scales = blocks.abs().amax((1, 3)) / torch.finfo(torch.float8_e4m3fn).max
        codes = (blocks / scales[:, None, :, None]).view(weight.shape).to(torch.float8_e4m3fn)
        written_as |= {name: codes, f"{name}_scale_inv": scales}
    save_file(written_as, tmp_path / "model.safetensors", metadata={"format": "pt"})
    content = json.loads((tmp_path / "config.json").read_text())
    content["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    (tmp_path / "config.json").write_text(json.dumps({**content, "dtype": "bfloat16"}))
    model, _ = load_model(tmp_path, device="cpu")
    for name, parameter in model.named_parameters():
        assert parameter.dtype == BFLOAT16
        wanted = original.get_parameter(name)
        assert torch.linalg.norm(parameter.float() - wanted) < 0.05 * torch.linalg.norm(wanted), name


def test_a_checkpoint_in_several_files(folder: Any, tmp_path: Path) -> None:
    model, _ = load_model(save_quantised(tmp_path, GRIDS["gptq-order"], shards=3), dtype="float32")
    whole, _ = load_model(folder("gptq-order"), dtype="float32")
    assert model.state_dict().keys() == whole.state_dict().keys()
    assert all(torch.equal(each, whole.state_dict()[name]) for name, each in model.state_dict().items())


def test_an_index_that_an_older_checkpoint_has_left(tmp_path: Path) -> None:
    """``save_pretrained`` removes the files that it names, but not the index; transformers does not read it then."""
    save_quantised(tmp_path, GRIDS["gptq"], shards=3)
    for file in tmp_path.glob("model-*.safetensors"):
        file.unlink()
    model, _ = load_model(save_quantised(tmp_path, GRIDS["gptq"]), dtype="float32")
    assert any(isinstance(module, LowBitLinear) for module in model.modules())


def test_layers_with_other_orders_of_their_inputs_run_apart(tmp_path: Path) -> None:
    """They cannot be one product; the text is the same."""

    def shuffle(tensors: Tensors) -> None:
        name = "model.layers.1.self_attn.k_proj"
        order = torch.randperm(128, generator=torch.Generator().manual_seed(5))
        tensors[f"{name}.g_idx"] = tensors[f"{name}.g_idx"][order]

    kind = GRIDS["gptq-order"]
    model, _ = load_model(save_quantised(tmp_path, kind, change=shuffle), dtype="float32")
    assert Target(model).fused_count == 5
    assert written(model) == [by_transformers(dequantised(tmp_path, kind), prompt, clear=True) for prompt in PROMPTS]


def test_zero_points_of_zero_come_back_where_one_was_subtracted_from_words(tmp_path: Path) -> None:
    """Then the lowest four bits of a word borrow from the next ones."""
    zeros = torch.tensor([[0, 3, 0, 0, 15, 1, 0, 9] * 16])

    def replace_zeros(tensors: Tensors) -> None:
        for name in [name for name in tensors if name.endswith("q_proj.qzeros")]:
            tensors[name] = pack_bits(zeros, 4) - 0x11111111

    model: Any
    model, _ = load_model(save_quantised(tmp_path, Kind("gptq"), change=replace_zeros), dtype="float32")
    tensors, name = load_file(tmp_path / "model.safetensors"), "model.layers.0.self_attn.q_proj"
    tensors[f"{name}.qzeros"] = pack_bits(zeros, 4)
    wanted = read_gptq(tensors, Kind("gptq", settings=V2), name)
    assert torch.equal(model.get_submodule(name).packed.unpack(), wanted)


@pytest.mark.parametrize("name", ["gptq", "awq", "compressed-4", "compressed-int8"])
def test_the_weights_take_about_what_they_take_in_the_file(name: str, folder: Any) -> None:
    model, _ = load_model(folder(name))
    tensors = load_file(folder(name) / "model.safetensors")
    in_file = sum(each.nbytes for key, each in tensors.items() if not key.endswith(("norm.weight", "g_idx", "shape")))
    held = sum(each.nbytes for key, each in model.named_parameters() if "norm" not in key)
    assert 0.95 * in_file < held < 1.06 * in_file
