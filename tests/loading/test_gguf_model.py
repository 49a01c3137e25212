"""GGUF files in their own numbers: the weights, the text, the memory. The files are those of llama.cpp's quantiser."""

import functools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from transformers import PreTrainedModel

from fixtures.make_gguf import FIXTURES, build_fixture, fixture_path
from helpers import gguf_oracle
from helpers.gguf_files import deepen
from helpers.kernels import needs_kernels
from helpers.models import SMALLEST_GAP
from selfspec import Engine, errors, load_model
from selfspec.loading import gguf_early
from selfspec.loading.gguf_file import GgufFile
from selfspec.loading.gguf_header import GgufTensor
from selfspec.memory import BASE_BYTES
from selfspec.runtimes.formats import GGUF_FORMATS
from selfspec.runtimes.packed import LowBitEmbedding, LowBitLinear, PackedWeights
from selfspec.runtimes.target import Target

pytestmark = needs_kernels

NAMES = pytest.mark.parametrize("name", FIXTURES)
NUMBERS = pytest.mark.parametrize(
    "name", [name for name, fixture in FIXTURES.items() if (GGUF_FORMATS.keys() - {"F32", "BF16"}) & {*fixture.types}]
)
FLOAT32, BFLOAT16 = torch.float32, torch.bfloat16
OWN = {"F32": FLOAT32, "BF16": BFLOAT16}
"""Types whose numbers are of a dtype that has kernels."""
MODES = pytest.mark.parametrize(
    ("dtype", "activations"),
    [(FLOAT32, "exact"), (FLOAT32, "int8"), (BFLOAT16, "exact"), (BFLOAT16, "int8")],
    ids=lambda each: str(each).removeprefix("torch."),
)
DTYPES = pytest.mark.parametrize("dtype", [FLOAT32, BFLOAT16], ids=["float32", "bfloat16"])
METHODS: dict[str, dict[str, Any]] = {
    "suffix": {},
    "prompt-lookup": {},
    "uniform": {"skip_ratio": 0.5},
    "clasp": {"schedule": "paper", "skip_ratio": 0.5},
    "auto": {},
}
PROMPTS = [[3, 9, 14, 3, 9, 14, 3, 9], list(range(7, 27)), [5]]
NEW_TOKENS = 32
LAYERS = 6


@functools.cache
def load(name: str, dtype: torch.dtype = FLOAT32, activations: str = "auto") -> Any:
    return load_model(fixture_path(name), dtype=dtype, activations=activations)[0]


def of_few_bits(model: nn.Module) -> dict[str, Any]:
    """The low-bit modules by name; a tied head is left out."""
    found = {
        name: module for name, module in model.named_modules() if isinstance(module, (LowBitLinear, LowBitEmbedding))
    }
    return {name: module for name, module in found.items() if name != "lm_head" or not is_tied(model)}


def is_tied(model: Any) -> bool:
    return bool(model.config.tie_word_embeddings)


def by_transformers(model: PreTrainedModel, prompt: list[int], *, clear: bool = False) -> tuple[int, ...]:
    """What ``generate`` writes; ``clear`` checks that rounding decides no choice."""
    generate: Any = model.generate
    output = generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
        max_new_tokens=NEW_TOKENS,
        do_sample=False,
        pad_token_id=0,
        eos_token_id=None,
        output_logits=True,
        return_dict_in_generate=True,
    )
    best = torch.cat(output.logits).topk(2).values
    assert not clear or float((best[:, 0] - best[:, 1]).min()) > SMALLEST_GAP, "take another prompt"
    return tuple(output.sequences[0, len(prompt) :].tolist())


def written(model: PreTrainedModel, method: str = "autoregressive", **settings: Any) -> list[Any]:
    engine = Engine(model, method=method, settings=settings)
    return [engine.generate(prompt, max_new_tokens=NEW_TOKENS, ignore_eos=True) for prompt in PROMPTS]


