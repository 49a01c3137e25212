"""The config and the parameters of GGUF files, for every family: what is read is the model that was written."""

import contextlib
import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from gguf import MODEL_ARCH
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, PreTrainedModel

from helpers.gguf_families import ARCHITECTURES, dequantise, save_family
from helpers.models import VARIANTS, make, prompt
from selfspec.errors import ModelLoadError, SelfSpecError, UnsupportedModelError
from selfspec.loading.gguf_families import read_config
from selfspec.loading.gguf_file import GgufFile
from selfspec.loading.gguf_tensors import build_on_meta, find_parameters
from selfspec.model.families import FAMILIES

LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 1000.0,
    "short_factor": [1.0 + 0.05 * index for index in range(8)],
    "long_factor": [2.0 + 0.5 * index for index in range(8)],
    "original_max_position_embeddings": 256,  # the least that llama.cpp tells from more
}
CASES: dict[str, dict[str, Any]] = {
    "llama": {},
    "llama-tied-biases": {},
    "llama-ungrouped": {},
    "llama-multi-query": {},
    "llama-linear-rope": {},
    "llama-llama3-rope": {},
    "llama-yarn-rope": {},
    "mistral": {},
    "mixtral": {},
    "qwen2": {},
    "qwen3": {},
    "qwen3-window": {"use_sliding_window": False, "layer_types": None},
    "qwen3-moe": {"mlp_only_layers": []},
    "smollm3": {"no_rope_layer_interval": 4},
    "phi3": {},
    "phi3-window": {},
    "phi3-longrope": {"original_max_position_embeddings": 256, "rope_parameters": LONGROPE},
    "olmo2": {},
    "granite": {},
    "gemma2": {"query_pre_attn_scalar": 16},
    "gemma3": {"query_pre_attn_scalar": 24, "sliding_window_pattern": 6},
    "starcoder2": {},
    "starcoder2-window": {"sliding_window": None, "use_bias": True},
    "glm4": {},
    "glm4-whole-rope": {},
    "stablelm": {},
    "stablelm-head-norms": {},
}
"""Variants by name, with the settings that a GGUF file cannot hold set to what it means."""

OTHERS = ("qwen3-window", "phi3-window", "starcoder2")
"""Models that llama.cpp does not load, or runs without the window."""

NOT_IN_FILES = {
    "dtype",
    "head_dim",
    "original_max_position_embeddings",
    "sliding_window_pattern",
    "_sliding_window_pattern",
}
"""Attributes of configs that are not computed with, or have the value that the class gives them."""


@functools.cache
def built(case: str) -> PreTrainedModel:
    config = VARIANTS[case](**CASES[case])
    config.bos_token_id, config.eos_token_id = None, None
    return make(config, case)


@pytest.fixture
def write(tmp_path: Path) -> Callable[..., GgufFile]:
    """Writes a case and opens the file; takes the options of ``save_family``."""

    def write(case: str, **options: Any) -> GgufFile:
        return GgufFile.open(save_family(built(case), tmp_path / "model.gguf", **options))

    return write


def read(file: GgufFile) -> PreTrainedModel:
    """The model in a file, by transformers."""
    config = read_config(file.metadata, file.tensors)
    sources = find_parameters(file.tensors, build_on_meta(config))
    model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    parameters = dict(model.named_parameters())
    assert sources.keys() == parameters.keys()
    with torch.no_grad():
        for name, parameter in parameters.items():
            values = sources[name].read(lambda tensor: dequantise(file.tensors[tensor]))
            parameter.copy_(torch.from_numpy(values).reshape(parameter.shape))
    read: PreTrainedModel = model.eval()
    return read


def logits(model: Any, ids: list[int]) -> torch.Tensor:
    with torch.inference_mode():
        model.set_attn_implementation("eager")
        scores: torch.Tensor = model(torch.tensor([ids])).logits[0]
        return scores


def assert_same_model(read: PreTrainedModel, case: str) -> None:
    ids = prompt(40)
    assert torch.equal(logits(read, ids), logits(built(case), ids))


@pytest.mark.parametrize("case", CASES)
def test_a_file_gives_the_model_that_was_written(case: str, write: Callable[..., GgufFile]) -> None:
    assert_same_model(read(write(case)), case)


@pytest.mark.parametrize("case", CASES)
def test_a_file_gives_the_config_that_was_written(case: str, write: Callable[..., GgufFile]) -> None:
    file = write(case)
    found, expected = (config.to_dict() for config in (read_config(file.metadata, file.tensors), built(case).config))
    if expected["model_type"] == "mistral":  # which files call llama, and which computes the same
        expected["model_type"] = "llama"
    different = {name for name, value in expected.items() if found.get(name) != value}
    assert different <= NOT_IN_FILES, {name: (expected[name], found.get(name)) for name in different}


