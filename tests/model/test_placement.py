"""Models that a ``device_map`` divides: they run where hooks move rows and weights, and parts on disk are refused."""

import copy
from pathlib import Path
from typing import Any

import accelerate
import pytest
import torch

from helpers.models import LAYERS, build, plain_text, prompt
from selfspec import Engine, load_model
from selfspec.errors import InvalidParameterError, UnsupportedModelError
from selfspec.model.placement import placement_of
from selfspec.runtimes.target import Target, fingerprint

TEXT, LENGTH = prompt(12), 30
METHODS = {
    "uniform": {"skip_ratio": 0.5, "draft_length": 4, "confidence_threshold": 0.0},
    "clasp": None,
    "prompt-lookup": None,
    "auto": None,
}
MODULES = ("model.embed_tokens", *(f"model.layers.{index}" for index in range(LAYERS)), "model.norm", "lm_head")


def offloaded(name: str = "llama") -> Any:
    """A model whose weights are held beside it, and moved in by hooks."""
    model = copy.deepcopy(build(name))
    return accelerate.cpu_offload(model, execution_device=torch.device("cpu"), state_dict=model.state_dict())


@pytest.mark.parametrize("method", METHODS)
def test_an_offloaded_model_runs(method: str) -> None:
    model = offloaded()
    assert model.model.layers[0].self_attn.q_proj.weight.is_meta
    engine = Engine(model, method=method, settings=METHODS[method])
    assert (engine.target.runtime, engine.target.device.type) == ("eager", "cpu")
    output = engine.generate(TEXT, max_new_tokens=LENGTH)
    assert output.token_ids == plain_text("llama", TEXT, LENGTH)
    assert output.drafted > 0
    assert method == "prompt-lookup" or output.accepted > 0
    assert model.model.layers[0].self_attn.q_proj.weight.is_meta


@pytest.mark.parametrize("name", ["gemma3", "mixtral", "qwen2-window"])
def test_offloaded_models_of_other_families_run(name: str) -> None:
    output = Engine(offloaded(name), method="uniform", settings=METHODS["uniform"]).generate(TEXT, max_new_tokens=12)
    assert output.token_ids == plain_text(name, TEXT, 12)
    assert output.accepted > 0


def test_an_offloaded_model_is_the_same_model() -> None:
    assert fingerprint(Target(offloaded())) == fingerprint(Target(build("llama")))


def test_it_has_no_other_runtime() -> None:
    with pytest.raises(
        UnsupportedModelError, match="runtime 'compiled' needs all weights in one process on one device"
    ):
        Target(offloaded(), "compiled")
    with pytest.raises(UnsupportedModelError, match="low-bit weights need the kernels"):
        Engine(offloaded(), method="low-bit")


def test_a_device_map_of_one_device_changes_nothing(checkpoint: str) -> None:
    model, _ = load_model(checkpoint, device_map={"": "cpu"}, dtype="float32")
    target = Target(model)
    assert placement_of(model).is_whole
    assert (target.runtime, target.fused_count) == ("auto", 2 * LAYERS)
    output = Engine(model, method="uniform", settings=METHODS["uniform"]).generate(TEXT, max_new_tokens=LENGTH)
    assert output.token_ids == plain_text("llama", TEXT, LENGTH)
    assert output.accepted > 0


def test_parts_on_disk_are_refused_by_name(tmp_path: Path) -> None:
    places = {name: "disk" if name.startswith("model.layers") else "cpu" for name in MODULES}
    model = accelerate.dispatch_model(
        copy.deepcopy(build("llama")), {**places, "model.rotary_emb": "cpu"}, main_device="cpu", offload_dir=tmp_path
    )
    names = r"model\.layers\.0, model\.layers\.1, model\.layers\.2 and 3 more of this model are on disk"
    with pytest.raises(UnsupportedModelError, match=names):
        Target(model)


def test_a_model_on_disk_is_refused_by_name(tmp_path: Path) -> None:
    model = accelerate.disk_offload(copy.deepcopy(build("llama")), tmp_path, execution_device=torch.device("cpu"))
    with pytest.raises(UnsupportedModelError, match=r"lm_head, model.embed_tokens.* of this model are on disk"):
        Target(model)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"device_map": {"model": "cpu", "lm_head": "disk"}}, UnsupportedModelError, "device_map puts lm_head on disk"),
        ({"device_map": "disk"}, UnsupportedModelError, "device_map puts the model on disk"),
        ({"device_map": "auto", "tp_plan": "auto"}, InvalidParameterError, "by device_map or by tp_plan, not by both"),
        ({"device_map": "auto", "device": "cpu"}, InvalidParameterError, "not with a device; leave one out"),
        ({"device_map": "auto", "weights": "int8"}, InvalidParameterError, "not with low-bit weights; leave one out"),
        ({"tp_plan": "auto"}, InvalidParameterError, "torchrun --nproc-per-node N"),
        ({"tp_plan": "rows"}, InvalidParameterError, "tp_plan must be 'auto', not 'rows'"),
    ],
)
def test_what_cannot_be_divided_is_refused(
    checkpoint: str, options: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        load_model(checkpoint, **options)
    with pytest.raises(error, match=message):
        Engine.from_pretrained(checkpoint, **options)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("method", METHODS)
def test_a_model_on_two_devices_runs(method: str) -> None:
    places: dict[str, Any] = {name: 0 if index in (3, 4, 5, 7) else "cpu" for index, name in enumerate(MODULES)}
    model = accelerate.dispatch_model(
        copy.deepcopy(build("llama")), {**places, "model.rotary_emb": "cpu"}, main_device="cpu"
    )
    engine = Engine(model, method=method, settings=METHODS[method])
    assert len(engine.target.decoder.placement.devices) == 2
    output = engine.generate(TEXT, max_new_tokens=LENGTH)
    expected = Engine(model, method="autoregressive").generate(TEXT, max_new_tokens=LENGTH)
    assert output.token_ids == expected.token_ids
    assert output.drafted > 0
    assert method == "prompt-lookup" or output.accepted > 0