# The weights


@NAMES
@DTYPES
def test_all_matrices_keep_the_files_own_numbers(name: str, dtype: torch.dtype) -> None:
    model, wanted, kinds = load(name, dtype), gguf_oracle.weights(name), gguf_oracle.kinds(name)
    found = of_few_bits(model)
    assert {str(module.form) for module in found.values()} == {
        kind for kind in FIXTURES[name].types if OWN.get(kind) != dtype
    }
    assert len(found) == sum(
        "norm" not in path and not path.endswith("bias") and OWN.get(kind) != dtype for path, kind in kinds.items()
    )
    for path, module in found.items():
        assert torch.equal(module.packed.unpack(), wanted[f"{path}.weight"]), path
    for path, parameter in model.named_parameters():
        if not path.endswith("tiles"):
            assert torch.equal(parameter, wanted[path].to(dtype)), path


def test_a_layer_can_have_some_rows_of_a_tensor_in_another_order() -> None:
    """As a projection has of those that a file stores joined."""
    with GgufFile.open(fixture_path("Q4_K")) as file:
        tensor = file.tensors["blk.0.ffn_down.weight"]
        data, form = tensor.data().reshape(tensor.shape[0], -1), GGUF_FORMATS[tensor.type]
        whole = PackedWeights.of_gguf(data, form, (len(data), tensor.shape[1]))
        order = np.arange(200, 100, -1)
        some = PackedWeights.of_gguf(data, form, (len(order), tensor.shape[1]), order)
    assert torch.equal(some.unpack(), whole.unpack(torch.from_numpy(order)))


@NAMES
def test_a_tied_head_is_the_table_of_the_embedding_and_a_head_of_its_own_is_not(name: str) -> None:
    model = load(name)
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    own = "tiles" if isinstance(head, LowBitLinear) else "weight"
    assert (getattr(head, own) is getattr(embedding, own)) == FIXTURES[name].tied


@NAMES
@DTYPES
def test_unpacked_weights_are_ordinary_ones(name: str, dtype: torch.dtype) -> None:
    model, _ = load_model(fixture_path(name), dtype=dtype, unpack=True)
    wanted = gguf_oracle.dequantised(name).state_dict()
    assert not of_few_bits(model)
    assert model.state_dict().keys() == wanted.keys()
    for path, weight in model.state_dict().items():
        assert torch.equal(weight, wanted[path].to(dtype)), path


def test_auto_is_the_dtype_of_the_matrices_or_bfloat16_where_they_have_few_bits() -> None:
    wanted = {"F32": FLOAT32, "F16": BFLOAT16, "BF16": BFLOAT16, "Q4_K_M": BFLOAT16}
    for name, dtype in wanted.items():
        model, _ = load_model(fixture_path(name))
        assert model.dtype == model.config.dtype == dtype
    assert load_model(fixture_path("F16"), unpack=True)[0].dtype == torch.float16


def test_low_bit_weights_are_made_of_the_unpacked_ones() -> None:
    made, _ = load_model(fixture_path("Q6_K"), dtype="float32", weights="int4")
    assert Target(made).weights == "4 bits and 8 bits (float32)"
    assert Target(load("Q4_K_M")).weights == "Q4_K and Q6_K (float32)"


def test_rows_have_8_bits_where_a_file_runs_in_bfloat16_unless_they_are_to_be_exact() -> None:
    found = {
        (dtype, activations): Target(load("Q5_K", dtype, activations)).weights
        for dtype in (FLOAT32, BFLOAT16)
        for activations in ("auto", "exact", "int8")
    }
    short = {key for key, weights in found.items() if "int8 activations" in weights}
    assert short == {(FLOAT32, "int8"), (BFLOAT16, "int8"), (BFLOAT16, "auto")}
    for activations in ("four", ""):
        with pytest.raises(errors.InvalidParameterError, match="auto or exact or int8"):
            load_model(fixture_path("Q5_K"), activations=activations)
    with pytest.raises(errors.UnsupportedModelError, match="activations int8 need weights of few bits"):
        load_model(fixture_path("Q5_K"), activations="int8", unpack=True)


