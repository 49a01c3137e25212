"""GGUF files that would be read wrong are refused by what is wrong with them, in a line."""

import contextlib
import functools
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers.gguf_cases import built, open_case
from helpers.gguf_families import save_family
from selfspec.errors import ModelLoadError, SelfSpecError, UnsupportedModelError
from selfspec.loading.gguf_families import read_config
from selfspec.loading.gguf_file import GgufFile
from selfspec.loading.gguf_settings import Settings
from selfspec.loading.gguf_tensors import find_parameters
from selfspec.loading.without_weights import build_on_meta

REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("llama", {"settings": {":general.architecture": "gptj"}}, "family 'gptj'"),
    ("llama", {"settings": {":general.type": "mmproj"}}, "holds no model but: mmproj"),
    ("llama", {"settings": {"attention.clamp_kqv": 8.0}}, r"llama\.attention\.clamp_kqv = 8"),
    ("llama", {"settings": {"attention.causal": False}}, r"llama\.attention\.causal = False"),
    ("llama", {"settings": {"logit_scale": 2.0}}, r"llama\.logit_scale = 2"),
    ("llama", {"settings": {"attention.sliding_window": 16}}, r"llama\.attention\.sliding_window = 16"),
    ("llama", {"settings": {"something.new": "strange"}}, r"llama\.something\.new = strange"),
    ("llama", {"settings": {"something.new": [1, 2]}}, r"llama\.something\.new = \[1"),
    ("llama", {"settings": {"rope.dimension_count": 12}}, r"llama\.rope\.dimension_count 12, .* whole heads of 24"),
    ("llama", {"settings": {"rope.scaling.type": "su"}}, "scales its rope as 'su'"),
    ("llama", {"settings": {"rope.scaling.type": "longrope"}}, "'longrope' without a tensor of factors"),
    ("llama", {"settings": {"rope.scaling.attn_factor": 1.2}}, r"rope\.scaling\.attn_factor = 1\.2"),
    ("llama-yarn-rope", {"settings": {"rope.scaling.yarn_attn_factor": 1.2}}, r"yarn_attn_factor = 1\.2"),
    ("llama-llama3-rope", {"settings": {"rope.scaling.type": "yarn"}}, r"'yarn' by rope_freqs\.weight"),
    ("llama", {"settings": {"attention.value_length": 16}}, "16 for values"),
    ("llama", {"settings": {"attention.head_count_kv": 3}}, "4 heads of 24 entries for keys, 3"),
    (
        "llama",
        {"settings": {"attention.head_count_kv": [1, 2, 2, 2, 2, 2]}},
        r"differ in llama\.attention\.head_count_kv",
    ),
    (
        "llama",
        {"settings": {"attention.head_count": 8}},
        r"attn_q\.weight .* does not fit the heads of the model",
    ),
    ("llama", {"leave_out": ("blk.3.ffn_up.weight",)}, r"no tensor blk\.3\.ffn_up\.weight"),
    ("llama", {"leave_out": ("output_norm.weight",)}, r"no tensor output_norm\.weight"),
    ("llama-tied-biases", {"leave_out": ("blk.2.attn_output.bias",)}, r"no tensor blk\.2\.attn_output\.bias"),
    ("llama", {"tensors": {"blk.4.attn_v.bias": np.zeros(48)}}, r"tensor blk\.4\.attn_v\.bias .* no parameter"),
    ("llama", {"tensors": {"output.bias": np.zeros(128)}}, r"tensor output\.bias .* no parameter"),
    ("llama", {"tensors": {"blk.0.attn_q.weight": np.zeros((192, 64))}}, r"attn_q\.weight .* in part or whole"),
    ("llama", {"tensors": {"blk.0.attn_q.weight": np.zeros((48, 64))}}, "does not fit"),
    ("llama", {"tensors": {"output.weight": np.zeros((120, 64))}}, r"does not fit the lm_head\.weight"),
    ("llama", {"tensors": {"rope_freqs.weight": np.linspace(1, 8, 12)}}, "not those of Llama 3.1"),
    ("llama", {"tensors": {"rope_freqs.weight": np.ones(5)}}, "no list of 12 float32 numbers"),
    ("llama", {"tensors": {"rope_freqs.weight": -np.ones(12)}}, "not above zero"),
    ("phi3-longrope", {"leave_out": ("rope_factors_long.weight",)}, r"rope\.scaling\.attn_factor = 1\.1"),
    (
        "phi3-longrope",
        {"leave_out": ("rope_factors_long.weight", "rope.scaling.attn_factor")},
        "'none' by rope_factors_short",
    ),
    ("mixtral", {"leave_out": ("blk.0.ffn_up_exps.weight",)}, r"no tensor blk\.0\.ffn_up_exps\.weight"),
    ("granite", {"settings": {"rope.scaling.finetuned": False}}, "Granite model without rope"),
    (
        "stablelm",
        {"leave_out": tuple(f"blk.{layer}.ffn_norm.weight" for layer in range(6))},
        "own modules only",
    ),
    ("gpt2", {"settings": {"rope.freq_base": 10000.0}}, r"gpt2\.rope\.freq_base = 10000"),
    ("gpt_bigcode", {"settings": {"attention.head_count_kv": 4}}, "4 heads of keys"),
    (
        "gpt_bigcode",
        {"settings": {"context_length": 2**28}},
        "its buffers take 72,057,594,037,927,936 bytes, and at most 1,073,741,824",
    ),
    ("deepseek_v2", {"settings": {"rope.dimension_count": 0}}, "4 heads that rotate 0 entries"),
    ("minicpm3", {"settings": {"attention.head_count": 0}}, "0 heads that rotate 32 entries"),
    ("gpt2", {"leave_out": ("position_embd.weight",)}, r"no tensor position_embd\.weight"),
    ("mpt", {"settings": {"attention.max_alibi_bias": 16.0}}, "max_alibi_bias = 16, not 8"),
    ("mpt", {"leave_out": ("attention.max_alibi_bias",)}, "max_alibi_bias = 0, not 8"),
    ("olmo", {"settings": {"attention.layer_norm_epsilon": 1e-6}}, "norms that add 1e-06"),
    ("llama4_text", {"settings": {"attention.sliding_window": 0}}, r"llama4\.attention\.sliding_window"),
    (
        "phimoe",
        {"tensors": dict.fromkeys(("rope_factors_long.weight", "rope_factors_short.weight"), np.ones(8))},
        "by factors of Phi-MoE",
    ),
    ("hunyuan_v1_moe", {"settings": {"expert_feed_forward_length": 48}}, r"of the widths \[48, 96\]"),
    ("hunyuan_v1_moe", {"settings": {"expert_shared_count": 2}}, "shared experts"),
    ("ministral3", {"settings": {"rope.scaling.type": "none"}}, "as 'default', not as 'yarn'"),
    ("granitemoehybrid", {"settings": {"rope.scaling.finetuned": True}}, "Granite hybrid with a rope"),
    ("jamba", {"settings": {"attention.head_count_kv": [0, 2, 2, 0, 0, 2]}}, "no regular attn_layer_period"),
    ("exaone_moe", {"settings": {"expert_gating_func": 1}}, "a softmax, not the sigmoids"),
    ("hy_v3", {"settings": {"expert_weights_norm": False}}, r"hy-v3\.expert_weights_norm = False"),
    ("glm4", {"settings": {"rope.dimension_sections": [8, 12, 12, 0]}}, r"glm4\.rope\.dimension_sections"),
    ("glm4", {"settings": {"nextn_predict_layers": 1}}, r"glm4\.nextn_predict_layers = 1"),
    ("qwen3", {"settings": {"attention.sliding_window": 64}}, r"qwen3\.attention\.sliding_window = 64"),
]
"""A case, what is changed in its file, and the message."""


