"""Quantised checkpoints that are damaged, of another layout or not to be run: refused in one line, by name."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from helpers.checkpoints import save_checkpoint
from helpers.quantised_checkpoints import Kind, Tensors, save_quantised
from selfspec import errors, load_model
from selfspec.loading import load_config

NAME = "model.layers.1.mlp.down_proj"
STATE = "weight.quant_state.bitsandbytes__nf4"
PACKED: dict[str, Any] = {"format": "pack-quantized"}
GPTQ, AWQ, NF4 = Kind("gptq", group=32), Kind("awq"), Kind("bitsandbytes", settings={"load_in_4bit": True})
COMPRESSED = Kind("compressed-tensors", group=32, shuffled=True, settings=PACKED)
INT8 = Kind("bitsandbytes", bits=8, settings={"load_in_8bit": True})
KINDS = {"gptq": GPTQ, "awq": AWQ, "compressed": COMPRESSED, "nf4": NF4, "int8": INT8}


def replaced(last: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Tensors], None]:
    def replace(tensors: Tensors) -> None:
        tensors[f"{NAME}.{last}"] = change(tensors[f"{NAME}.{last}"])

    return replace


def with_infinity(tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor.clone()
    tensor.view(-1)[3] = torch.inf
    return tensor


def with_state(**changed: Any) -> Callable[[torch.Tensor], torch.Tensor]:
    """Replaces values in the text that bitsandbytes has beside a weight."""

    def change(tensor: torch.Tensor) -> torch.Tensor:
        text = json.dumps({**json.loads(bytes(tensor.tolist())), **changed}).encode()
        return torch.tensor(list(text), dtype=torch.uint8)

    return change


def refusal(folder: Path) -> str:
    with pytest.raises((errors.ModelLoadError, errors.UnsupportedModelError)) as caught:
        load_model(folder, dtype="float32")
    message = str(caught.value)
    assert "\n" not in message
    assert str(folder) in message
    return message


@pytest.mark.parametrize(
    ("kind", "last", "change", "expected"),
    [
        (
            GPTQ,
            "qweight",
            lambda each: each[1:],
            "down_proj.qweight has 31 words for 256 weights, which are not those of 2, 3, 4, 8",
        ),
        (GPTQ, "qweight", lambda each: each[:20], "has 20 words"),
        (GPTQ, "qweight", lambda each: each.repeat(3, 1), "has 96 words"),
        (GPTQ, "qweight", lambda each: each.to(torch.int64), "is I64 .* needs I32"),
        (GPTQ, "qzeros", lambda each: each[:, 1:], r"qzeros is I32 \[8, 15\]"),
        (GPTQ, "scales", lambda each: each[:-1], "qzeros is I32"),
        (GPTQ, "scales", with_infinity, "scales of .*down_proj are no finite numbers"),
        (GPTQ, "g_idx", lambda each: each + 1, "g_idx names groups that .*scales does not have"),
        (GPTQ, "g_idx", lambda each: each - 1, "g_idx names groups"),
        (AWQ, "qweight", lambda each: each[:, 1:], r"needs I32 \[256, 16\]"),
        (AWQ, "scales", lambda each: each[:0], "scales is missing or no matrix"),
        (AWQ, "scales", with_infinity, "no finite numbers"),
        (COMPRESSED, "weight_packed", lambda each: each[:, 1:], "weight_packed has 31 words"),
        (COMPRESSED, "weight_zero_point", lambda each: each[1:], "weight_zero_point is I32"),
        (COMPRESSED, "weight_g_idx", lambda each: each * 0, "as many inputs into each group"),
        (COMPRESSED, "weight_g_idx", lambda each: each.long() + 2**60, "as many inputs into each group"),
        (COMPRESSED, "weight_shape", lambda each: each + 1, r"weight_shape is not \[128, 256\]"),
        (COMPRESSED, "weight_scale", lambda each: each[:, :-1], "do not divide into the 7 groups"),
        (NF4, "weight", lambda each: each[1:], "needs U8"),
        (NF4, "weight.absmax", with_infinity, "no finite numbers"),
        (NF4, STATE, lambda each: each[:-4], "cannot be read"),
        (NF4, STATE, with_state(blocksize=2**40), "in blocks of 1099511627776, .* blocks have 65,536 at most"),
        (NF4, STATE, with_state(nested_blocksize=2**40), "whose scales are in blocks of 1099511627776, but"),
        (INT8, "SCB", lambda each: each[1:], "needs F32"),
        (INT8, "weight_format", lambda each: each + 2, "not that of rows"),
    ],
)
@pytest.mark.filterwarnings("ignore::selfspec.errors.SelfSpecWarning")
def test_tensors_that_do_not_fit(
    kind: Kind, last: str, change: Callable[[torch.Tensor], torch.Tensor], expected: str, tmp_path: Path
) -> None:
    message = refusal(save_quantised(tmp_path, kind, change=replaced(last, change)))
    assert re.search(expected, message), message


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.filterwarnings("ignore::selfspec.errors.SelfSpecWarning")
def test_a_missing_tensor_is_named(name: str, tmp_path: Path) -> None:
    """Whichever tensor of a layer is not there; some may be, as the order of the inputs."""
    folder = save_quantised(tmp_path, KINDS[name])
    tensors = load_file(folder / "model.safetensors")
    optional = ("g_idx", "weight_shape", "weight_format", "zero_point")
    for lacking in [each for each in tensors if each.startswith(NAME) and not each.endswith(optional)]:
        save_file({key: each for key, each in tensors.items() if key != lacking}, folder / "model.safetensors")
        assert "down_proj" in refusal(folder), lacking


@pytest.mark.parametrize("name", ["gptq", "awq", "compressed", "int8"])
def test_a_tensor_that_nothing_reads_is_named(name: str, tmp_path: Path) -> None:
    def add(tensors: Tensors) -> None:
        tensors[f"{NAME}.weight_global_scale"] = torch.ones(1)

    assert "weight_global_scale of the checkpoint is no part" in refusal(
        save_quantised(tmp_path, KINDS[name], change=add)
    )


def test_a_bias_that_the_model_does_not_have_is_refused_unless_it_is_zero(tmp_path: Path) -> None:
    def add(tensors: Tensors) -> None:
        tensors[f"{NAME}.bias"] = torch.ones(128)

    assert "down_proj.bias of the checkpoint is no part" in refusal(save_quantised(tmp_path, GPTQ, change=add))


def test_a_config_that_speaks_of_other_weights(tmp_path: Path) -> None:
    def make_dense(tensors: Tensors) -> None:
        for name in [each for each in tensors if "proj" in each]:
            del tensors[name]

    assert "says that weights are quantised, but none are" in refusal(save_quantised(tmp_path, GPTQ, change=make_dense))


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"input_activations": {"num_bits": 8}}, "quantises the inputs of layers .*w4a16"),
        ({"output_activations": {"num_bits": 8}}, "quantises the inputs"),
    ],
)
def test_what_quantises_activations_is_refused(change: dict[str, Any], expected: str, tmp_path: Path) -> None:
    folder = save_quantised(tmp_path, COMPRESSED)
    edit(folder, lambda config: config["config_groups"]["group_0"].update(change))
    assert re.search(expected, refusal(folder))


def test_a_quantised_cache_is_refused(tmp_path: Path) -> None:
    folder = save_quantised(tmp_path, COMPRESSED)
    edit(folder, lambda config: config.update(kv_cache_scheme={"num_bits": 8}))
    assert "quantises keys and values" in refusal(folder)


def test_other_layouts_are_left_to_transformers(tmp_path: Path) -> None:
    """Which names the package that they need."""
    folder = save_quantised(tmp_path, AWQ)
    edit(folder, lambda config: config.update(version="gemv"))
    assert "gptqmodel" in refusal(folder)


def test_a_method_that_nothing_reads_is_refused_by_name(tmp_path: Path) -> None:
    """transformers would leave the scales out."""
    save_scaled(tmp_path, quant_method="modelopt", quant_algo="FP8")
    assert "were quantised by 'modelopt', which is not supported; take the original" in refusal(tmp_path)
    with pytest.raises(errors.UnsupportedModelError, match="modelopt"):
        load_config(tmp_path)


@pytest.mark.parametrize("kind", ["weight_scale", "weight_scale_2", "weight_scale_inv", "scales", "SCB"])
def test_scales_beside_weights_are_refused_though_the_config_says_nothing_of_them(kind: str, tmp_path: Path) -> None:
    save_scaled(tmp_path, kind=kind)
    message = refusal(tmp_path)
    assert f"nothing reads model.layers.0.mlp.down_proj.{kind}; take" in message


def test_scales_of_what_is_no_part_of_the_model_do_not_matter(tmp_path: Path) -> None:
    """As of towers for pictures."""
    save_scaled(tmp_path, layer="visual.blocks.0.mlp.down_proj")
    model, _ = load_model(tmp_path, dtype="float32")
    assert model.config.model_type == "llama"


def save_scaled(
    folder: Path, *, layer: str = "model.layers.0.mlp.down_proj", kind: str = "weight_scale", **settings: Any
) -> None:
    """A checkpoint of ordinary weights, with one scale and a ``quantization_config`` of these settings, if any."""
    save_checkpoint(folder)
    tensors = load_file(folder / "model.safetensors")
    tensors[f"{layer}.{kind}"] = torch.ones(1)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    if settings:
        content = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**content, "quantization_config": settings}))


def test_fp8_on_a_cpu_takes_what_bfloat16_takes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_scaled(tmp_path, quant_method="fp8", weight_block_size=[128, 128])
    monkeypatch.setattr("selfspec.memory.available_bytes", lambda: 1000)
    wanted = r"weights in FP8 of .* become bfloat16 on a CPU and take [\d,]+ bytes, but 1,000 are available; take a"
    with pytest.raises(errors.OutOfMemoryError, match=wanted):
        load_model(tmp_path, device="cpu")


def test_an_index_that_names_no_files(tmp_path: Path) -> None:
    folder = save_quantised(tmp_path, GPTQ, shards=2)
    (folder / "model.safetensors.index.json").write_text("[]")
    assert "names no files" in refusal(folder)


def test_too_little_memory_is_said_before_anything_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = save_quantised(tmp_path, AWQ)
    monkeypatch.setattr("selfspec.memory.available_bytes", lambda: 1000)
    with pytest.raises(errors.OutOfMemoryError, match=r"the weights take [\d,]+ bytes, but 1,000 are available"):
        load_model(folder)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
@pytest.mark.filterwarnings("ignore::selfspec.errors.SelfSpecWarning")
def test_tensors_of_any_shape_are_loaded_or_refused(data: st.DataObject, tmp_path: Path) -> None:
    """What is read stays within the tensors."""
    name = data.draw(st.sampled_from(sorted(KINDS)))
    folder = tmp_path / name
    if not folder.exists():
        save_quantised(folder, KINDS[name])
        (folder / "model.safetensors").rename(folder / "kept")
    tensors = load_file(folder / "kept")
    chosen = data.draw(st.sampled_from([each for each in sorted(tensors) if each.startswith(NAME)]))
    shape = data.draw(st.lists(st.integers(0, 70), max_size=3))
    dtype = data.draw(st.sampled_from([torch.int32, torch.int8, torch.uint8, torch.float16, torch.float32]))
    tensors[chosen] = torch.zeros(shape, dtype=dtype)
    save_file(tensors, folder / "model.safetensors")
    message = ""
    try:
        load_model(folder, dtype="float32")
    except errors.SelfSpecError as error:
        message = str(error)
    assert "\n" not in message


def edit(folder: Path, change: Callable[[Any], Any]) -> None:
    content = json.loads((folder / "config.json").read_text())
    change(content["quantization_config"])
    (folder / "config.json").write_text(json.dumps(content))