def test_half_precision_has_no_kernels_and_unpacks() -> None:
    model, _ = load_model(fixture_path("Q4_0"), dtype="float16")
    assert not of_few_bits(model)
    assert model.dtype == torch.float16


# The text


@pytest.mark.in_turn(3)
@NAMES
def test_in_float32_the_text_is_that_of_the_dequantised_model(name: str) -> None:
    model, oracle = load(name), gguf_oracle.dequantised(name)
    wanted = [by_transformers(oracle, prompt, clear=True) for prompt in PROMPTS]
    plain, suffix = written(model), written(model, "suffix")
    assert [each.token_ids for each in plain] == [each.token_ids for each in suffix] == wanted
    assert sum(each.drafted for each in suffix) > 0
    assert sum(each.accepted for each in suffix) > 0


@pytest.mark.in_turn(3)
@NAMES
def test_transformers_own_generate_writes_what_the_engine_writes(name: str) -> None:
    model = load(name)
    assert [each.token_ids for each in written(model)] == [by_transformers(model, prompt) for prompt in PROMPTS]


@pytest.mark.in_turn(3)
@NUMBERS
@pytest.mark.parametrize("activations", ["exact", "int8"])
def test_in_bfloat16_every_method_writes_plain_decodings_text(name: str, activations: str, tmp_path: Path) -> None:
    path = deepen(fixture_path(name), tmp_path / "deep.gguf", LAYERS)
    model, _ = load_model(path, dtype="bfloat16", activations=activations)
    plain = written(model)
    for method, settings in METHODS.items():
        found = written(model, method, **settings)
        assert [each.token_ids for each in found] == [each.token_ids for each in plain], method
        assert method == "auto" or sum(each.drafted for each in found) > 0, method


@NUMBERS
@MODES
@torch.inference_mode()
def test_rows_in_company_have_the_bits_of_rows_alone(name: str, dtype: torch.dtype, activations: str) -> None:
    target, length = Target(load(name, dtype, activations)), 40
    ids = torch.randint(100, (length,), generator=torch.Generator().manual_seed(0))

    def run(*chunks: int) -> list[torch.Tensor]:
        state, states = target.new_sequence(length, length, length), []
        for part in ids.split(list(chunks)):
            forward = target.lay_out(state, len(part))
            states.append(target.run(target.embed(part), range(target.sublayer_count), forward).hidden_states)
            state.cache.commit(range(len(part)))
        return [torch.cat(states), torch.cat([target.logits(each) for each in states])]

    alone = run(*[1] * length)
    for chunks in ([length], [8] * 5, [1, 2, 3, 4, 5, 6, 7, 12]):
        for one, other in zip(alone, run(*chunks), strict=True):
            assert torch.equal(one, other)


# Rows of 8 bits


def logits(model: PreTrainedModel) -> torch.Tensor:
    with torch.inference_mode():
        output: Any = model(torch.tensor([PROMPTS[1]]))
    return output.logits[0].float()


@NUMBERS
def test_rows_of_8_bits_give_nearly_the_same_logits_and_not_the_same(name: str) -> None:
    exact, short = (logits(load(name, FLOAT32, activations)) for activations in ("exact", "int8"))
    wanted = logits(gguf_oracle.dequantised(name))
    error = (short - wanted).norm() / wanted.norm()
    assert (exact - wanted).norm() <= 1e-4 * wanted.norm()
    assert 1e-4 < error < 0.03


def rounded(rows: torch.Tensor) -> torch.Tensor:
    """Rows as they are multiplied: integers of 8 bits times a scale for each block of 32."""
    blocks = rows.float().unflatten(-1, (-1, 32))
    scales = blocks.abs().amax(-1, keepdim=True) / 127
    return (torch.round(blocks / scales) * scales).flatten(-2)


