"""Hybrids in GGUF files: other forms of their tensors, engines from them, and what is refused."""

import contextlib
import copy
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import MODEL_ARCH, GGMLQuantizationType
from transformers import AutoModelForCausalLM

from helpers.gguf_cases import HYBRIDS, assert_same_model, built, logits, open_case, read_model
from helpers.gguf_families import ARCHITECTURES, dequantise, save_family
from helpers.models import prompt
from selfspec import Engine
from selfspec.errors import ModelLoadError, SelfSpecError, SelfSpecWarning, UnsupportedModelError
from selfspec.loading import gguf_model
from selfspec.loading.gguf_families import read_config
from selfspec.loading.gguf_file import GgufFile
from selfspec.loading.gguf_tensors import find_parameters
from selfspec.loading.without_weights import build_on_meta
from selfspec.runtimes.packed import LowBitEmbedding, LowBitLinear, parameter_count

NEW_TOKENS = 24
RUN = pytest.mark.parametrize("case", [case for case in HYBRIDS if "-" not in case])


def read(path: Path, dtype: torch.dtype = torch.float32) -> Any:
    with pytest.MonkeyPatch.context() as patch:  # the file has no tokenizer
        patch.setattr(gguf_model, "read_tokenizer", lambda _: None)
        return gguf_model.read_gguf(path, dtype, packed=True)[0]


@pytest.mark.in_turn(3)
@RUN
def test_an_engine_of_a_file_writes_what_transformers_writes(case: str, tmp_path: Path) -> None:
    assert_same_text(read(save_family(built(case), tmp_path / "model.gguf")), built(case))


def assert_same_text(model: Any, expected: Any) -> None:
    """Compares the text of an engine that drafts with that of transformers."""
    ids = prompt(12)
    options = {"do_sample": False, "max_new_tokens": NEW_TOKENS, "pad_token_id": 0}
    text = expected.generate(torch.tensor([ids]), attention_mask=torch.ones(1, len(ids), dtype=torch.long), **options)
    found = Engine(model, method="uniform", settings={"skip_ratio": 0.3, "confidence_threshold": 0.0}).generate(
        ids, max_new_tokens=NEW_TOKENS, ignore_eos=True
    )
    assert found.token_ids == tuple(text[0, len(ids) :].tolist())
    assert found.drafted > 0
    assert found.accepted > 0


WHOLE = ("mamba", "mamba2", "falcon_mamba", "llama4_text", "nemotron_h-moe")
"""Families whose code reads weights by itself that have few bits: embeddings and heads, or experts."""


@pytest.mark.parametrize("case", HYBRIDS)
@pytest.mark.filterwarnings("error::selfspec.errors.SelfSpecWarning")
def test_weights_of_few_bits_keep_their_numbers(case: str, tmp_path: Path) -> None:
    path = save_family(built(case), tmp_path / "model.gguf", quantised=GGMLQuantizationType.Q8_0)
    with pytest.warns(SelfSpecWarning, match="are unpacked to") if case in WHOLE else contextlib.nullcontext():
        found = read(path)
    expected, ids = read_model(GgufFile.open(path)), prompt(40)
    few, whole = packed_share(found)
    assert few > (0 if case in WHOLE else 0.6 * whole), (few, whole)
    assert (logits(found, ids) - logits(expected, ids)).abs().max() < 5e-4


def test_a_layer_multiplies_with_the_weights_that_it_has_now(tmp_path: Path) -> None:
    """What the kernels are told of them is kept from call to call."""
    path = save_family(built("lfm2"), tmp_path / "model.gguf", quantised=GGMLQuantizationType.Q8_0)
    attention = next(layer.self_attn for layer in read(path).model.layers if hasattr(layer, "self_attn"))
    layer, other = attention.k_proj, attention.v_proj
    assert (layer.out_features, layer.form) == (other.out_features, other.form)
    rows = torch.randn(3, layer.in_features)
    first, second = layer(rows), other(rows)
    copied = copy.deepcopy(layer)
    copied.tiles.data.copy_(other.tiles)
    assert torch.equal(copied(rows), second)
    assert torch.equal(layer(rows), first), "a copy has weights of its own"
    layer.tiles.data = other.tiles.data.clone()
    assert torch.equal(layer(rows), second)
    layer.bias = torch.nn.Parameter(torch.arange(layer.out_features).float())
    assert torch.allclose(layer(rows), second + layer.bias)
    assert not torch.equal(first, second)


