"""Quantised targets: what they compute, that nothing is lost against them, their memory, and what is refused."""

import functools
import gc
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    Olmo2Config,
    Olmo2ForCausalLM,
)

import selfspec
from helpers.kernels import needs_kernels
from helpers.low_bit_model import SIZES, random_model
from helpers.models import build
from selfspec import Engine, errors
from selfspec.model.forward import Forward
from selfspec.runtimes import quantise
from selfspec.runtimes.packed import LowBitEmbedding, LowBitLinear
from selfspec.runtimes.precision import Precision
from selfspec.runtimes.shadow_head import ShadowHead
from selfspec.runtimes.target import Target, fingerprint

pytestmark = needs_kernels

WEIGHTS = pytest.mark.parametrize("weights", ["int8", "int4"])
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
METHODS: dict[str, dict[str, Any]] = {
    "autoregressive": {},
    "uniform": {"skip_ratio": 0.3},
    "low-bit": {"head_bits": 4},
    "suffix": {},
    "clasp": {},
}
PROMPTS = [list(range(7, 27)), [3, 9] * 12, [5]]


@functools.cache
def quantised(weights: str, dtype: torch.dtype = torch.float32) -> LlamaForCausalLM:
    return selfspec.quantise(random_model(dtype), weights)


def plain_text(model: Any, prompt: Sequence[int], count: int) -> list[int]:
    """What transformers' own greedy ``generate`` writes."""
    ids = torch.tensor([prompt])
    output = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=count,
        do_sample=False,
        pad_token_id=0,
        eos_token_id=None,
    )
    return output[0, len(prompt) :].tolist()


def dequantised(model: LlamaForCausalLM) -> LlamaForCausalLM:
    """The oracle: ordinary layers in float32 that hold integers times scales."""
    oracle = type(model)(model.config).eval().float()
    weights = {name: tensor for name, tensor in model.state_dict().items() if not name.endswith("tiles")}
    for name, module in model.named_modules():
        if isinstance(module, LowBitLinear):
            weights[f"{name}.weight"] = module.packed.unpack()
        elif isinstance(module, LowBitEmbedding):
            weights[f"{name}.weight"] = module(torch.arange(module.num_embeddings))
    oracle.load_state_dict(weights)
    return oracle


# What it computes


@WEIGHTS
@torch.inference_mode()
def test_it_is_the_model_with_rounded_weights(weights: str) -> None:
    model, ids = quantised(weights), torch.tensor([PROMPTS[0]])
    wanted, own = dequantised(model)(ids).logits, random_model()(ids).logits
    assert (model(ids).logits - wanted).norm() <= 2e-3 * wanted.norm()
    assert (own - wanted).norm() > 2e-3 * wanted.norm(), "the weights have been rounded"


@WEIGHTS
def test_the_names_mean_bits(weights: str) -> None:
    model = quantised(weights)
    found = {name: module.form.bits for name, module in model.named_modules() if isinstance(module, LowBitLinear)}
    assert found.pop("lm_head") == model.model.embed_tokens.form.bits == 8
    assert set(found.values()) == {int(weights.removeprefix("int"))}
    assert len(found) == 7 * len(model.model.layers)
    assert "bits" in Target(model).weights


@WEIGHTS
@pytest.mark.parametrize("method", METHODS)
def test_greedy_text_is_that_of_transformers(weights: str, method: str) -> None:
    model = quantised(weights)
    engine = Engine(model, method=method, settings=METHODS[method])
    drafted = accepted = 0
    for prompt in PROMPTS:
        found = engine.generate(prompt, max_new_tokens=40, ignore_eos=True)
        assert list(found.token_ids) == plain_text(model, prompt, 40)
        drafted, accepted = drafted + found.drafted, accepted + found.accepted
    assert (accepted > 0) == (drafted > 0) == (method != "autoregressive")