def test_every_family_has_a_case() -> None:
    assert {built(case).config.model_type for case in CASES} == FAMILIES.keys() == ARCHITECTURES.keys()


@pytest.mark.parametrize("case", CASES)
def test_buffers_have_the_values_of_a_model_with_weights(case: str) -> None:
    config = built(case).config
    found = dict(build_on_meta(config).named_buffers())
    expected: Any = AutoModelForCausalLM.from_config(config)
    for name, buffer in expected.named_buffers():
        assert torch.equal(found[name], buffer), name


@pytest.mark.parametrize("case", [case for case in CASES if case not in OTHERS])
def test_llama_cpp_computes_the_same(case: str, tmp_path: Path) -> None:
    """The files of these tests are in the form that llama.cpp reads, and transformers' model is what it runs."""
    llama_cpp = pytest.importorskip("llama_cpp")
    path = save_family(built(case), tmp_path / "model.gguf")
    gelu = case.startswith(("gemma", "starcoder2"))  # which llama.cpp reads from a table of 16-bit numbers
    for ids, context in ((prompt(40), 256), *([(prompt(300), 512)] if case == "phi3-longrope" else [])):
        llama = llama_cpp.Llama(
            str(path), n_ctx=context, logits_all=True, verbose=False, n_threads=1, type_k=0, type_v=0, flash_attn=False
        )
        llama.eval(ids)
        found = torch.from_numpy(np.array(llama.scores[: len(ids)]))
        llama.close()
        assert (found - logits(built(case), ids)).abs().max() < (1e-2 if gelu else 1e-4)


FUSED = ("llama-tied-biases", "qwen2", "qwen3", "granite")


@pytest.mark.parametrize("case", FUSED)
def test_joined_projections_are_taken_apart(case: str, tmp_path: Path, write: Callable[..., GgufFile]) -> None:
    apart = {name: dequantise(tensor) for name, tensor in write(case).tensors.items()}
    joined, parts = {}, []
    for layer in range(built(case).config.num_hidden_layers):
        for kind in ("weight", "bias"):
            names = [f"blk.{layer}.attn_{part}.{kind}" for part in "qkv"]
            if names[0] in apart:
                joined[f"blk.{layer}.attn_qkv.{kind}"] = np.concatenate([apart[name] for name in names])
                parts += names
    assert_same_model(read(write(case, tensors=joined, leave_out=tuple(parts))), case)


def test_projections_apart_are_joined(write: Callable[..., GgufFile]) -> None:
    case = "phi3"
    config: Any = built(case).config
    size = config.hidden_size // config.num_attention_heads
    bounds = [config.num_attention_heads * size, (config.num_attention_heads + config.num_key_value_heads) * size]
    joined = [name for name in write(case).tensors if "attn_qkv" in name]
    apart = {
        name.replace("qkv", part): values
        for name in joined
        for part, values in zip("qkv", np.split(dequantise(write(case).tensors[name]), bounds), strict=True)
    }
    assert_same_model(read(write(case, tensors=apart, leave_out=tuple(joined))), case)


def test_quantised_blocks_are_read_by_whole_rows(write: Callable[..., GgufFile]) -> None:
    """Sources say which outputs, never parts of them, so that blocks stay as they are."""
    file = write("llama")
    model = build_on_meta(read_config(file.metadata, file.tensors))
    source = find_parameters(file.tensors, model)["model.layers.0.self_attn.q_proj.weight"]
    assert source.rows is not None
    assert sorted(source.rows.tolist()) == list(range(4 * 24))
    assert source.rows[:4].tolist() == [0, 2, 4, 6]


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


def shapes(architecture: MODEL_ARCH, layers: int, embedding: tuple[int, int]) -> dict[str, Any]:
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
    tensors = shapes(MODEL_ARCH.LLAMA, 1, (128256, 32 * size))
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
    ("low", "high", "length"), [(1.0, 4.0, 128), (1.0, 4.0, 1000), (2.0, 8.0, 8192), (1.3, 3.1, 4096)]
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
    config: Any = read_config(metadata, shapes(MODEL_ARCH.GEMMA2, layers, (256000, width)))
    assert (config.query_pre_attn_scalar, config.head_dim, config.sliding_window) == (scalar, head_dim, 1024)
    assert config.layer_types[:6].count("full_attention") == (3 if name == "gemma2" else 1)
    assert config.layer_types[5] == "full_attention"