def packed_share(model: Any) -> tuple[int, int]:
    """The number of weights of few bits, and of all."""
    modules = (module for module in model.modules() if isinstance(module, (LowBitLinear, LowBitEmbedding)))
    tables = {id(module.tiles): module.packed for module in modules}
    return sum(table.inputs * table.outputs for table in tables.values()), parameter_count(model)


@pytest.mark.in_turn(3)
@RUN
def test_an_engine_of_few_bits_writes_what_transformers_writes(case: str, tmp_path: Path) -> None:
    path = save_family(built(case), tmp_path / "model.gguf", quantised=GGMLQuantizationType.Q4_0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SelfSpecWarning)  # of what becomes numbers of the dtype
        model = read(path)
    assert_same_text(model, read_model(GgufFile.open(path)))


@pytest.mark.filterwarnings("error::selfspec.errors.SelfSpecWarning")
def test_float16_has_no_kernels_and_no_warning(tmp_path: Path) -> None:
    path = save_family(built("lfm2"), tmp_path / "model.gguf", quantised=GGMLQuantizationType.Q8_0)
    assert not any(isinstance(module, LowBitLinear) for module in read(path, torch.float16).modules())


@pytest.mark.parametrize("case", ["mistral", "youtu", "deepseek_v2"])
def test_a_family_that_files_call_as_another_one(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if case == "mistral":
        monkeypatch.setitem(ARCHITECTURES, "mistral", MODEL_ARCH.MISTRAL3)
    path = save_family(built(case), tmp_path / "model.gguf", quantised=GGMLQuantizationType.F16)
    assert isinstance(read(path).model.layers[0].self_attn.o_proj, LowBitLinear)


def test_plain_weights_need_no_warning(tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error", SelfSpecWarning)
        found = read(save_family(built("lfm2"), tmp_path / "model.gguf"))
    assert found.config.model_type == "lfm2"


def test_blocks_that_predict_later_tokens_are_passed_over_where_they_are_like_no_layer(tmp_path: Path) -> None:
    """MiMo's have windows and no experts."""
    config: Any = built("mimo_v2_flash").config
    sliding = [int(kind == "sliding_attention") for kind in config.layer_types] + [1] * 3
    settings = {
        "block_count": len(sliding),
        "nextn_predict_layers": 3,
        "attention.sliding_window_pattern": sliding,
        "attention.head_count_kv": [config.num_key_value_heads * (1 + each) for each in sliding],
    }
    size = config.hidden_size
    names = [f"blk.{block}.nextn.eh_proj.weight" for block in range(config.num_hidden_layers, len(sliding))]
    more = {name: np.ones((size, 2 * size), np.float32) for name in names}
    found = read(save_family(built("mimo_v2_flash"), tmp_path / "model.gguf", settings=settings, tensors=more))
    assert torch.equal(logits(found, prompt(40)), logits(built("mimo_v2_flash"), prompt(40)))


def test_older_files_have_one_tensor_for_the_input_of_delta_nets(tmp_path: Path) -> None:
    state = built("qwen3_next").state_dict()
    linear = [name for name in state if name.endswith("in_proj_qkvz.weight")]
    blocks = {name: name.split(".")[2] for name in linear}
    whole = {f"blk.{block}.ssm_in.weight": state[name].numpy() for name, block in blocks.items()}
    parts = tuple(f"blk.{block}.attn_{part}.weight" for block in blocks.values() for part in ("qkv", "gate"))
    assert_same_model(open_case("qwen3_next", tmp_path, tensors=whole, leave_out=parts), "qwen3_next")


def test_without_a_list_every_fourth_layer_has_full_attention(tmp_path: Path) -> None:
    file = open_case("qwen3_next", tmp_path, leave_out=("attention.recurrent_layers",))
    config: Any = read_config(file.metadata, file.tensors)
    assert config.layer_types == ["linear_attention"] * 3 + ["full_attention"] + ["linear_attention"] * 2


def test_multipliers_that_a_file_has_in_its_weights_are_one(tmp_path: Path) -> None:
    """Falcon-H1's converter multiplies them into the weights."""
    config: Any = built("falcon_h1").config.__class__(**{**built("falcon_h1").config.to_dict(), **MULTIPLIERS})
    model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    model.load_state_dict(built("falcon_h1").state_dict())
    file = GgufFile.open(save_family(built("falcon_h1"), tmp_path / "plain.gguf"))
    written = {name: _multiplied(name, dequantise(tensor)) for name, tensor in file.tensors.items()}
    whole = open_case("falcon_h1", tmp_path, tensors=written)
    ids = prompt(40)
    assert (logits(read_model(whole), ids) - logits(model, ids)).abs().max() < 1e-4


MULTIPLIERS = {
    "attention_in_multiplier": 0.9,
    "attention_out_multiplier": 1.2,
    "key_multiplier": 0.7,
    "ssm_in_multiplier": 1.1,
    "ssm_out_multiplier": 0.8,
    "mlp_multipliers": [0.6, 1.3],
    "ssm_multipliers": [0.5, 0.75, 1.25, 1.5, 2.0],
    "lm_head_multiplier": 1.5,
    "embedding_multiplier": 2.0,
}
_FACTORS = {
    "attn_q": 0.9,
    "attn_k": 0.9 * 0.7,
    "attn_v": 0.9,
    "attn_output": 1.2,
    "ssm_out": 0.8,
    "ffn_gate": 0.6,
    "ffn_down": 1.3,
    "output": 1.5,
    "token_embd": 2.0,
}


def _multiplied(name: str, values: Any) -> Any:
    module = name.removesuffix(".weight").split(".")[-1]
    if module == "ssm_in":  # gate, states, two of the groups' states, and steps
        sizes = (128, 128, 16, 16, 8)
        return 1.1 * np.concatenate(
            [
                part * factor
                for part, factor in zip(
                    np.split(values, np.cumsum(sizes)[:-1]), MULTIPLIERS["ssm_multipliers"], strict=True
                )
            ]
        )
    return values * _FACTORS.get(module, 1.0)


REFUSED: list[tuple[str, dict[str, Any], type[SelfSpecError], str]] = [
    ("lfm2_moe", {"settings": {"expert_gating_func": 1}}, UnsupportedModelError, "a softmax, not the sigmoids"),
    ("nemotron_h-moe", {"settings": {"expert_gating_func": 1}}, UnsupportedModelError, "a softmax, not the sigmoids"),
    ("nemotron_h-moe", {"settings": {"moe_latent_size": 32}}, UnsupportedModelError, "moe_latent_size = 32"),
    ("lfm2", {"settings": {"attention.head_count_kv": [2, 0]}}, ModelLoadError, "for 2 of 6 layers"),
    ("lfm2", {"settings": {"attention.head_count_kv": 2}}, ModelLoadError, "no list of whole numbers by layer"),
    ("qwen3_next", {"settings": {"attention.recurrent_layers": [True]}}, ModelLoadError, "in 1 layers"),
    ("qwen3_next", {"settings": {"ssm.time_step_rank": 5}}, ModelLoadError, "2 heads of keys and 5 of values"),
    ("falcon_h1", {"settings": {"ssm.group_count": 0}}, ModelLoadError, "states of the sizes"),
    ("afmoe", {"settings": {"expert_gating_func": 1}}, UnsupportedModelError, "a softmax, not the sigmoids of its"),
    ("sarvam_moe-groups", {"settings": {"expert_group_count": 3}}, ModelLoadError, "2 of 3 groups of 8 experts"),
    ("sarvam_moe-groups", {"settings": {"expert_group_count": 16}}, ModelLoadError, "2 of 16 groups of 8 experts"),
    ("sarvam_moe-groups", {"settings": {"expert_group_used_count": 5}}, ModelLoadError, "5 of 4 groups of 8 experts"),
    ("sarvam_moe", {"settings": {"expert_shared_count": 2}}, UnsupportedModelError, "has 2 shared experts, or one"),
    ("laguna", {"leave_out": ("expert_weights_norm",)}, UnsupportedModelError, "expert_weights_norm, which trans"),
    ("laguna", {"settings": {"attention.head_count": [4] * 5}}, UnsupportedModelError, r"\[4, 4, 4, 4, 4\]"),
    ("laguna", {"settings": {"rope.dimension_count_swa": 48}}, UnsupportedModelError, "rotates 48 of the 32"),
    (
        "laguna",
        {"settings": {"rope.scaling.yarn_attn_factor": 1.0}},
        UnsupportedModelError,
        "yarn_attn_factor = 1, .* by its other settings it is 1.13863",
    ),
    (
        "mimo_v2_flash",
        {"settings": {"attention.head_count_kv": [2, 2, 4, 2, 4, 4]}},
        UnsupportedModelError,
        "not twice as many",
    ),
    (
        "mimo_v2_flash",
        {"settings": {"rope.scaling.type": "linear", "rope.scaling.factor": 2.0}},
        UnsupportedModelError,
        "scales its rope as 'linear', which no model",
    ),
    ("cohere2_moe-softmax", {"settings": {"expert_weights_norm": False}}, UnsupportedModelError, "a softmax without"),
    (
        "cohere2_moe",
        {"settings": {"attention.sliding_window_pattern": [True]}},
        ModelLoadError,
        "has 1 entries for 6 layers",
    ),
    (
        "cohere2_moe",
        {"settings": {"attention.sliding_window_pattern": ["no"] * 6}},
        ModelLoadError,
        "no list of whole numbers by layer",
    ),
    (
        "cohere2_moe",
        {"settings": {"expert_shared_feed_forward_length": 48}},
        UnsupportedModelError,
        "2 shared ones of 48 together",
    ),
    ("gemma4_text", {"settings": {"attention.sliding_window_pattern": [True]}}, ModelLoadError, "pattern of 1 and"),
    ("gemma4_text", {"settings": {"attention.shared_kv_layers": 6}}, ModelLoadError, "shared_kv_layers of 6 layers"),
    ("gemma4_text", {"settings": {"attention.value_length_swa": 8}}, UnsupportedModelError, "heads of 16 entries in"),
    ("gemma4_text", {"settings": {"feed_forward_length": [96] * 6}}, UnsupportedModelError, "which no Gemma 4 model"),
    ("gemma4_text", {"leave_out": ("per_layer_token_embd.weight",)}, ModelLoadError, "no tensor per_layer_token_embd"),
    (
        "gemma4_text-alike",
        {"settings": {"attention.head_count_kv": [2, 1, 1, 2, 2, 1]}},
        UnsupportedModelError,
        r"head_count_kv = \[2, 1, 1, 2, 2, 1\], which no",
    ),
    ("nemotron_h", {"settings": {"feed_forward_length": [0, 96]}}, ModelLoadError, "kinds of 6 and 2 layers of 6"),
]


@pytest.mark.parametrize(("case", "changes", "kind", "message"), REFUSED, ids=[message for *_, message in REFUSED])
def test_what_would_be_read_wrong_is_refused(
    case: str, changes: dict[str, Any], kind: type[SelfSpecError], message: str, tmp_path: Path
) -> None:
    file = open_case(case, tmp_path, **changes)
    with pytest.raises(kind, match=message):
        read_config(file.metadata, file.tensors)


@pytest.mark.parametrize("changes", [{"leave_out": ("xielu.eps",)}, {"settings": {":xielu.eps": [-1e-6] * 5}}])
def test_activations_without_all_their_numbers_are_refused(changes: dict[str, Any], tmp_path: Path) -> None:
    file = open_case("apertus", tmp_path, **changes)
    model = build_on_meta(read_config(file.metadata, file.tensors))
    with pytest.raises(UnsupportedModelError, match=r"no tensor blk\.\d\.xielu\.eps"):
        find_parameters(file.tensors, model)
