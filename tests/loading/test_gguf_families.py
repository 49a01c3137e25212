"""The config and the parameters of GGUF files, for every family: what is read is the model that was written."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import MODEL_ARCH, GGMLQuantizationType
from transformers import AutoModelForCausalLM, GgufConfig

from helpers.gguf_cases import CASES, HYBRIDS, assert_same_model, built, logits, open_case, read_model
from helpers.gguf_families import ARCHITECTURES, dequantise, save_family
from helpers.gguf_files import save_gguf
from helpers.models import RELATIVES, VARIANTS, build, make, prompt
from selfspec.loading.gguf_families import read_config
from selfspec.loading.gguf_file import GgufFile
from selfspec.loading.gguf_own import BY_MODEL_TYPE, architecture_of
from selfspec.loading.gguf_tensors import find_parameters
from selfspec.loading.without_weights import build_on_meta
from selfspec.model.families import FAMILIES

OTHERS = (
    *("qwen3-window", "phi3-window", "starcoder2", "gpt-oss", "deepseek_v2", "deepseek_v2-yarn"),
    *("cohere-head-norms", "phimoe", "hy_v3"),
)
"""Models that llama.cpp does not load, or runs without the window, with YaRN's ramp between whole numbers, with groups
of experts by the sum of their two best ones, as DeepSeek-V3 and not V2 does, or with norms that subtract no mean."""

BOUNDS = {
    # a GELU that llama.cpp reads from a table of 16-bit numbers
    ("gemma", "gemma4_", "starcoder2", "gpt2", "gpt_", "bloom", "mpt", "falcon-", "phi-", "falcon_mamba"): 1e-2,
    ("qwen3_next", "qwen3_5", "mamba2"): 1e-3,  # states, computed in chunks
    ("glm4_moe_lite",): 2e-4,
}
"""How far logits may differ, by families."""

NOT_IN_FILES = {
    "attn_config",
    "dtype",
    "head_dim",
    "original_max_position_embeddings",
    "sliding_window_pattern",
    "_sliding_window_pattern",
}
"""Attributes of configs that are not computed with, or have the value that the class gives them."""


@pytest.mark.parametrize("case", CASES)
def test_a_file_gives_the_model_that_was_written(case: str, tmp_path: Path) -> None:
    assert_same_model(open_case(case, tmp_path), case)


@pytest.mark.parametrize("case", CASES)
def test_a_file_gives_the_config_that_was_written(case: str, tmp_path: Path) -> None:
    file = open_case(case, tmp_path)
    configs: Any = read_config(file.metadata, file.tensors), built(case).config
    found, expected = (config.to_dict() for config in configs)
    if expected["model_type"] not in BY_MODEL_TYPE:  # which files call as another one, and which computes the same
        assert architecture_of(found.pop("model_type")) == architecture_of(expected.pop("model_type"))
    known = set.intersection(*(set(type(each)().to_dict()) for each in configs))  # cases have others' settings, too
    different = {name for name, value in expected.items() if name in known and found.get(name) != value}
    assert different <= NOT_IN_FILES, {name: (expected[name], found.get(name)) for name in different}


def test_every_family_has_a_case() -> None:
    read = {built(case).config.model_type for case in CASES}
    assert read == ARCHITECTURES.keys()
    assert read - {case.partition("-")[0] for case in HYBRIDS} <= FAMILIES.keys()


@pytest.mark.parametrize("case", CASES)
def test_buffers_have_the_values_of_a_model_with_weights(case: str) -> None:
    config = built(case).config
    found = dict(build_on_meta(config).named_buffers())
    expected: Any = AutoModelForCausalLM.from_config(config)
    stored = expected.state_dict().keys()
    for name, buffer in expected.named_buffers():
        assert name in stored or torch.equal(found[name], buffer), name


def by_llama_cpp(path: Path, ids: list[int], context: int = 256) -> torch.Tensor:
    llama_cpp = pytest.importorskip("llama_cpp")
    llama = llama_cpp.Llama(
        str(path), n_ctx=context, logits_all=True, verbose=False, n_threads=1, type_k=0, type_v=0, flash_attn=False
    )
    llama.eval(ids)
    found = torch.from_numpy(np.array(llama.scores[: len(ids)]))
    llama.close()
    return found


@pytest.mark.parametrize("case", [case for case in CASES if case not in OTHERS])
def test_llama_cpp_computes_the_same(case: str, tmp_path: Path) -> None:
    """The files of these tests are in the form that llama.cpp reads, and transformers' model is what it runs."""
    path = save_family(built(case), tmp_path / "model.gguf")
    bound = next((bound for families, bound in BOUNDS.items() if f"{case}-".startswith(families)), 2e-4)
    for ids, context in ((prompt(40), 256), *([(prompt(300), 512)] if case == "phi3-longrope" else [])):
        assert (by_llama_cpp(path, ids, context) - logits(built(case), ids)).abs().max() < bound


CHANGED: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt-oss with whole bounds": ("gpt-oss", {"rope_parameters": {"truncate": True}}),
    "deepseek2 without groups": ("deepseek_v2", {"n_group": 1, "topk_method": "greedy"}),
    "deepseek2 with YaRN": ("deepseek_v2-yarn", {"q_lora_rank": 32}),
}