@pytest.mark.parametrize(("case", "changes", "message"), REFUSED, ids=[message for _, _, message in REFUSED])
def test_what_would_be_read_wrong_is_refused_by_name(
    case: str, changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    file = open_case(case, tmp_path, **changes)
    with pytest.raises(UnsupportedModelError, match=message):
        find_parameters(file.tensors, build_on_meta(read_config(file.metadata, file.tensors)))


DAMAGED: list[tuple[dict[str, Any], str]] = [
    ({"leave_out": ("block_count",)}, r"no llama\.block_count"),
    ({"leave_out": ("context_length",)}, r"no llama\.context_length"),
    ({"leave_out": ("token_embd.weight",)}, r"no tensor token_embd\.weight"),
    ({"settings": {"block_count": 7}}, "tensors of 6 layers"),
    ({"settings": {"block_count": 5}}, "tensors of 6 layers"),
    ({"settings": {"block_count": "six"}}, "block_count = six, no whole number"),
    ({"settings": {"context_length": 0}}, "a context of 0 tokens"),
    ({"settings": {"embedding_length": 2**31}}, "embedding_length = 2147483648, no whole number"),
    ({"settings": {"attention.head_count": 2**20}}, "head_count = 1048576, no whole number"),
    ({"settings": {"attention.layer_norm_rms_epsilon": math.nan}}, "which is no number"),
    ({"settings": {"attention.layer_norm_rms_epsilon": -1.0}}, "norms that add -1"),
    ({"settings": {"expert_count": 4, "expert_used_count": 5}}, "5 of 4 experts"),
    ({"tensors": {"blk.4000.attn_norm.weight": np.ones(64)}, "settings": {"block_count": 4001}}, "of 4001 layers"),
    ({"settings": {"block_count": 90000001}}, "block_count = 90000001, no whole number from 0 to 4,096"),
    ({"settings": {"attention.head_count_kv": [2] * 4097}}, r"llama\.attention\.head_count_kv of 4,097 layers"),
]


@pytest.mark.parametrize(("changes", "message"), DAMAGED, ids=[message for _, message in DAMAGED])
def test_settings_without_sense_are_refused(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    file = open_case("llama", tmp_path, **changes)
    with pytest.raises(ModelLoadError, match=message):
        read_config(file.metadata, file.tensors)


@pytest.mark.parametrize(
    ("case", "changed"),
    [
        ("llama", {"a\n" * 999: 1}),
        ("llama", {":general.architecture": "a\n" * 999}),
        ("gemma4_text-alike", {"attention.head_count_kv": [2, 1] * 999}),
        ("gemma4_text-alike", {"feed_forward_length": [96] * 999}),
        ("laguna", {"attention.head_count": [4] * 999}),
    ],
)
def test_what_is_long_is_refused_in_a_line(case: str, changed: dict[str, Any], tmp_path: Path) -> None:
    file = open_case(case, tmp_path, settings=changed)
    with pytest.raises(UnsupportedModelError) as refused:
        read_config(file.metadata, file.tensors)
    message = str(refused.value)
    assert message.isprintable()
    assert len(message) < (300 if "supported are" not in message else 2000)


@pytest.mark.parametrize("values", [["a"] * 6, np.ones(4097, np.uint8), np.ones(6, np.float32)])
def test_what_is_no_list_of_numbers_by_layer_is_refused(values: Any) -> None:
    own = Settings({"general.architecture": "llama", "llama.groups": values})
    with pytest.raises(ModelLoadError, match=r"llama\.groups = \[.*, no list of whole numbers by layer"):
        own.by_layer("groups")


def test_a_file_that_does_not_name_its_family() -> None:
    with pytest.raises(ModelLoadError, match=r"general\.architecture"):
        read_config({}, {})


def test_a_family_that_transformers_does_not_have(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    file = open_case("llama", tmp_path)
    monkeypatch.setattr("selfspec.loading.gguf_families.transformers.CONFIG_MAPPING", {})
    with pytest.raises(UnsupportedModelError, match=r"transformers 5\.\d+.* has no llama models"):
        read_config(file.metadata, file.tensors)


OPTIONAL = (
    *("rope.scaling.type", "rope.scaling.factor", "rope.scaling.original_context_length", "rope.scaling.attn_factor"),
    *("rope.scale_linear", "rope.dimension_count", "rope.freq_base_swa", "attention.sliding_window_pattern"),
    *("attention.key_length", "attention.value_length", "attention.scale", "final_logit_softcapping", "expert_count"),
)
"""Settings that not every file has."""


@functools.cache
def opened(case: str, folder: Path) -> GgufFile:
    return GgufFile.open(save_family(built(case), folder / f"{case}.gguf"))


SIZES = st.sampled_from([0, 1, 2, 3, 4, 5, 8, 16, 24, 64, 65, 96, 128, 2**20])
VALUES = st.one_of(
    st.integers(0, 2**64 - 1),
    SIZES,
    st.floats(width=32),
    st.one_of(st.text(max_size=5), st.sampled_from(["none", "linear", "yarn", "longrope", "model"])),
    st.booleans(),
    st.lists(st.integers(0, 9), max_size=7),
    st.builds(np.array, st.lists(st.integers(0, 9), max_size=7)),
)


@pytest.mark.parametrize("case", ["llama-llama3-rope", "phi3-longrope", "gemma3", "qwen3-moe", "stablelm-head-norms"])
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_any_header_gives_a_model_that_fits_or_an_error(
    case: str, data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    file = opened(case, tmp_path_factory.getbasetemp())
    own = str(file.metadata["general.architecture"])
    keys = st.sampled_from([*sorted(file.metadata), "general.type", *(f"{own}.{name}" for name in OPTIONAL)])
    changed = {**file.metadata, **data.draw(st.dictionaries(keys, VALUES, min_size=1, max_size=3))}
    tensors = dict(file.tensors)
    names = st.sampled_from(sorted(tensors))
    for name in data.draw(st.lists(names, max_size=1)):
        tensors[name] = replace(tensors[name], shape=tuple(data.draw(st.lists(SIZES, max_size=3))))
    for name in data.draw(st.lists(names, max_size=1)):
        del tensors[name]
    with contextlib.suppress(SelfSpecError):
        model = build_on_meta(read_config(changed, tensors))
        sources = find_parameters(tensors, model)
        assert sources.keys() == dict(model.named_parameters()).keys()
