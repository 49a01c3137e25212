"""Settings of GGUF files that are not as in every file: ropes, windows, scales, the tokens that end a text."""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from helpers.gguf_cases import assert_same_model, open_case
from helpers.gguf_families import save_family
from helpers.models import VARIANTS, make
from selfspec.loading.gguf_families import read_config
from selfspec.loading.gguf_file import GgufFile
from selfspec.loading.without_weights import build_on_meta


@dataclass(frozen=True)
class Shape:
    """A tensor of a file that is too large for a test: its shape, and numbers if they are read."""

    name: str
    shape: tuple[int, ...]
    values: npt.NDArray[np.float32] | None = None
    type: str = "F32"

    def data(self) -> npt.NDArray[np.uint8]:
        assert self.values is not None
        return self.values.view(np.uint8)


def shapes(layers: int, embedding: tuple[int, int]) -> dict[str, Any]:
    """An embedding, and one tensor of each layer."""
    names = ["token_embd.weight", *(f"blk.{layer}.attn_norm.weight" for layer in range(layers))]
    return {name: Shape(name, embedding if name.startswith("token") else embedding[1:]) for name in names}


def header(name: str, **more: Any) -> dict[str, Any]:
    own = {f"{name}.{key.replace('__', '.')}": value for key, value in more.items()}
    return {"general.architecture": name, **own}


def llama3_factors(factor: float, size: int, base: float) -> npt.NDArray[np.float32]:
    """As the converter of llama.cpp computes them."""
    factors = []
    for frequency in base ** -(np.arange(0, size, 2, dtype=np.float32) / size):
        wavelength = 2 * math.pi / float(frequency)
        smooth = (8192 / wavelength - 1) / (4 - 1)
        middle = 1 / ((1 - smooth) / factor + smooth)
        factors.append(1 if wavelength < 8192 / 4 else factor if wavelength > 8192 else middle)
    return np.array(factors, np.float32)


