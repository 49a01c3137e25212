"""The runtime ``triton``, in Triton's interpreter or on an accelerator: whole models write the text of transformers."""

import pytest
import torch

from fixtures.make_gguf import fixture_path
from helpers.checkpoints import make_tokenizer
from helpers.device import DEVICE
from helpers.gguf_oracle import dequantised
from helpers.kernels import needs_kernels
from helpers.low_bit_model import random_model
from selfspec import Engine
from selfspec.errors import UnsupportedModelError
from selfspec.loading import load_model
from selfspec.runtimes.fused import RmsNorm
from selfspec.runtimes.precision import Precision
from selfspec.runtimes.target import Target

pytest.importorskip("triton", reason="the extra triton is not installed")
from selfspec.gpu import by_row, launch
from selfspec.gpu.low_bit_weights import TritonLowBitWeights
from selfspec.gpu.runtime import TritonProduct

PROMPT = [5, 17, 3]
SIZES = {"num_hidden_layers": 2, "intermediate_size": 64}
SMALL = random_model(**SIZES).to(DEVICE)


def text_of(model: torch.nn.Module, count: int) -> list[int]:
    generate = model.generate
    ids = generate(
        torch.tensor([PROMPT], device=model.device),
        max_new_tokens=count,
        min_new_tokens=count,
        do_sample=False,
        pad_token_id=0,
    )
    return ids[0, len(PROMPT) :].tolist()


def test_a_skipping_method_writes_the_text_of_transformers() -> None:
    settings = {"skip_ratio": 0.5, "confidence_threshold": 0.0}
    model = random_model(num_hidden_layers=3, hidden_size=16, intermediate_size=16).to(DEVICE)
    engine = Engine(model, make_tokenizer(), "uniform", settings=settings, runtime="triton")
    result = engine.generate(PROMPT, max_new_tokens=6, ignore_eos=True)
    assert list(result.token_ids) == text_of(model, 6)
    assert result.drafted > 0
    assert result.accepted > 0


@needs_kernels
def test_a_gguf_file_writes_the_text_of_its_dequantised_model() -> None:
    model, tokenizer = load_model(fixture_path("Q8_0"), dtype="float32", device=str(DEVICE))
    settings = {"exit_layer": 1, "draft_length": 2}
    engine = Engine(model, tokenizer, "layerskip", settings=settings, runtime="triton")
    result = engine.generate(PROMPT, max_new_tokens=3, ignore_eos=True)
    assert list(result.token_ids) == text_of(dequantised("Q8_0"), 3)
    assert result.drafted > 0


def test_every_product_is_a_kernel_of_triton() -> None:
    target = Target(SMALL, "triton")
    assert target.fused_count == target.sublayer_count
    products = [product for block in target.sublayers for product in block.products]
    assert all(isinstance(each, TritonProduct) for each in [*products, target._prepared.head])


def test_norms_rope_and_activations_are_kernels_of_triton() -> None:
    attention, mlp, *_ = Target(SMALL, "triton").sublayers
    assert attention.turn is by_row.turn_heads
    assert isinstance(mlp.activate, by_row.GatedSilu)
    norms = [norm for block in (attention, mlp) for norm in block.norms if norm is not None]
    assert [type(each) for each in norms] == 2 * [by_row.KernelNorm]


@needs_kernels
def test_low_bit_weights_are_multiplied_by_triton() -> None:
    target = Target(SMALL, "triton")
    assert isinstance(target._low_bit, TritonLowBitWeights)
    block = target.at(Precision.of(4)).sublayers[1]
    assert [product.bits for product in block.products] == [4, 4]
    assert all(isinstance(each, TritonProduct) for each in block.products)


def test_a_row_that_depends_on_others_is_found_when_the_model_is_prepared(monkeypatch: pytest.MonkeyPatch) -> None:
    """A norm whose rounding depends on the number of rows stands for a device on which something does."""
    honest = RmsNorm.__call__
    monkeypatch.setattr(RmsNorm, "__call__", lambda own, rows: honest(own, rows) * (1 + 1e-3 * len(rows)))
    target = Target(SMALL, "triton")
    assert target.independent_rows == 0
    assert str(target.at(None).path()).endswith("but on this device a row differs beside other rows")


def test_what_the_kernels_do_not_compute_is_named() -> None:
    model = random_model(**SIZES).to(DEVICE)
    model.model.layers[1].mlp.register_forward_hook(lambda *_: None)
    target = Target(model, "triton")
    assert target.independent_rows == 0
    assert "but sublayer 3 has no fused form" in str(target.at(None).path())


def test_the_cpu_is_refused_outside_of_the_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "IS_INTERPRETED", False)
    model = random_model(**SIZES)
    with pytest.raises(UnsupportedModelError, match=r"^runtime 'triton' runs on an accelerator"):
        Target(model, "triton")
