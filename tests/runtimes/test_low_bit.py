"""Low-bit weights: their format against a slow oracle, rows of any company, mixed precisions, and what is refused."""

import functools
import gc
import threading
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen3Config, StableLmConfig

from helpers.kernels import needs_kernels
from helpers.low_bit_model import random_model
from selfspec import loading
from selfspec.errors import InvalidSettingError, OutOfMemoryError, UnsupportedModelError
from selfspec.gpu import packing
from selfspec.model.forward import Forward
from selfspec.runtimes import kernels, products
from selfspec.runtimes.formats import GROUPS, LOW_BITS, PackedFormat
from selfspec.runtimes.packed import PackedWeights, look_up
from selfspec.runtimes.precision import Precision
from selfspec.runtimes.products import CompiledProduct, LowBitProduct, Product
from selfspec.runtimes.quantise import quantise_in_place
from selfspec.runtimes.runner import Runner
from selfspec.runtimes.target import Target

pytestmark = needs_kernels

LAYERS = 3
SIZES: dict[str, Any] = {
    "vocab_size": 97,  # no multiple of the weight rows that stand side by side
    "hidden_size": 192,  # 1.5 groups of 128
    "intermediate_size": 320,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 512,
}
CONFIGS: dict[str, Any] = {
    "llama": functools.partial(LlamaConfig, **SIZES),
    "biases": functools.partial(LlamaConfig, **SIZES, attention_bias=True, mlp_bias=True),
    "head-norms": functools.partial(Qwen3Config, **SIZES),
}
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
BITS = pytest.mark.parametrize("bits", LOW_BITS)
EVERYTHING = tuple(range(2 * LAYERS))


@functools.cache
def target(name: str = "llama", dtype: torch.dtype = torch.bfloat16, runtime: str = "compiled") -> Target:
    torch.manual_seed(3)
    made = AutoModelForCausalLM.from_config(CONFIGS[name](), dtype=dtype).eval()
    with torch.no_grad():
        for parameter_name, parameter in made.named_parameters():
            if parameter.dim() == 1:
                parameter.add_(0.1 * torch.randn(parameter.shape))
            elif "embed" in parameter_name:
                parameter.mul_(20)
    return Target(made, runtime)


# The format


def groups_of(weight: torch.Tensor, form: PackedFormat) -> list[torch.Tensor]:
    """The weights of each group, ``[outputs, inputs of the group]``."""
    return list(weight.float().split(form.group, dim=1))