@pytest.mark.parametrize(("factor", "size"), [(8.0, 128), (32.0, 64), (32.0, 128)], ids=["3.1", "3.2 1B", "3.2 3B"])
def test_the_rope_of_llama_3_is_recovered(factor: float, size: int) -> None:
    tensors = shapes(1, (128256, 32 * size))
    tensors["rope_freqs.weight"] = Shape("rope_freqs.weight", (size // 2,), llama3_factors(factor, size, 500000.0))
    metadata = header(
        "llama",
        block_count=1,
        context_length=131072,
        embedding_length=32 * size,
        feed_forward_length=14336,
        attention__head_count=32,
        attention__head_count_kv=8,
        attention__layer_norm_rms_epsilon=float(np.float32(1e-5)),
        rope__freq_base=500000.0,
        rope__dimension_count=size,
        vocab_size=128256,
    )
    config: Any = read_config(metadata, tensors)
    assert config.rope_parameters == {
        "rope_theta": 500000.0,
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    assert (config.rms_norm_eps, config.vocab_size, config.tie_word_embeddings) == (1e-5, 128256, True)


@pytest.mark.parametrize(
    ("low", "high", "length"),
    [(1.0, 4.0, 128), (1.0, 4.0, 1000), (2.0, 8.0, 8192), (1.3, 3.1, 4096), (1.0, 1.0, 8192), (1.0, 1.0, 256)],
)
def test_the_rope_of_other_numbers_has_the_same_frequencies(
    low: float, high: float, length: int, tmp_path: Path
) -> None:
    rope = {"rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "original_max_position_embeddings": length}
    more = {"low_freq_factor": low, "high_freq_factor": high}
    original = make(VARIANTS["llama"](head_dim=64, rope_parameters={**rope, **more}), "llama")
    file = GgufFile.open(save_family(original, tmp_path / "model.gguf"))
    found: Any = build_on_meta(read_config(file.metadata, file.tensors))
    expected: Any = original
    assert torch.allclose(found.model.rotary_emb.inv_freq, expected.model.rotary_emb.inv_freq, rtol=1e-6, atol=0)


@pytest.mark.parametrize("name", ["attn_factor", "yarn_attn_factor"])
def test_what_yarn_multiplies_by_may_be_said(name: str, tmp_path: Path) -> None:
    """By either name, where it is what follows from the factor."""
    usual = 0.1 * math.log(4) + 1
    file = open_case("llama-yarn-rope", tmp_path, settings={f"rope.scaling.{name}": usual})
    assert_same_model(file, "llama-yarn-rope")


@pytest.mark.parametrize("name", ["attn_factor", "yarn_attn_factor"])
def test_olmo_3_says_it(name: str, tmp_path: Path) -> None:
    rope = {"type": "yarn", "factor": 8.0, "original_context_length": 128, name: 1.2079441541679836}
    file = open_case("olmo3", tmp_path, settings={f"rope.scaling.{key}": value for key, value in rope.items()})
    config: Any = read_config(file.metadata, file.tensors)
    assert config.rope_parameters["sliding_attention"]["rope_type"] == "default"
    found = config.rope_parameters["full_attention"]
    assert (found["rope_type"], found["factor"], found["original_max_position_embeddings"]) == ("yarn", 8.0, 128)
    assert found.get("attention_factor") is None


@pytest.mark.parametrize(
    ("blocks", "entries", "family"),
    [(47, 154880, "deepseek_v3"), (46, 154880, "deepseek_v2"), (47, 154881, "deepseek_v2")],
)
def test_glm_4_7_flash_has_sigmoids_though_its_files_do_not_say_so(blocks: int, entries: int, family: str) -> None:
    metadata = header(
        "deepseek2",
        block_count=blocks,
        context_length=1024,
        embedding_length=64,
        feed_forward_length=96,
        vocab_size=entries,
        attention__head_count=4,
        attention__head_count_kv=1,
        attention__layer_norm_rms_epsilon=1e-6,
        attention__kv_lora_rank=64,
        attention__key_length=96,
        attention__value_length=64,
        attention__key_length_mla=48,
        attention__value_length_mla=16,
        rope__dimension_count=32,
        expert_count=4,
        expert_used_count=2,
        expert_shared_count=1,
        expert_feed_forward_length=32,
        leading_dense_block_count=1,
        **({"expert_weights_norm": True} if family == "deepseek_v3" else {}),
    )
    assert read_config(metadata, shapes(blocks, (entries, 64))).model_type == family


@pytest.mark.parametrize(
    ("name", "layers", "heads", "width", "head_dim", "scalar"),
    [
        ("gemma2", 42, 16, 3584, 256, 256),
        ("gemma2", 46, 32, 4608, 128, 144),
        ("gemma3", 34, 8, 2560, 256, 256),
        ("gemma3", 62, 32, 5376, 128, 168),
    ],
    ids=["gemma-2-9b", "gemma-2-27b", "gemma-3-4b", "gemma-3-27b"],
)
def test_the_scale_of_attention_in_gemma(
    name: str, layers: int, heads: int, width: int, head_dim: int, scalar: int
) -> None:
    metadata = header(
        name,
        block_count=layers,
        context_length=8192,
        embedding_length=width,
        feed_forward_length=4 * width,
        attention__head_count=heads,
        attention__head_count_kv=heads // 2,
        attention__key_length=head_dim,
        attention__value_length=head_dim,
        attention__layer_norm_rms_epsilon=1e-6,
        attention__sliding_window=1024,
    )
    config: Any = read_config(metadata, shapes(layers, (256000, width)))
    assert (config.query_pre_attn_scalar, config.head_dim, config.sliding_window) == (scalar, head_dim, 1024)
    assert config.layer_types[:6].count("full_attention") == (3 if name == "gemma2" else 1)
    assert config.layer_types[5] == "full_attention"


def test_a_pattern_of_windows_is_read(tmp_path: Path) -> None:
    key = "attention.sliding_window_pattern"
    by_layer = [True, False, False, True, True, False]
    for pattern, expected in ((3, [True, True, False] * 2), (by_layer, by_layer)):
        file = open_case("gemma2", tmp_path, settings={key: pattern})
        config: Any = read_config(file.metadata, file.tensors)
        assert [kind == "sliding_attention" for kind in config.layer_types] == expected


def test_gemma_without_a_window(tmp_path: Path) -> None:
    file = open_case("gemma3", tmp_path, leave_out=("attention.sliding_window",))
    config: Any = read_config(file.metadata, file.tensors)
    assert set(config.layer_types) == {"full_attention"}


def test_what_granite_leaves_out_scales_nothing(tmp_path: Path) -> None:
    scales = ("embedding_scale", "residual_scale", "logit_scale", "attention.scale")
    file = open_case("granite", tmp_path, leave_out=scales)
    config: Any = read_config(file.metadata, file.tensors)
    assert (config.embedding_multiplier, config.residual_multiplier, config.logits_scaling) == (1, 1, 1)
    assert config.attention_multiplier == 16**-0.5


def test_the_tokens_that_end_a_text(tmp_path: Path) -> None:
    ids = {"bos": 1, "eos": 2, "eot": 3, "eom": 2, "padding": 2**32 - 1}
    file = open_case(
        "llama", tmp_path, settings={f":tokenizer.ggml.{name}_token_id": value for name, value in ids.items()}
    )
    config: Any = read_config(file.metadata, file.tensors)
    assert (config.bos_token_id, config.eos_token_id, config.pad_token_id) == (1, [2, 3], None)


def test_the_tokens_that_are_known_to_end_a_turn(tmp_path: Path) -> None:
    texts = ["</s>", "a", "<|end|>", "<|im_end|>", *map(str, range(124)), "<|eot_id|>"]
    control = {0, 2, 4, 128}  # <|im_end|> is a text here, and <|eot_id|> no token of the model
    keys = {
        ":tokenizer.ggml.tokens": texts,
        ":tokenizer.ggml.token_type": [3 if index in control else 1 for index in range(len(texts))],
        ":tokenizer.ggml.eos_token_id": 2,
    }
    file = open_case("llama", tmp_path, settings=keys)
    config: Any = read_config(file.metadata, file.tensors)
    assert config.eos_token_id == [2, 0]


def test_an_old_name_for_evenly_stretched_positions(tmp_path: Path) -> None:
    file = open_case(
        "llama-linear-rope",
        tmp_path,
        leave_out=("rope.scaling.type", "rope.scaling.factor"),
        settings={"rope.scale_linear": 4.0},
    )
    assert_same_model(file, "llama-linear-rope")