@WEIGHTS
@DTYPES
@pytest.mark.parametrize("method", METHODS)
def test_methods_write_what_plain_decoding_writes_alone_and_together(
    weights: str, dtype: torch.dtype, method: str
) -> None:
    model = quantised(weights, dtype)
    plain, engine = Engine(model, method="autoregressive"), Engine(model, method=method, settings=METHODS[method])
    wanted = [plain.generate(prompt, max_new_tokens=30, ignore_eos=True).token_ids for prompt in PROMPTS]
    alone = [engine.generate(prompt, max_new_tokens=30, ignore_eos=True).token_ids for prompt in PROMPTS]
    together = [each.token_ids for each in engine.generate(PROMPTS, max_new_tokens=30, ignore_eos=True)]
    assert alone == together == wanted


@WEIGHTS
@DTYPES
@torch.inference_mode()
def test_rows_are_the_same_bits_in_any_number(weights: str, dtype: torch.dtype) -> None:
    target, length = Target(quantised(weights, dtype)), 230
    ids = torch.randint(128, (length,), generator=torch.Generator().manual_seed(0))

    def run(*chunks: int) -> list[torch.Tensor]:
        state, states, first = target.new_sequence(length, length, length), [], 0
        for count in chunks:
            stream = target.embed(ids[first : first + count])
            states.append(target.run(stream, range(target.sublayer_count), target.lay_out(state, count)).hidden_states)
            state.cache.commit(range(count))
            first += count
        joined = torch.cat(states)
        scores = torch.cat([target.logits(each) for each in states])
        return [joined, scores, *(keys[..., :length, :].clone() for keys in (*state.cache.keys, *state.cache.values))]

    whole = run(length)
    for chunks in ([1] * length, [100, 130], [7, 200, 23]):
        for one, other in zip(whole, run(*chunks), strict=True):
            assert torch.equal(one, other)


@torch.inference_mode()
def test_a_long_prompt_beside_single_rows() -> None:
    target = Target(quantised("int4", torch.bfloat16))
    ids = torch.randint(128, (180,), generator=torch.Generator().manual_seed(2))
    states = [target.new_sequence(180, 180, 180) for _ in range(3)]
    parts = [ids, ids[:1], ids[40:45]]
    streams = [target.embed(part) for part in parts]
    forwards = [target.lay_out(state, len(part)) for state, part in zip(states, parts, strict=True)]
    every = range(target.sublayer_count)
    together = target.run(torch.cat(streams), every, Forward.join(forwards)).hidden_states.split([180, 1, 5])
    for stream, part, found in zip(streams, parts, together, strict=True):
        alone = target.new_sequence(180, 180, 180)
        assert torch.equal(found, target.run(stream, every, target.lay_out(alone, len(part))).hidden_states)


@torch.inference_mode()
def test_an_lm_head_in_slices() -> None:
    target = Target(quantised("int4"))
    states = torch.randn(5, target.hidden_size)
    tokens, confidences = ShadowHead(target, memory=1).read(states)
    assert ShadowHead(target, memory=1).one_pass
    probabilities = torch.softmax(target.logits(states), -1)
    assert torch.equal(tokens, probabilities.argmax(-1))
    assert torch.allclose(confidences, probabilities.amax(-1), atol=1e-5)


@pytest.mark.parametrize("tied", [True, False])
@torch.inference_mode()
def test_head_and_embedding_share_a_table_where_they_did(tied: bool) -> None:
    config = {**random_model().config.to_dict(), "tie_word_embeddings": tied, "attention_bias": True}
    torch.manual_seed(1)
    model = LlamaForCausalLM(LlamaConfig(**config)).eval()
    made = selfspec.quantise(model, "int4")
    head, embedding = made.lm_head, made.model.embed_tokens
    assert (head.tiles is embedding.tiles) == tied
    rows = embedding(torch.tensor([[3, 127], [0, 3]]))
    assert torch.equal(rows[0, 0], rows[1, 1])
    for wrong in ([128], [4, -1]):
        with pytest.raises(IndexError, match="128 rows"):
            embedding(torch.tensor(wrong))
    assert embedding(torch.tensor([], dtype=torch.long)).shape == (0, 64)
    assert (rows[0, 1] - model.model.embed_tokens.weight[127]).abs().max() < 0.01
    assert Target(made).parameter_count == Target(model).parameter_count
    found = Engine(made, method="autoregressive").generate(PROMPTS[0], max_new_tokens=16, ignore_eos=True)
    assert list(found.token_ids) == plain_text(made, PROMPTS[0], 16)