@pytest.mark.parametrize("name", CHANGED)
def test_llama_cpp_computes_the_same_where_it_computes_that(name: str, tmp_path: Path) -> None:
    case, changes = CHANGED[name]
    config: Any = {**VARIANTS, **RELATIVES}[case]()
    for key, value in changes.items():
        setattr(config, key, {**getattr(config, key), **value} if isinstance(value, dict) else value)
    model, ids = make(config, case), prompt(40)
    path = save_family(model, tmp_path / "model.gguf")
    assert (by_llama_cpp(path, ids) - logits(model, ids)).abs().max() < 1e-4


def test_granite_4_without_recurrent_layers_is_granite(tmp_path: Path) -> None:
    """Its files have the settings of these layers, and of shared experts, but no such tensors."""
    names = ("conv_kernel", "state_size", "group_count", "inner_size", "time_step_rank")
    settings: dict[str, Any] = {f"ssm.{name}": 4 for name in names}
    more = {"expert_shared_feed_forward_length": 96, "expert_count": 0, "rope.scaling.finetuned": True}
    assert_same_model(open_case("granite", tmp_path, settings=settings | more), "granite")


def test_mistral3_without_scaled_queries_is_mistral(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(ARCHITECTURES, "mistral", MODEL_ARCH.MISTRAL3)
    assert_same_model(open_case("mistral", tmp_path), "mistral")


WITH_PICTURES = [
    ("qwen2", "qwen2", MODEL_ARCH.QWEN2VL, {}),
    ("qwen3", "qwen3", MODEL_ARCH.QWEN3VL, {"n_deepstack_layers": 3}),
    ("qwen3-moe", "qwen3_moe", MODEL_ARCH.QWEN3VLMOE, {"n_deepstack_layers": 3}),
]


@pytest.mark.parametrize(("case", "family", "architecture", "settings"), WITH_PICTURES)
def test_models_with_pictures_are_their_models_of_text(
    case: str,
    family: str,
    architecture: MODEL_ARCH,
    settings: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    """Positions of text are the same in all sections of the rope, interleaved or not.

    llama.cpp computes the same where every frequency is in a section; it does not turn the others.
    """
    monkeypatch.setitem(ARCHITECTURES, family, architecture)
    config: Any = built(case).config
    half = getattr(config, "head_dim", config.hidden_size // config.num_attention_heads) // 2
    sections = {"rope.dimension_sections": [(half + 2) // 3, (half + 1) // 3, half // 3, 0]}
    file = open_case(case, tmp_path, settings=settings | sections)
    assert_same_model(file, case)
    ids = prompt(40)
    assert (by_llama_cpp(tmp_path / "model.gguf", ids) - logits(built(case), ids)).abs().max() < 2e-4


FUSED = ("llama-tied-biases", "qwen2", "qwen3", "granite", "gemma4_text-experts")


@pytest.mark.parametrize("case", FUSED)
def test_joined_projections_are_taken_apart(case: str, tmp_path: Path) -> None:
    apart = {name: dequantise(tensor) for name, tensor in open_case(case, tmp_path).tensors.items()}
    joined, parts = {}, []
    for layer in range(built(case).config.num_hidden_layers):
        for kind in ("weight", "bias"):
            names = [f"blk.{layer}.attn_{part}.{kind}" for part in "qkv"]
            if names[0] in apart:
                joined[f"blk.{layer}.attn_qkv.{kind}"] = np.concatenate([apart[name] for name in names])
                parts += names
    assert_same_model(open_case(case, tmp_path, tensors=joined, leave_out=tuple(parts)), case)


def test_projections_apart_are_joined(tmp_path: Path) -> None:
    case = "phi3"
    config: Any = built(case).config
    size = config.hidden_size // config.num_attention_heads
    bounds = [config.num_attention_heads * size, (config.num_attention_heads + config.num_key_value_heads) * size]
    file = open_case(case, tmp_path)
    joined = [name for name in file.tensors if "attn_qkv" in name]
    apart = {
        name.replace("qkv", part): values
        for name in joined
        for part, values in zip("qkv", np.split(dequantise(file.tensors[name]), bounds), strict=True)
    }
    assert_same_model(open_case(case, tmp_path, tensors=apart, leave_out=tuple(joined)), case)


@pytest.mark.parametrize("variant", ["llama", "qwen2"])
def test_quantised_files_give_what_transformers_reads(variant: str, tmp_path: Path) -> None:
    path = save_gguf(build(variant), tmp_path / "model.gguf", quantised=GGMLQuantizationType.Q8_0)
    expected: Any = AutoModelForCausalLM.from_pretrained(
        tmp_path, gguf_file=path.name, dtype=torch.float32, quantization_config=GgufConfig(dequantize=True)
    )
    found = read_model(GgufFile.open(path)).state_dict()
    for name, weight in expected.state_dict().items():
        assert torch.equal(found[name], weight), name


def test_quantised_blocks_are_read_by_whole_rows(tmp_path: Path) -> None:
    """Sources say which outputs, never parts of them, so that blocks stay as they are."""
    file = open_case("llama", tmp_path)
    model = build_on_meta(read_config(file.metadata, file.tensors))
    source = find_parameters(file.tensors, model)["model.layers.0.self_attn.q_proj.weight"]
    assert source.rows is not None
    assert sorted(source.rows.tolist()) == list(range(4 * 24))
    assert source.rows[:4].tolist() == [0, 2, 4, 6]
