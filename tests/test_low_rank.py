"""LoRA adapters beside the weights: the text is PEFT's own, whatever drafts, and requests with different ones mix."""

import copy
import functools
from pathlib import Path
from typing import Any

import pytest
import torch

from fixtures.make_gguf import fixture_path
from helpers import gguf_oracle
from helpers.adapters import adapted, lora, native, peft_text, plain_text, save
from helpers.kernels import needs_kernels
from helpers.models import prompt
from selfspec import Engine, SamplingParams, load_model
from selfspec.engine import EngineOptions
from selfspec.errors import AdapterError, InvalidParameterError

TEXT, LENGTH = prompt(12), 24
LLAMA = "llama"
METHODS: dict[str, dict[str, Any]] = {
    "autoregressive": {},
    "uniform": {"skip_ratio": 0.5, "draft_length": 4, "confidence_threshold": 0.0},
    "low-bit": {},
    "prompt-lookup": {},
    "auto": {},
}
FAMILIES = (
    "llama",
    "llama-tied-biases",
    "qwen3",
    "phi3",
    "gemma2",
    "olmo2",
    "glm4",
    "starcoder2",
    "granite",
)


@functools.cache
def _adapted(family: str, seed: int = 0, rank: int = 4) -> Any:
    return adapted(native(family), lora(rank), seed)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Two adapters of the Llama, of different ranks."""
    root = tmp_path_factory.mktemp("adapters")
    return {name: save(_adapted(LLAMA, *each), root / name) for name, each in {"one": (0, 4), "two": (1, 12)}.items()}


def engine(folders: dict[str, Path], method: str = "uniform", **options: Any) -> Engine:
    return Engine(copy.deepcopy(native(LLAMA)), None, method, settings=METHODS[method], adapters=folders, **options)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("runtime", ["compiled", "fused"])
def test_every_family_writes_what_peft_writes(family: str, runtime: str, tmp_path: Path) -> None:
    model = _adapted(family)
    expected = peft_text(model, TEXT, LENGTH)
    assert expected != plain_text(family, tuple(TEXT), LENGTH)
    settings = METHODS["uniform"]
    made = Engine(
        native(family), method="uniform", settings=settings, runtime=runtime, adapters={"a": save(model, tmp_path)}
    )
    output = made.generate(TEXT, max_new_tokens=LENGTH, adapter="a")
    assert output.token_ids == expected
    assert output.drafted > 0
    assert output.accepted > 0
    assert made.generate(TEXT, max_new_tokens=LENGTH).token_ids == plain_text(family, tuple(TEXT), LENGTH)


@functools.cache
def long_text() -> tuple[int, ...]:
    return peft_text(_adapted(LLAMA, 1, 12), TEXT, 4 * LENGTH)


@pytest.mark.parametrize("method", METHODS)
def test_every_kind_of_draft_is_verified_by_the_adapted_model(folders: dict[str, Path], method: str) -> None:
    output = engine(folders, method).generate(TEXT, max_new_tokens=4 * LENGTH, adapter="two")
    assert output.token_ids == long_text()
    if method not in ("autoregressive", "auto"):
        assert output.drafted > 0
        assert output.accepted > 0


@needs_kernels
def test_drafts_and_verifications_are_native(folders: dict[str, Path]) -> None:
    output = engine(folders, "low-bit").generate(TEXT, max_new_tokens=LENGTH, adapter="one")
    paths = [path for each in output.rounds for path in (each.drafting, each.verification) if path is not None]
    assert paths
    assert all(path.native for path in paths), {str(path) for path in paths}


def test_requests_with_different_adapters_run_together(folders: dict[str, Path]) -> None:
    texts = [prompt(length, seed=length) for length in (5, 40, 12, 7, 90)]
    names = ["one", None, "two", "one", "two"]
    models = {"one": _adapted(LLAMA, 0, 4), "two": _adapted(LLAMA, 1, 12), None: native(LLAMA)}
    params = [SamplingParams(max_new_tokens=LENGTH, adapter=name) for name in names]
    outputs = engine(folders).generate_each(list(zip(texts, params, strict=True)))
    for text, name, output in zip(texts, names, outputs, strict=True):
        assert output.token_ids == peft_text(models[name], text, LENGTH)
        assert output.accepted > 0


def test_the_prefix_cache_tells_adapters_apart(folders: dict[str, Path], tmp_path: Path) -> None:
    models = {"one": _adapted(LLAMA, 0, 4), "two": _adapted(LLAMA, 1, 12), None: native(LLAMA)}
    made, text = engine(folders, prefix_cache=2**24, cache_dir=tmp_path), prompt(200)
    for name in ("one", None, "two"):
        first, again = (made.generate(text, max_new_tokens=LENGTH, adapter=name) for _ in range(2))
        assert first.cached_prompt_tokens == 0
        assert again.cached_prompt_tokens > 0
        assert first.token_ids == again.token_ids == peft_text(models[name], text, LENGTH)
    made.flush()
    later = engine(folders, cache_dir=tmp_path).generate(text, max_new_tokens=LENGTH, adapter="two")
    assert later.cached_prompt_tokens > 0
    assert later.token_ids == peft_text(models["two"], text, LENGTH)


def test_ranks_and_scales_by_layer_are_those_of_the_files(tmp_path: Path) -> None:
    config = lora(
        4,
        ["q_proj", "down_proj"],
        rank_pattern={"model.layers.2.self_attn.q_proj": 9},
        alpha_pattern={"layers.2.self_attn.q_proj": 30, "down_proj": 3},
        use_rslora=True,
    )
    model = adapted(native(LLAMA), config)
    output = engine({"a": save(model, tmp_path)}).generate(TEXT, max_new_tokens=LENGTH, adapter="a")
    assert output.token_ids == peft_text(model, TEXT, LENGTH)
    assert output.accepted > 0


@pytest.mark.parametrize("weights", ["int8", "int4"])
def test_low_bit_weights_have_adapters_too(folders: dict[str, Path], weights: str) -> None:
    with torch.no_grad():
        made = engine(folders, weights=weights)
        output = made.generate(TEXT, max_new_tokens=LENGTH, adapter="one")
        # The same low-bit numbers in the dtype, with PEFT's own layers.
        dense = copy.deepcopy(native(LLAMA))
        _unpack(made.target.model, dense)
        model = adapted(dense, lora(4))
        assert output.token_ids == peft_text(model, TEXT, LENGTH)
    assert output.accepted > 0


def _unpack(low_bit: Any, dense: Any) -> None:
    """Gives a model the numbers of another one's low-bit weights."""
    modules = dict(low_bit.named_modules())
    embedding = dense.get_input_embeddings()
    embedding.weight.copy_(low_bit.get_input_embeddings()(torch.arange(embedding.num_embeddings)))
    for name, module in dense.named_modules():
        if isinstance(module, torch.nn.Linear):
            inputs = torch.eye(module.in_features)
            module.weight.copy_((modules[name](inputs) - (0 if module.bias is None else module.bias)).T)