def test_norms_after_the_branches() -> None:
    config = Olmo2Config(**{**random_model().config.to_dict(), "model_type": "olmo2"})
    torch.manual_seed(1)
    made = selfspec.quantise(Olmo2ForCausalLM(config).eval(), "int8")
    found = Engine(made, method="uniform").generate(PROMPTS[0], max_new_tokens=16, ignore_eos=True)
    assert list(found.token_ids) == plain_text(made, PROMPTS[0], 16)


@WEIGHTS
@pytest.mark.parametrize("family", ["gemma", "gemma2", "gemma3_text", "vaultgemma"])
def test_an_embedding_that_scales_what_it_looks_up(family: str, weights: str) -> None:
    """Its scale is a buffer, of which a check of shapes alone knows no value."""
    sizes = {**SIZES, "head_dim": 32, "attn_implementation": "eager", "query_pre_attn_scalar": 32}
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **sizes)).eval()
    made = selfspec.quantise(model, weights)
    assert isinstance(made.get_output_embeddings(), LowBitLinear)
    found = Engine(made, method="uniform").generate(PROMPTS[0], max_new_tokens=16, ignore_eos=True)
    assert list(found.token_ids) == plain_text(made, PROMPTS[0], 16)
    assert found.drafted > 0


def test_parts_keep_their_weights_at_16_bits() -> None:
    model = selfspec.quantise(random_model(), Precision(mlp=4))
    assert type(model.lm_head) is nn.Linear
    assert type(model.model.layers[0].self_attn.q_proj) is nn.Linear
    assert type(model.model.layers[0].mlp.up_proj) is LowBitLinear
    found = Engine(model, method="autoregressive").generate(PROMPTS[0], max_new_tokens=16, ignore_eos=True)
    assert list(found.token_ids) == plain_text(model, PROMPTS[0], 16)
    assert selfspec.quantise(model, Precision()) is model


def test_custom_generate_takes_it() -> None:
    model, ids = quantised("int8"), torch.tensor([PROMPTS[0]])
    options: dict[str, Any] = {"max_new_tokens": 20, "do_sample": False, "pad_token_id": 0}
    found = model.generate(
        ids, attention_mask=torch.ones_like(ids), custom_generate=selfspec.custom_generate, **options
    )
    assert found.tolist() == model.generate(ids, attention_mask=torch.ones_like(ids), **options).tolist()


# Memory


@torch.inference_mode()
def test_the_given_model_stays_as_it_is() -> None:
    model, ids = random_model(torch.bfloat16), torch.tensor([PROMPTS[0]])
    before, weights = model(ids).logits, list(model.parameters())
    engine = Engine(model, weights="int4")
    assert engine.target.model is not model
    assert all(one is other for one, other in zip(model.parameters(), weights, strict=True))
    assert torch.equal(model(ids).logits, before)


def test_the_original_weights_are_given_back() -> None:
    model = random_model(torch.bfloat16)
    bytes_before = sum(parameter.nbytes for parameter in model.parameters())
    linears = [weakref.ref(module.weight) for module in model.modules() if isinstance(module, nn.Linear)]
    expected = quantise.quantised_bytes(model, "int4")
    engine = Engine(quantise.quantise_in_place(model, "int4"))
    gc.collect()
    assert all(linear() is None for linear in linears)
    parameters = list(engine.target.model.parameters())
    norms = sum(parameter.nbytes for parameter in parameters if parameter.is_floating_point())
    assert sum(parameter.nbytes for parameter in parameters) - norms == expected < 0.4 * bytes_before