def test_a_pattern_of_windows_is_read(write: Callable[..., GgufFile]) -> None:
    key = "attention.sliding_window_pattern"
    by_layer = [True, False, False, True, True, False]
    for pattern, expected in ((3, [True, True, False] * 2), (by_layer, by_layer)):
        file = write("gemma2", settings={key: pattern})
        config: Any = read_config(file.metadata, file.tensors)
        assert [kind == "sliding_attention" for kind in config.layer_types] == expected


def test_gemma_without_a_window(write: Callable[..., GgufFile]) -> None:
    file = write("gemma3", leave_out=("attention.sliding_window",))
    config: Any = read_config(file.metadata, file.tensors)
    assert set(config.layer_types) == {"full_attention"}


def test_what_granite_leaves_out_scales_nothing(write: Callable[..., GgufFile]) -> None:
    scales = ("embedding_scale", "residual_scale", "logit_scale", "attention.scale")
    file = write("granite", leave_out=scales)
    config: Any = read_config(file.metadata, file.tensors)
    assert (config.embedding_multiplier, config.residual_multiplier, config.logits_scaling) == (1, 1, 1)
    assert config.attention_multiplier == 16**-0.5


def test_the_tokens_that_end_a_text(write: Callable[..., GgufFile]) -> None:
    ids = {"bos": 1, "eos": 2, "eot": 3, "eom": 2, "padding": 2**32 - 1}
    file = write("llama", settings={f":tokenizer.ggml.{name}_token_id": value for name, value in ids.items()})
    config: Any = read_config(file.metadata, file.tensors)
    assert (config.bos_token_id, config.eos_token_id, config.pad_token_id) == (1, [2, 3], None)


def test_an_old_name_for_evenly_stretched_positions(write: Callable[..., GgufFile]) -> None:
    file = write(
        "llama-linear-rope", leave_out=("rope.scaling.type", "rope.scaling.factor"), settings={"rope.scale_linear": 4.0}
    )
    assert_same_model(read(file), "llama-linear-rope")


REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("llama", {"settings": {":general.architecture": "falcon"}}, "family 'falcon'"),
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
        r"attn_q\.weight .* does not fit the model\.layers\.0\.self_attn",
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
        "parallel",
    ),
    ("glm4", {"settings": {"rope.dimension_sections": [8, 12, 12, 0]}}, r"glm4\.rope\.dimension_sections"),
    ("glm4", {"settings": {"nextn_predict_layers": 1}}, r"glm4\.nextn_predict_layers = 1"),
    ("olmo2", {"settings": {"attention.sliding_window": 64}}, r"olmo2\.attention\.sliding_window = 64"),
]
"""A case, what is changed in its file, and the message."""


@pytest.mark.parametrize(("case", "changes", "message"), REFUSED, ids=[message for _, _, message in REFUSED])
def test_what_would_be_read_wrong_is_refused_by_name(
    case: str, changes: dict[str, Any], message: str, write: Callable[..., GgufFile]
) -> None:
    file = write(case, **changes)
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
    ({"tensors": {"blk.90000000.attn_norm.weight": np.ones(64)}, "settings": {"block_count": 90000001}}, "layers"),
]


@pytest.mark.parametrize(("changes", "message"), DAMAGED, ids=[message for _, message in DAMAGED])
def test_settings_without_sense_are_refused(
    changes: dict[str, Any], message: str, write: Callable[..., GgufFile]
) -> None:
    file = write("llama", **changes)
    with pytest.raises(ModelLoadError, match=message):
        read_config(file.metadata, file.tensors)


def test_a_file_that_does_not_name_its_family() -> None:
    with pytest.raises(ModelLoadError, match=r"general\.architecture"):
        read_config({}, {})


@functools.cache
def opened(case: str, folder: Path) -> GgufFile:
    return GgufFile.open(save_family(built(case), folder / f"{case}.gguf"))


VALUES = st.one_of(
    st.integers(0, 2**64 - 1),
    st.sampled_from([0, 1, 2, 3, 4, 5, 8, 16, 24, 64, 65, 96, 128, 2**20]),
    st.floats(width=32),
    st.text(max_size=5),
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
    keys = st.sampled_from(sorted(file.metadata))
    changed = {**file.metadata, **data.draw(st.dictionaries(keys, VALUES, min_size=1, max_size=3))}
    tensors = dict(file.tensors)
    for name in data.draw(st.lists(st.sampled_from(sorted(tensors)), max_size=1)):
        del tensors[name]
    with contextlib.suppress(SelfSpecError):
        model = build_on_meta(read_config(changed, tensors))
        sources = find_parameters(tensors, model)
        assert sources.keys() == dict(model.named_parameters()).keys()