@needs_kernels
@pytest.mark.parametrize("name", ["F32", "Q4_K", "Q8_0"])
def test_a_gguf_file_keeps_its_numbers_beside_an_adapter(name: str, tmp_path: Path) -> None:
    text = [token % 100 for token in TEXT]
    model = adapted(gguf_oracle.dequantised(name), lora(4))
    loaded, _ = load_model(fixture_path(name), dtype=torch.float32, activations="exact")
    made = Engine(loaded, method="suffix", adapters={"a": save(model, tmp_path)})
    output = made.generate(text, max_new_tokens=4 * LENGTH, ignore_eos=True, adapter="a")
    assert output.token_ids == peft_text(model, text, 4 * LENGTH, eos_token_id=None)
    assert output.token_ids != made.generate(text, max_new_tokens=4 * LENGTH, ignore_eos=True).token_ids
    assert output.accepted > 0


def test_an_unknown_name_is_refused_with_those_there_are(folders: dict[str, Path]) -> None:
    made = engine(folders)
    with pytest.raises(InvalidParameterError, match="there is no adapter 'three'; this engine has one, two"):
        made.generate(TEXT, adapter="three")


def test_a_model_that_is_cast_after_its_adapter_was_read(folders: dict[str, Path]) -> None:
    made = engine(folders)
    made.target.model.to(torch.bfloat16)
    with pytest.raises(AdapterError, match=r"adapter 'one' was read as torch.float32, .*; make another engine"):
        made.generate(TEXT, max_new_tokens=4, adapter="one")


def test_options_name_adapters(folders: dict[str, Path]) -> None:
    made = Engine(native(LLAMA), options=EngineOptions(adapters=folders))
    assert list(made.adapters) == ["one", "two"]
    assert made.adapters["two"].bytes > made.adapters["one"].bytes > 0
