"""gpt-oss checkpoints in MXFP4 keep their own numbers: weights, text, trees, rows, costs; damaged ones are refused."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, Mxfp4Config

from helpers.kernels import needs_kernels
from helpers.models import SMALLEST_GAP, prompt
from helpers.mxfp4_checkpoints import Tensors, gpt_oss, save_mxfp4
from selfspec import Engine, errors, load_model
from selfspec.runtimes.costs.measuring import estimate_row_costs
from selfspec.runtimes.packed import LowBitExperts, parameter_count
from selfspec.runtimes.target import Target

pytestmark = needs_kernels

PROMPTS = [prompt(20, seed=3), prompt(33, seed=1), [5]]
NEW_TOKENS = 24
RUNS: list[tuple[str, dict[str, Any], int]] = [
    ("autoregressive", {}, 3),
    ("uniform", {"skip_ratio": 0.4}, 1),
    ("layerskip", {"exit_layer": 4, "draft_length": 3}, 3),
    ("token-recycling", {}, 1),
    ("auto", {}, 1),
]
NAME = "model.layers.1.mlp.experts"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    with torch.inference_mode(mode=False):
        return save_mxfp4(tmp_path_factory.mktemp("mxfp4"), gpt_oss())


def by_transformers(folder: Path, dtype: torch.dtype) -> Any:
    """The dequantised model."""
    config = Mxfp4Config(dequantize=True)
    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, quantization_config=config).eval()


def text(model: Any, ids: list[int]) -> tuple[int, ...]:
    output = model.generate(
        torch.tensor([ids]),
        attention_mask=torch.ones(1, len(ids), dtype=torch.long),
        do_sample=False,
        max_new_tokens=NEW_TOKENS,
        pad_token_id=0,
        eos_token_id=None,
        output_logits=True,
        return_dict_in_generate=True,
    )
    best = torch.cat(output.logits).topk(2).values
    assert float((best[:, 0] - best[:, 1]).min()) > SMALLEST_GAP, "take another prompt"
    return tuple(output.sequences[0, len(ids) :].tolist())


@torch.inference_mode(mode=False)
def test_in_float32_the_text_is_that_of_the_dequantised_model(folder: Path) -> None:
    dequantised = by_transformers(folder, torch.float32)
    wanted = [text(dequantised, ids) for ids in PROMPTS]
    model, _ = load_model(folder, dtype="float32")
    target = Target(model)
    assert target.at(None).path().native
    assert target.tree_refusal is None
    assert [text(model, ids) for ids in PROMPTS] == wanted
    for method, settings, count in RUNS:
        engine = Engine(model, method=method, settings=settings)
        found = engine.generate(PROMPTS[:count], max_new_tokens=NEW_TOKENS, ignore_eos=True)
        assert [each.token_ids for each in found] == wanted[:count], method
        if method not in ("autoregressive", "auto"):
            assert found[0].drafted > 0, method
            assert found[0].accepted > 0, method


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@torch.inference_mode(mode=False)
def test_experts_have_the_numbers_of_the_checkpoint(folder: Path, dtype: torch.dtype) -> None:
    wanted = dict(by_transformers(folder, dtype).named_parameters())
    packed, _ = load_model(folder, dtype=dtype)
    unpacked, _ = load_model(folder, dtype=dtype, unpack=True)
    for name, parameter in unpacked.named_parameters():
        assert torch.equal(parameter, wanted[name]), name
    experts = {name: each for name, each in packed.named_modules() if isinstance(each, LowBitExperts)}
    assert len(experts) == packed.config.num_hidden_layers
    for name, each in experts.items():
        for kind in ("gate_up_proj", "down_proj"):
            layer, parameter = getattr(each, kind), wanted[f"{name}.{kind}"]
            by_outputs = layer.packed.unpack().to(dtype).view(len(parameter), -1, layer.in_features)
            assert torch.equal(by_outputs.transpose(1, 2), parameter)
            assert layer.tiles.nbytes == parameter.numel() * 17 // 32
    assert parameter_count(packed) == parameter_count(unpacked)


def test_dtype_auto_is_that_of_the_checkpoint(folder: Path) -> None:
    model, _ = load_model(folder)
    assert model.dtype == torch.bfloat16


@pytest.mark.parametrize("activations", ["exact", "int8"])
@torch.inference_mode()
def test_in_bfloat16_rows_do_not_depend_on_each_other(folder: Path, activations: str) -> None:
    with torch.inference_mode(mode=False):
        model, _ = load_model(folder, activations=activations)
    target, ids = Target(model), torch.tensor(prompt(40))

    def run(*chunks: int) -> torch.Tensor:
        state, states = target.new_sequence(len(ids), len(ids), len(ids)), []
        for part in ids.split(list(chunks)):
            forward = target.lay_out(state, len(part))
            states.append(target.run(target.embed(part), range(target.sublayer_count), forward).hidden_states)
            state.cache.commit(range(len(part)))
        return torch.cat(states)

    alone = run(*[1] * len(ids))
    assert alone.std() > 0.1
    for chunks in ([len(ids)], [8] * 5, [1, 2, 3, 4, 5, 6, 7, 12]):
        assert torch.equal(run(*chunks), alone)


def test_more_rows_read_more_experts(folder: Path) -> None:
    target = Target(load_model(folder)[0])
    costs = estimate_row_costs(target)
    first, second, many = (costs(rows) - costs(rows - 1) for rows in (2, 3, 24))
    assert first > second > many > 0


def without(last: str) -> Callable[[Tensors], None]:
    def change(tensors: Tensors) -> None:
        del tensors[f"{NAME}.{last}"]

    return change


def changed(last: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Tensors], None]:
    return lambda tensors: tensors.update({f"{NAME}.{last}": change(tensors[f"{NAME}.{last}"]).contiguous()})


def with_no_number(scales: torch.Tensor) -> torch.Tensor:
    scales = scales.clone()
    scales.view(-1)[7] = 255
    return scales


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (without("gate_up_proj_scales"), r"gate_up_proj_scales is missing; download"),
        (without("down_proj_blocks"), r"down_proj_blocks is missing; download"),
        (changed("down_proj_blocks", lambda each: each[..., :8]), r"down_proj_blocks is U8 \[4, 64, 3, 8\]"),
        (
            changed("down_proj_scales", lambda each: each[:3]),
            r"down_proj_scales is U8 \[3, 64, 3\] .* needs U8 \[4, 64, 3\]",
        ),
        (changed("gate_up_proj_blocks", torch.Tensor.float), "needs U8"),
        (changed("gate_up_proj_scales", with_no_number), "gate_up_proj has blocks that are no numbers"),
        (lambda tensors: tensors.update(more=torch.zeros(2)), "the tensor more of the checkpoint is no part"),
    ],
)
def test_damaged_checkpoints_are_refused(change: Callable[[Tensors], None], expected: str, tmp_path: Path) -> None:
    save_mxfp4(tmp_path, gpt_oss(num_hidden_layers=2), change=change)
    with pytest.raises(errors.ModelLoadError, match=expected) as caught:
        load_model(tmp_path, dtype="float32")
    assert "\n" not in str(caught.value)


def test_inputs_that_are_no_whole_blocks_are_refused(tmp_path: Path) -> None:
    save_mxfp4(tmp_path, gpt_oss(num_hidden_layers=2))
    config = (tmp_path / "config.json").read_text()
    (tmp_path / "config.json").write_text(config.replace('"intermediate_size": 96', '"intermediate_size": 100'))
    with pytest.raises(errors.ModelLoadError, match=r"the 100 inputs of .*down_proj are not whole blocks of 32"):
        load_model(tmp_path, dtype="float32")