def codes_and_scale(group: torch.Tensor, bits: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The integers and the scale of a group: of some scales that of least squared error."""
    lowest = -(2 ** (bits - 1))
    greatest, least = group.amax(1, keepdim=True), group.amin(1, keepdim=True)
    largest = torch.where(greatest > -least, greatest, least)
    best: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None
    for step in (0, -4, -2, -1, 1, 3) if bits == 4 else (0, -3, 3):
        scale = (largest / (lowest + 0.3 * step)).bfloat16().float()
        codes = torch.where(scale == 0, 0, group * (1 / scale)).nan_to_num().round().clamp(lowest, -lowest - 1)
        error = (group - codes * scale).double().square().sum(1, keepdim=True)
        if best is None:
            best = codes, scale, error
        else:
            better = error < best[2]
            best = tuple(torch.where(better, new, old) for new, old in zip((codes, scale, error), best, strict=True))
    assert best is not None
    return best[0], best[1]


def oracle(weight: torch.Tensor, form: PackedFormat) -> torch.Tensor:
    """The weights of a copy in float32, ``[outputs, inputs]``."""
    pieces = [codes_and_scale(group, form.bits) for group in groups_of(weight, form)]
    return torch.cat([codes * scale for codes, scale in pieces], dim=1)


def packed_product(weight: torch.Tensor, form: PackedFormat, bias: torch.Tensor | None = None) -> CompiledProduct:
    """The product of a copy of weights ``[outputs, inputs]``."""
    return CompiledProduct(LowBitProduct([PackedWeights.of(weight, form)], weight.dtype, bias))


def unpacked(weight: torch.Tensor, form: PackedFormat) -> torch.Tensor:
    """The weights that the kernels read, ``[outputs, inputs]``: what single ones among zeros give."""
    return packed_product(weight.float(), form)(torch.eye(weight.shape[1])).T


@BITS
@pytest.mark.parametrize("group", GROUPS)
def test_unpacked_in_python_they_are_what_the_kernels_read(bits: int, group: int) -> None:
    weight = random_weight(70, 3 * group)
    form = PackedFormat(bits, group)
    packed, read = PackedWeights.of(weight, form), unpacked(weight, form)
    assert torch.equal(packed.unpack(), read)
    some = torch.tensor([69, 0, 17, 17])
    assert torch.equal(packed.unpack(some), read[some])
    for dtype in (torch.float32, torch.bfloat16):
        assert torch.equal(look_up([packed], some, dtype), read[some].to(dtype))
    assert torch.equal(packed.rows(32, 32).unpack(), read[32:64])
    assert torch.equal(packed.rows(64, 64).unpack(), read[64:])


def random_weight(outputs: int, inputs: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    torch.manual_seed(outputs + inputs)
    weight = 0.02 * torch.randn(outputs, inputs) * (1 + torch.rand(outputs, 1) * 100)
    weight[outputs // 2, : inputs // 2] = 0  # groups without a scale
    weight[0, inputs // 3] = 7.0  # one value that stands out
    return weight.to(dtype)


@BITS
@pytest.mark.parametrize("group", GROUPS)
@DTYPES
def test_low_bit_weights_are_those_of_the_oracle(bits: int, group: int, dtype: torch.dtype) -> None:
    form = PackedFormat(bits, group)
    for outputs, inputs in ((5, group), (33, 3 * group), (64, 384)):
        weight = random_weight(outputs, inputs, dtype)
        found, wanted = unpacked(weight, form), oracle(weight, form)
        differs = (found != wanted).any(1)
        assert differs.float().mean() < 0.05, "only where two scales are equally good"
        errors = [(weight.float() - copy).square().sum() for copy in (found, wanted)]
        assert errors[0] <= errors[1] * (1 + 1e-5)


@BITS
@pytest.mark.parametrize("group", GROUPS)
def test_values_are_rounded_to_the_nearest_of_few(bits: int, group: int) -> None:
    weight, form = random_weight(24, 256), PackedFormat(bits, group)
    copies = groups_of(unpacked(weight, form), form)
    for own, copied in zip(groups_of(weight, form), copies, strict=True):
        largest = own.abs().amax(1)
        step = 1.15 * largest / 2 ** (bits - 1)
        # Half a step, or what is cut off at the end of the range.
        assert ((own - copied).abs().amax(1) <= 1.6 * step + 1e-9).all()
        assert ((own - copied).square().mean(1).sqrt() <= 0.6 * step + 1e-9).all()
        assert all(len(row.unique()) <= 2**bits for row in copied)


def test_more_bits_are_nearer() -> None:
    weight = random_weight(64, 256)
    errors = [(unpacked(weight, PackedFormat(bits)) - weight).norm() / weight.norm() for bits in LOW_BITS]
    assert 0 < errors[0] < errors[1] < errors[2] < 0.15
    assert errors[0] < 0.01


def test_a_search_is_better_than_the_end_of_the_range() -> None:
    torch.manual_seed(0)
    weight = torch.randn(64, 512)
    groups = groups_of(weight, PackedFormat(4))
    plain = []
    for group in groups:
        largest = group.gather(1, group.abs().argmax(1, keepdim=True))
        scale = (largest / -8).bfloat16().float()
        plain.append(scale * (group / scale).round().clamp(-8, 7))
    error = (unpacked(weight, PackedFormat(4)) - weight).norm()
    assert error < 0.95 * (torch.cat(plain, 1) - weight).norm()


@BITS
@DTYPES
def test_a_product_is_that_of_the_copied_weights(bits: int, dtype: torch.dtype) -> None:
    for outputs, inputs, group in ((40, 96, 32), (17, 1536, 64), (100, 576, 32), (16, 128, 128)):
        weight = random_weight(outputs, inputs, dtype)
        bias, form = torch.randn(outputs).to(dtype), PackedFormat(bits, group)
        dense = unpacked(weight, form)
        product = packed_product(weight, form, bias)
        for rows in (1, 3, 7, 100):
            given = (torch.randn(rows, inputs) * torch.logspace(-3, 3, inputs)).to(dtype)
            found = product(given).float()
            wanted = functional.linear(given.double(), dense.double(), bias.double())
            # Small values of a block are rounded to 2^-15 of its largest; results to the dtype.
            bound = functional.linear(given.double().abs(), dense.double().abs()) * 2e-4
            bound += wanted.abs() * (2**-8 if dtype == torch.bfloat16 else 1e-5)
            assert ((found - wanted).abs() <= bound).all()


@BITS
@DTYPES
def test_a_row_does_not_depend_on_the_others(bits: int, dtype: torch.dtype) -> None:
    product = packed_product(random_weight(90, 2112, dtype), PackedFormat(bits, 64))
    rows = torch.randn(200, 2112).to(dtype)
    single = torch.cat([product(row[None]) for row in rows])
    for count in [*range(1, 41), 96, 97, 200]:
        assert torch.equal(product(rows[:count]), single[:count])
    assert torch.equal(product(rows[50:], widest=3), single[50:])


@BITS
def test_threads_change_nothing(bits: int) -> None:
    weight, form = random_weight(3000, 512), PackedFormat(bits)
    rows = torch.randn(7, 512)
    assert torch.get_num_threads() == 1
    single = packed_product(weight, form)(rows)
    torch.set_num_threads(3)
    try:
        threaded = packed_product(weight, form)(rows)
    finally:
        torch.set_num_threads(1)
    assert torch.equal(single, threaded)


@BITS
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_what_is_no_number_stays_none(bits: int, value: float) -> None:
    rows = torch.ones(3, 64)
    rows[1, 40] = value
    found = packed_product(random_weight(20, 64), PackedFormat(bits))(rows)
    assert not torch.isfinite(found[1]).any()
    assert torch.isfinite(found[[0, 2]]).all()


@BITS
@pytest.mark.parametrize("pack", [PackedWeights.of, packing.pack], ids=["kernels", "torch"])
def test_very_large_weights_and_infinite_ones_are_not_lost(
    bits: int, pack: Callable[[torch.Tensor, PackedFormat], PackedWeights]
) -> None:
    weight = torch.full((16, 64), 1e25)  # whose squared errors are infinite
    weight[:, ::2] *= 0.33
    assert torch.allclose(pack(weight, PackedFormat(bits)).unpack(), weight, rtol=0.5)
    weight[3, 5] = float("inf")
    assert not torch.isfinite(pack(weight, PackedFormat(bits)).unpack()[3, :32]).all()


@BITS
def test_very_small_and_very_large_values(bits: int) -> None:
    product = packed_product(torch.ones(16, 64), PackedFormat(bits))
    for size in (1e-38, 1e-20, 1e20, 1e36):
        rows = torch.full((1, 64), size)
        assert torch.allclose(
            product(rows), torch.full((1, 16), 64 * size), rtol=0.15 if bits == 4 else 0.05, atol=1e-30
        )


# The model


def logits(model: Target | Runner, like: Target, count: int = 12, prompt: int = 20) -> torch.Tensor:
    """Logits of some rows after a prompt that the target reads."""
    state = like.new_sequence(prompt, 128, 128)
    ids = torch.randint(97, (prompt + count,), generator=torch.Generator().manual_seed(prompt))
    like.run(like.embed(ids[:prompt]), EVERYTHING, like.lay_out(state, prompt))
    state.cache.commit(range(prompt))
    output = model.run(like.embed(ids[prompt:]), EVERYTHING, like.lay_out(state, count))
    return model.logits(output.hidden_states)


def copied_by_hand(original: Target, precision: Precision) -> Target:
    """A target whose modules hold the oracle's weights in float32."""
    model = AutoModelForCausalLM.from_config(original.config, dtype=torch.float32).eval()
    model.load_state_dict(original.model.state_dict())
    parts: list[tuple[nn.Module, PackedFormat | None]] = [(model.lm_head, precision.of_head())]
    for index, layer in enumerate(model.model.layers):
        parts += [
            (layer.self_attn, precision.of_sublayer(2 * index)),
            (layer.mlp, precision.of_sublayer(2 * index + 1)),
        ]
    with torch.no_grad():
        for part, form in parts:
            for module in part.modules():
                if isinstance(module, nn.Linear) and form is not None:
                    module.weight.copy_(unpacked(module.weight, form))
    return Target(model, "eager")


class Varied(Precision):
    """Bits of its own for each sublayer."""

    def bits_of(self, sublayer: int) -> int:
        return (16, 4, 6, 8, 16, 4)[sublayer]


PRECISIONS = {
    **{f"{bits}-bits": Precision.of(bits) for bits in LOW_BITS},
    "attention": Precision(attention=4, group=64),
    "mlp": Precision(mlp=6),
    "head": Precision(head=8),
    "apart": Precision(attention=8, mlp=4, head=6),
    "groups": Precision.of(4, 64),
    "varied": Varied(attention=8, mlp=8),
}
NAMED = pytest.mark.parametrize("precision", PRECISIONS.values(), ids=PRECISIONS.keys())


@NAMED
@pytest.mark.parametrize("name", CONFIGS)
@torch.inference_mode()
def test_a_model_is_one_with_the_copied_weights(name: str, precision: Precision) -> None:
    own = target(name, torch.float32)
    wanted = logits(copied_by_hand(own, precision), own)
    found = logits(own.at(precision), own)
    full = logits(own, own)
    assert (found - wanted).norm() <= 2e-3 * wanted.norm()
    assert (full - wanted).norm() > 2 * (found - wanted).norm(), "they are not the target's own weights"


@NAMED
@DTYPES
@torch.inference_mode()
def test_sequences_together_are_each_alone(dtype: torch.dtype, precision: Precision) -> None:
    own = target("llama", dtype)
    model = own.at(precision)
    draw = torch.Generator().manual_seed(1)

    def begin(index: int) -> tuple[torch.Tensor, Forward, Any]:
        state = own.new_sequence(9 + index, 96, 96)
        ids = torch.randint(97, (9 + index + 1 + index % 8,), generator=draw.manual_seed(index))
        own.run(own.embed(ids[: 9 + index]), EVERYTHING, own.lay_out(state, 9 + index))
        state.cache.commit(range(9 + index))
        return own.embed(ids[9 + index :]), own.lay_out(state, 1 + index % 8), state

    alone = []
    for index in range(12):
        stream, forward, state = begin(index)
        states = model.run(stream, EVERYTHING, forward).hidden_states
        alone += [states, model.logits(states), *state.cache.keys, *state.cache.values]
    begun = [begin(index) for index in range(12)]
    joined = Forward.join([forward for _, forward, _ in begun])
    states = model.run(torch.cat([stream for stream, _, _ in begun]), EVERYTHING, joined).hidden_states
    scores = model.logits(states, widest=8)
    together = []
    for rows, (_, _, state) in zip(joined.slices, begun, strict=True):
        together += [states[rows], scores[rows], *state.cache.keys, *state.cache.values]
    for one, other in zip(alone, together, strict=True):
        assert torch.equal(one, other)


@DTYPES
@torch.inference_mode()
def test_rows_at_once_are_rows_one_by_one(dtype: torch.dtype) -> None:
    own = target("llama", dtype)
    model = own.at(Precision.of(4))
    ids = torch.randint(97, (40,), generator=torch.Generator().manual_seed(0))
    state = own.new_sequence(1, 64, 64)
    single = []
    for token in ids:
        single.append(model.run(own.embed(token[None]), EVERYTHING, own.lay_out(state, 1)).hidden_states)
        state.cache.commit(range(1))
    for rows in (2, 7, 40):
        other = own.new_sequence(1, 64, 64)
        together = model.run(own.embed(ids[:rows]), EVERYTHING, own.lay_out(other, rows)).hidden_states
        assert torch.equal(together, torch.cat(single[:rows]))


@torch.inference_mode()
def test_kept_sets_states_and_low_bit_weights() -> None:
    own = target("llama", torch.float32)
    model = own.at(Precision.of(8))
    state = own.new_sequence(1, 64, 64)
    last = torch.zeros(2, own.hidden_size)
    stream = own.embed(torch.arange(5))
    output = model.run(stream, (0, 3, 4), own.lay_out(state, 5), capture=(0, 3, 4, 6), last_rows={4: last})
    assert torch.equal(output.captured[0], stream)
    assert torch.equal(output.captured[6], output.hidden_states)
    assert torch.equal(output.captured[4][3:], last)
    assert not torch.equal(output.captured[3], output.captured[4])
    step = stream
    for index in (0, 3, 4):
        step = model.run(step, (index,), own.lay_out(own.new_sequence(1, 64, 64), 5)).hidden_states
    assert torch.equal(step, output.hidden_states)


@torch.inference_mode()
def test_the_target_stays_as_it_was() -> None:
    own = target("biases")
    before = logits(own, own)
    assert own.at(Precision()) is own.at(None)
    lowered = logits(own.at(Precision.of(4)), own)
    assert torch.equal(logits(own, own), before)
    assert not torch.equal(lowered, before)
    assert torch.equal(logits(own.at(Precision.of(4)), own), lowered)


@torch.inference_mode()
def test_eight_bits_agree_with_a_trained_target() -> None:
    pytest.importorskip("selfspec_lab")
    model, tokenizer = loading.load_model("tiny", dtype="bfloat16")
    own = Target(model)
    state = own.new_sequence(1, 192, 192)
    ids = tokenizer("The library opens at nine. Question: what is 12 + 30?\n", return_tensors="pt").input_ids[0]
    forward = own.run(own.embed(ids), range(own.sublayer_count), own.lay_out(state, len(ids)))
    state.cache.commit(range(len(ids)))
    token, agreed = own.logits(forward.hidden_states[-1:]).argmax(-1), 0
    low = own.at(Precision.of(8))
    for _ in range(100):
        stream, rows = own.embed(token), own.lay_out(state, 1)
        drafted = low.logits(low.run(stream, range(own.sublayer_count), rows).hidden_states).argmax(-1)
        token = own.logits(own.run(stream, range(own.sublayer_count), rows).hidden_states).argmax(-1)
        state.cache.commit(range(1))
        agreed += int(drafted == token)
    assert agreed >= 98


# Making low-bit weights


def tensors_of(model: Any) -> list[tuple[int, int]]:
    return [(module.out_features, module.in_features) for module in model.modules() if isinstance(module, nn.Linear)]


def test_bytes_are_known_before_and_are_those_allocated(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []
    make = PackedWeights.of

    def noted(weight: torch.Tensor, form: PackedFormat, into: PackedWeights) -> PackedWeights:
        made.append((copy := make(weight, form, into=into)).bytes)
        return copy

    monkeypatch.setattr(PackedWeights, "of", noted)
    own = Target(target("llama").model)
    for precision in PRECISIONS.values():
        made.clear()
        expected = own.low_bit_bytes(precision)
        assert not made
        Target(own.model).at(precision)
        assert sum(made) == expected > 0
    assert own.low_bit_bytes(None) == own.low_bit_bytes(Precision()) == 0
    weights = sum(outputs * inputs for outputs, inputs in tensors_of(own.model))
    assert weights * (4 + 16 / 32) / 8 <= own.low_bit_bytes(Precision.of(4)) <= 1.02 * weights * (4 + 16 / 32) / 8


@needs_kernels
def test_low_bit_weights_of_few_bits_are_made_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = (torch.randn(outputs, 64) for outputs in (48, 24))
    parts = [PackedWeights.of(each, PackedFormat(8)) for each in (first, second)]
    product, form = CompiledProduct(LowBitProduct(parts, torch.float32, None)), PackedFormat(4)
    whole = PackedWeights.of(product.values(), form)
    monkeypatch.setattr(products, "_AT_ONCE", 40 * 64)
    assert [len(values) for values in product.pieces()] == [32, 16, 24]
    monkeypatch.setattr(Product, "values", lambda _: pytest.fail("all values at once"))
    own = Target(quantise_in_place(random_model(torch.bfloat16), "int8"))
    own.at(Precision.of(4))
    copy = own._low_bit._convert(product, form)
    assert isinstance(copy, CompiledProduct)
    assert isinstance(copy.product, LowBitProduct)
    assert torch.equal(copy.product.parts[0].tiles, whole.tiles)


def test_low_bit_weights_are_made_once_and_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[PackedFormat] = []
    make = PackedWeights.of

    def noted(weight: torch.Tensor, form: PackedFormat, into: PackedWeights) -> PackedWeights:
        made.append(form)
        return make(weight, form, into=into)

    monkeypatch.setattr(PackedWeights, "of", noted)
    own = Target(target("llama").model)
    first = own.at(Precision.of(4))
    assert len(made) == 4 * LAYERS + 1
    assert own.at(Precision.of(4)) is first
    own.at(Precision(attention=4))
    assert len(made) == 4 * LAYERS + 1
    own.at(Precision(attention=8, mlp=4, head=4))
    assert len(made) == 6 * LAYERS + 1


def test_several_threads_ask_at_once() -> None:
    own = Target(target("llama").model)
    found: list[Any] = []
    barrier = threading.Barrier(6)

    def ask(bits: int) -> None:
        barrier.wait()
        found.append((bits, own.at(Precision.of(bits))))

    threads = [threading.Thread(target=ask, args=(bits,)) for bits in (4, 8) * 3]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 6
    assert len({id(model) for _, model in found}) == 2
    assert all(model is own.at(Precision.of(bits)) for bits, model in found)


@torch.inference_mode()
def test_a_model_in_use_keeps_its_low_bit_weights() -> None:
    own = Target(target().model)
    model = own.at(Precision.of(4))
    copies = [weakref.ref(each.parts[0]) for part in own._low_bit._made.values() for each in map(underlying, part)]
    before = logits(model, own)
    own._low_bit.release(None)
    gc.collect()
    assert all(copy() is not None for copy in copies)
    assert torch.equal(logits(model, own), before)
    del model
    gc.collect()
    assert all(copy() is None for copy in copies)


def underlying(product: Any) -> LowBitProduct:
    """The product of the copy that a compiled product runs."""
    found = product.product
    assert isinstance(found, LowBitProduct)
    return found


@torch.inference_mode()
def test_new_weights_get_new_low_bit_ones() -> None:
    own = Target(AutoModelForCausalLM.from_config(CONFIGS["llama"](), dtype=torch.float32).eval())
    old = logits(own.at(Precision.of(8)), own)
    head = own.model.lm_head
    head.weight = nn.Parameter(-head.weight.detach().clone())
    own.new_sequence(1, 8, 8)  # the next request notices
    assert torch.allclose(logits(own.at(Precision.of(8)), own), -old, atol=1e-3 * float(old.abs().max()))


# What is refused


@pytest.mark.parametrize(
    "wrong",
    [
        lambda: Precision.of(5),
        lambda: Precision.of(0),
        lambda: Precision(attention=True),
        lambda: Precision(mlp=3),
        lambda: Precision(head="8"),  # type: ignore[arg-type]
        lambda: Precision.of(4, 16),
        lambda: Precision.of(4, True),
        lambda: Precision.of(4, 48),
    ],
)
def test_settings_out_of_range(wrong: Any) -> None:
    with pytest.raises(InvalidSettingError):
        wrong()


def test_groups_that_do_not_divide() -> None:
    own = target()
    own.check_low_bit(Precision.of(4, 64))
    for ask in (own.check_low_bit, own.low_bit_bytes, own.at):
        with pytest.raises(UnsupportedModelError, match=r"192 inputs .* groups of 128"):
            ask(Precision.of(4, 128))
    own.check_low_bit(Precision(group=128))


def test_a_runtime_without_kernels() -> None:
    own = Target(target().model, "eager")
    with pytest.raises(UnsupportedModelError, match="kernels"):
        own.check_low_bit(Precision.of(8))
    assert own.at(Precision()) is own.at(None)


def test_models_without_a_native_form() -> None:
    torch.manual_seed(0)
    other = AutoModelForCausalLM.from_config(StableLmConfig(**SIZES, qk_layernorm=True), dtype=torch.float32).eval()
    half = AutoModelForCausalLM.from_config(CONFIGS["llama"](), dtype=torch.float16).eval()
    for model in (other, half):
        with pytest.raises(UnsupportedModelError, match="native form"):
            Target(model).at(Precision.of(8))


def test_without_a_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise kernels.KernelBuildError("there is none")

    monkeypatch.setattr("selfspec.runtimes.products.load", fail)
    with pytest.raises(UnsupportedModelError, match="C\\+\\+ compiler"):
        Target(target().model).check_low_bit(Precision.of(8))


def test_too_little_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    own = Target(target().model)
    needed = own.low_bit_bytes(Precision.of(8))
    monkeypatch.setattr("selfspec.memory.available_bytes", lambda: needed - 1)
    made: list[Any] = []
    monkeypatch.setattr(PackedWeights, "of", lambda *given: made.append(given))
    with pytest.raises(OutOfMemoryError, match=f"{needed:,} bytes, but {needed - 1:,} are available"):
        own.at(Precision.of(8))
    assert not made
    monkeypatch.undo()
    own.at(Precision.of(8))


def test_memory_that_is_not_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("selfspec.memory.available_bytes", lambda: None)
    assert isinstance(Target(target().model).at(Precision.of(8)), Runner)


def test_bytes_of_a_product() -> None:
    assert PackedFormat(4).bytes(20, 64) == 32 * 64 // 2 + 32 * 2 * 2
    assert PackedFormat(8, 64).bytes(20, 64) == 32 * 64 + 32 * 2
