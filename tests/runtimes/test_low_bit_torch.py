"""Low-bit weights that torch multiplies, by the CPU's forms of its products."""

from typing import Any

import pytest
import torch
from torch import nn

from helpers.low_bit_model import SUBLAYERS, random_model
from helpers.models import build
from selfspec import Engine
from selfspec.errors import OutOfMemoryError, UnsupportedModelError
from selfspec.runtimes import low_bit
from selfspec.runtimes.formats import GROUPS, PackedFormat
from selfspec.runtimes.low_bit import TorchLowBitProduct, round_to_integers, torch_bytes
from selfspec.runtimes.precision import Precision
from selfspec.runtimes.products import DenseProduct
from selfspec.runtimes.target import Target

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
BITS = pytest.mark.parametrize("bits", [8, 4])
EVERYTHING = range(SUBLAYERS)


def product_of(outputs: int, inputs: int, dtype: torch.dtype, *, bias: bool = False) -> DenseProduct:
    torch.manual_seed(outputs)
    linear = nn.Linear(inputs, outputs, bias=bias, dtype=dtype)
    with torch.no_grad():
        linear.weight[outputs // 2] = 0
        linear.weight[0, 3] = 2.0
    return DenseProduct(linear.weight.data, None if linear.bias is None else linear.bias.data)


def best_by_hand(group: list[float], bits: int) -> tuple[list[int], float]:
    """The integers and the scale of one group, tried one after the other."""
    lowest = -(2 ** (bits - 1))
    greatest, least = max(group), min(group)
    largest = greatest if greatest > -least else least
    best: tuple[float, list[int], float] | None = None
    for step in (0, -4, -2, -1, 1, 3) if bits == 4 else (0, -3, 3):
        scale = float(torch.tensor(largest / (lowest + 0.3 * step)).bfloat16())
        codes = [0 if scale == 0 else min(max(round(value / scale), lowest), -lowest - 1) for value in group]
        error = sum((value - scale * code) ** 2 for value, code in zip(group, codes, strict=True))
        if best is None or error < best[0]:
            best = error, codes, scale
    assert best is not None
    return best[1], best[2]


@BITS
def test_rounding_is_that_of_trying_scales(bits: int) -> None:
    weight = product_of(6, 64, torch.float32).weight.detach()
    integers, scales = round_to_integers(weight, bits, 32)
    for row in range(6):
        for group in range(2):
            values = weight[row, 32 * group : 32 * group + 32]
            _, scale = best_by_hand(values.tolist(), bits)
            found = integers[row, 32 * group : 32 * group + 32] * scales[row, group].float()
            assert float(scales[row, group]) == pytest.approx(scale, rel=0.05, abs=0)  # one of those tried, or a tie
            wanted = torch.tensor(best_by_hand(values.tolist(), bits)[0]) * scale
            assert float((found - values).square().sum()) == pytest.approx(
                float((wanted - values).square().sum()), rel=1e-4
            )


@BITS
@DTYPES
@pytest.mark.parametrize("outputs", [16, 97])
def test_a_product_is_that_of_the_rounded_weights(bits: int, dtype: torch.dtype, outputs: int) -> None:
    for group in GROUPS:
        product = product_of(outputs, 256, dtype, bias=True)
        made = TorchLowBitProduct(product, PackedFormat(bits, group))
        integers, scales = round_to_integers(product.weight.detach(), bits, group if bits == 4 else 256)
        dense = (integers.view(outputs, scales.shape[1], -1) * scales.float()[..., None]).view(outputs, 256)
        rows = torch.randn(5, 256).to(dtype)
        wanted = rows.double() @ dense.double().T + product.bias.detach().double()  # type: ignore[union-attr]
        assert (made(rows) - wanted).norm() <= (2e-2 if dtype == torch.bfloat16 else 1e-5) * wanted.norm()
        assert (made.values() - dense).norm() <= 1e-2 * dense.norm()
        assert 0 < (dense - product.weight).norm() < 0.2 * product.weight.norm()


@BITS
@DTYPES
def test_bytes_are_known_before_and_are_those_allocated(bits: int, dtype: torch.dtype) -> None:
    for outputs in (16, 97):
        product, form = product_of(outputs, 256, dtype), PackedFormat(bits, 64)
        held = [each for each in vars(TorchLowBitProduct(product, form)).values() if isinstance(each, torch.Tensor)]
        assert sum(each.nbytes for each in held) == torch_bytes(product, form)
    target = Target(random_model(dtype), "fused")
    assert 0 < target.low_bit_bytes(Precision.of(bits)) < 0.6 * sum(each.nbytes for each in target.model.parameters())


@BITS
@DTYPES
def test_drafts_are_cheap_and_the_text_is_the_targets(bits: int, dtype: torch.dtype) -> None:
    model, prompts = random_model(dtype), [list(range(20)), [3, 9, 4] * 5]
    plain = Engine(model, method="autoregressive", runtime="fused")
    engine = Engine(
        model,
        method="low-bit",
        settings={"draft_bits": bits, "joint_confidence": 0.0, "draft_length": 5},
        runtime="fused",
    )
    head = engine.target.at(Precision.of(bits)).head
    assert isinstance(head, TorchLowBitProduct)
    assert head.bits == bits
    drafted = accepted = 0
    for prompt in prompts:
        wanted = plain.generate(prompt, max_new_tokens=40, ignore_eos=True)
        found = engine.generate(prompt, max_new_tokens=40, ignore_eos=True)
        if dtype == torch.float32:
            assert found.token_ids == wanted.token_ids
        drafted, accepted = drafted + found.drafted, accepted + found.accepted
    assert accepted > (0.5 if bits == 8 else 0.1) * drafted > 0
    together = engine.generate(prompts, max_new_tokens=12, ignore_eos=True)
    if dtype == torch.float32:
        assert [each.token_ids for each in together] == [
            plain.generate(prompt, max_new_tokens=12, ignore_eos=True).token_ids for prompt in prompts
        ]


@torch.inference_mode()
def test_parts_at_their_own_precision() -> None:
    own = Target(random_model(), "fused")
    stream = own.embed(torch.arange(5))

    def logits(precision: Precision) -> torch.Tensor:
        model = own.at(precision)
        forward = own.lay_out(own.new_sequence(5, 8, 8), 5)
        return model.logits(model.run(stream, EVERYTHING, forward).hidden_states)

    full = logits(Precision())
    precisions = {"head": Precision(head=8), "mlp": Precision(mlp=4), "all": Precision.of(4)}
    errors = {name: (logits(each) - full).norm() for name, each in precisions.items()}
    assert 0 < errors["head"] < errors["mlp"] < errors["all"]


def test_a_family_without_native_kernels_has_them() -> None:
    model = build("qwen3")
    plain = Engine(model, method="autoregressive", runtime="fused").generate(list(range(9)), max_new_tokens=24)
    found = Engine(model, method="low-bit", settings={"draft_bits": 8}, runtime="fused").generate(
        list(range(9)), max_new_tokens=24
    )
    assert found.token_ids == plain.token_ids
    assert found.accepted > 0


# What is refused


@pytest.mark.parametrize(
    ("precision", "message"),
    [
        (Precision.of(6), "no product of 6 bits"),
        (Precision.of(4, group=128), "do not divide into groups of 128"),
    ],
)
def test_formats_without_a_product(precision: Precision, message: str) -> None:
    with pytest.raises(UnsupportedModelError, match=message):
        Target(random_model(), "fused").check_low_bit(precision)


def test_a_model_without_fused_blocks() -> None:
    with pytest.raises(UnsupportedModelError, match="sublayer 1 of this Mixtral model has no fused form"):
        Target(build("mixtral"), "fused").check_low_bit(Precision.of(8))


def test_too_little_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    own = Target(random_model(), "fused")
    needed = own.low_bit_bytes(Precision.of(8))
    monkeypatch.setattr("selfspec.memory.available_bytes", lambda: needed - 1)
    made: list[Any] = []
    monkeypatch.setattr(low_bit, "TorchLowBitProduct", lambda *given: made.append(given))
    with pytest.raises(OutOfMemoryError, match=f"{needed:,} bytes"):
        own.at(Precision.of(8))
    assert not made