@NUMBERS
def test_a_product_is_that_of_rows_rounded_to_8_bits(name: str) -> None:
    for path, layer in of_few_bits(load(name, FLOAT32, "int8")).items():
        if isinstance(layer, LowBitLinear):
            rows = torch.randn(5, layer.in_features, generator=torch.Generator().manual_seed(1))
            bias = 0 if layer.bias is None else layer.bias
            wanted = rounded(rows).double() @ layer.packed.unpack().double().T + bias
            assert torch.allclose(layer(rows).double(), wanted, rtol=1e-4, atol=1e-3 * float(wanted.std())), path


# Memory


@NAMES
@DTYPES
def test_the_weights_are_held_once_in_the_bytes_of_their_formats(name: str, dtype: torch.dtype) -> None:
    model, found = load(name, dtype), of_few_bits(load(name, dtype))
    packed = sum(module.form.bytes(*module.packed.unpack().shape) for module in found.values())
    like = build_fixture(FIXTURES[name]).named_parameters()
    others = sum(weight.numel() for path, weight in like if path.removesuffix(".weight") not in found)
    assert sum(parameter.nbytes for parameter in model.parameters()) == packed + others * dtype.itemsize
    engine = Engine(model, method="suffix")
    engine.generate(PROMPTS[0], max_new_tokens=4, ignore_eos=True)
    assert sum(parameter.nbytes for parameter in model.parameters()) == packed + others * dtype.itemsize


@NAMES
@pytest.mark.parametrize("unpack", [False, True], ids=["packed", "unpacked"])
def test_the_pages_of_the_file_are_given_back(name: str, unpack: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each tensor's as it has been read, and the mapping at the end, which nothing of the model shows."""
    read: list[str] = []
    released: list[str] = []
    data, release = GgufTensor.data, GgufTensor.release

    def reading(tensor: GgufTensor) -> Any:
        assert len(set(read) - set(released)) <= 1
        read.append(tensor.name)
        return data(tensor)

    def releasing(tensor: GgufTensor) -> None:
        released.append(tensor.name)
        release(tensor)

    monkeypatch.setattr(GgufTensor, "data", reading)
    monkeypatch.setattr(GgufTensor, "release", releasing)
    model, _ = load_model(fixture_path(name), dtype="float32", unpack=unpack)
    assert set(read) == set(released) == gguf_oracle.kinds(name).keys()
    if (maps := Path("/proc/self/maps")).exists():
        assert str(fixture_path(name)) not in maps.read_text()
    assert model.dtype == FLOAT32


@pytest.mark.parametrize("unpack", [False, True], ids=["packed", "unpacked"])
def test_too_little_memory_is_said_before_anything_is_read(unpack: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    path = fixture_path("Q4_K_M")
    weights = sum(parameter.nbytes for parameter in load_model(path, unpack=unpack)[0].parameters())
    needed = weights + BASE_BYTES
    monkeypatch.setattr(gguf_early, "available_bytes", lambda: needed)
    load_model(path, unpack=unpack)
    monkeypatch.setattr(gguf_early, "available_bytes", lambda: needed - 1)
    read: list[str] = []  # in whichever thread
    monkeypatch.setattr(GgufTensor, "data", lambda tensor: read.append(tensor.name))
    with pytest.raises(errors.OutOfMemoryError, match=f"{needed:,} bytes, but {needed - 1:,} are available"):
        load_model(path, unpack=unpack)
    assert not read


def test_a_file_that_the_system_says_nothing_about_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gguf_early, "available_bytes", lambda: None)
    with GgufFile.open(fixture_path("Q8_0")) as file:
        assert gguf_early.auto_dtype(file, packed=True) == load_model(fixture_path("Q8_0"))[0].dtype