def test_an_engine_frees_the_model_that_is_dropped() -> None:
    model = random_model(torch.bfloat16)
    weight = weakref.ref(model.lm_head.weight)
    engine = Engine(model, weights="int8")
    del model
    gc.collect()
    assert weight() is None
    assert engine.generate([1, 2], max_new_tokens=3, ignore_eos=True).new_token_count == 3


# Another target


def test_state_and_profiles_know_that_it_is_another_target(tmp_path: Path) -> None:
    model = random_model()
    prints = [fingerprint(Target(each))["weights"] for each in (model, quantised("int8"), quantised("int4"))]
    assert len(set(prints)) == 3
    assert fingerprint(Target(selfspec.quantise(model, "int8")))["weights"] == prints[1]
    engine = Engine(model, method="swift")
    engine.generate(PROMPTS[0], max_new_tokens=30, ignore_eos=True)
    engine.save_state(tmp_path / "state")
    with pytest.raises(errors.StateError):
        Engine(model, method="swift", weights="int8").load_state(tmp_path / "state")


def test_drafts_have_fewer_bits_than_the_target() -> None:
    target = Target(quantised("int8"))
    assert target.low_bit_bytes(Precision.of(4)) > 0
    assert target.low_bit_bytes(Precision(attention=8, mlp=4)) == target.low_bit_bytes(Precision(mlp=4))
    with pytest.raises(errors.UnsupportedModelError, match="have 8 bits themselves"):
        target.check_low_bit(Precision.of(8))


# What is refused


def test_weights_that_do_not_exist() -> None:
    for make in (lambda: Engine(random_model(), weights="int5"), lambda: selfspec.load_model("no-model", weights="4")):
        with pytest.raises(errors.InvalidParameterError, match="int8, int4"):
            make()


def test_a_model_without_low_bit_kernels() -> None:
    for name, size in (("mixtral", 16), ("starcoder2", 16), ("gemma3", 24)):
        with pytest.raises(errors.UnsupportedModelError, match=f"native form.*its heads have {size} numbers"):
            selfspec.quantise(build(name), "int8")
    with pytest.raises(errors.UnsupportedModelError, match=r"native form.*its dtype is float16"):
        selfspec.quantise(random_model(torch.float16), "int8")


def test_groups_that_do_not_divide() -> None:
    with pytest.raises(errors.UnsupportedModelError, match="do not divide into groups of 128"):
        selfspec.quantise(random_model(), Precision.of(8, group=128))


def test_a_model_that_is_quantised_already() -> None:
    with pytest.raises(errors.UnsupportedModelError, match="quantised already"):
        selfspec.quantise(quantised("int8"), "int4")


def test_too_little_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    model = random_model()
    needed = quantise.quantised_bytes(model, "int8")
    monkeypatch.setattr("selfspec.memory.available_bytes", lambda: needed - 1)
    made: list[Any] = []
    monkeypatch.setattr(quantise.PackedWeights, "of", lambda *given: made.append(given))
    with pytest.raises(errors.OutOfMemoryError, match=f"{needed:,} bytes .* {needed - 1:,} are available"):
        selfspec.quantise(model, "int8")
    assert not made


def test_a_method_that_was_made_for_other_weights() -> None:
    model = random_model()
    method = Engine(model, method="uniform").method
    with pytest.raises(errors.InvalidParameterError, match="weights of its own"):
        Engine(model, method=method, weights="int8")


def test_a_model_without_its_weights() -> None:
    with pytest.raises(errors.UnsupportedModelError, match="meta"):
        Target(random_model().to("meta"))
