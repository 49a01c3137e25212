"""Section by section what a user can get wrong: a typed error that says what and why, and nothing half-done."""

import copy
import json
import shutil
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    LogitsProcessor,
    PreTrainedModel,
    StoppingCriteria,
    T5Config,
    T5ForConditionalGeneration,
)

from helpers.checkpoints import EOS, make_tokenizer
from helpers.models import LAYERS, VOCABULARY, build, plain_text, prompt
from helpers.scripted import Scripted
from selfspec import Engine, SamplingParams, SelfSpecError, custom_generate, errors, load_model
from selfspec.decoding.draft import TokenDraft
from selfspec.methods.base import Needs
from selfspec.runtimes.target import Target
from selfspec.sampling.acceptance import TokenTree

PROMPT = prompt(12)
METHOD = ("layerskip", {"exit_layer": 2, "draft_length": 4})


@pytest.fixture(scope="module")
def engine() -> Engine:
    name, settings = METHOD
    return Engine(build("llama"), make_tokenizer(), name, settings=settings)


def assert_usable(engine: Engine) -> None:
    """The engine writes what transformers writes, whatever went wrong before."""
    assert engine.generate(PROMPT, max_new_tokens=24, ignore_eos=True).token_ids == plain_text("llama", PROMPT, 24)


def test_every_error_is_a_selfspec_error() -> None:
    own = [each for each in vars(errors).values() if isinstance(each, type) and each.__module__ == errors.__name__]
    classes = [each for each in own if not issubclass(each, Warning)]
    assert len(classes) > 10
    assert all(issubclass(error, SelfSpecError) for error in classes)


# Prompts


@pytest.mark.parametrize("empty", ["", [], torch.empty(0, dtype=torch.long)])
def test_empty_prompt_without_bos(engine: Engine, empty: Any) -> None:
    with pytest.raises(errors.InvalidPromptError, match="empty and there is no BOS"):
        engine.stream(empty)


@pytest.mark.parametrize("empty", ["", []])
def test_empty_prompt_with_bos_starts_there(empty: Any) -> None:
    tokenizer = make_tokenizer()
    tokenizer.bos_token = EOS
    assert Engine(build("llama"), tokenizer, method="autoregressive").encode(empty) == [tokenizer.bos_token_id]


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ([1, VOCABULARY], f"token id {VOCABULARY} of the prompt is outside the model's vocabulary of {VOCABULARY}"),
        ([-1], "token id -1"),
        ([1, 2.5], "2.5 at index 1 is not a token id"),
        ([True], "True at index 0 is not a token id"),
        ([[1, 2]], r"\[1, 2\] at index 0 is not a token id"),
        (torch.ones(2, 3, dtype=torch.long), r"not a torch.int64 tensor of shape \[2, 3\]"),
        (torch.ones(3), "not a torch.float32 tensor"),
        (b"bytes", "not bytes"),
        (7, "not int"),
        (None, "not NoneType"),
        ("half a surrogate \udc80", "character 17 is a lone surrogate"),
        ([{"role": "user", "content": "hello"}], "no chat template"),
    ],
)
def test_prompts_that_are_none(engine: Engine, wrong: Any, message: str) -> None:
    with pytest.raises(errors.InvalidPromptError, match=message):
        engine.stream(wrong)


def test_chat_template_that_refuses() -> None:
    tokenizer = make_tokenizer(chat_template="{{ raise_exception('roles must alternate') }}")
    with pytest.raises(errors.InvalidPromptError, match="roles must alternate"):
        Engine(build("llama"), tokenizer, method="autoregressive").encode([{"role": "user", "content": "hello"}])


def test_text_without_a_tokenizer() -> None:
    engine = Engine(build("llama"), method="autoregressive")
    with pytest.raises(errors.InvalidPromptError, match="text needs a tokenizer"):
        engine.stream("text")
    with pytest.raises(errors.InvalidParameterError, match="stop strings need a tokenizer"):
        engine.stream(PROMPT, stop=["x"])
    assert_usable(engine)


@pytest.mark.parametrize(
    ("length", "new_tokens", "remedy"),
    [(100, 925, "at most 924 new tokens"), (1030, 1, "shorten the prompt"), (1024, 1, "shorten the prompt")],
)
def test_context_is_too_short(engine: Engine, length: int, new_tokens: int, remedy: str) -> None:
    with pytest.raises(errors.ContextLengthError) as refusal:
        engine.stream([1] * length, max_new_tokens=new_tokens)
    for part in (f"prompt of {length} tokens", f"{new_tokens} new tokens", "context of 1024", remedy):
        assert part in str(refusal.value)


def test_context_is_just_long_enough(engine: Engine) -> None:
    assert engine.generate([1] * 1020, max_new_tokens=4, ignore_eos=True).new_token_count == 4


# Parameters


WRONG_PARAMETERS: list[dict[str, Any]] = [
    {"adapter": ""},
    {"adapter": 3},
    {"temperature": -0.1},
    {"temperature": float("nan")},
    {"temperature": float("inf")},
    {"temperature": 10**400},
    {"temperature": "hot"},
    {"top_p": 0.0},
    {"top_p": 1.01},
    {"top_p": float("nan")},
    {"top_k": -1},
    {"top_k": 1.5},
    {"min_p": -0.1},
    {"min_p": float("nan")},
    {"repetition_penalty": 0.0},
    {"repetition_penalty": -1.0},
    {"repetition_penalty": float("nan")},
    {"max_new_tokens": 0},
    {"max_new_tokens": -3},
    {"max_new_tokens": 2.0},
    {"seed": 1.5},
    {"seed": True},
    {"stop": [""]},
    {"stop": ["fine", ""]},
    {"stop": [None]},
    {"stop": 5},
    {"stop_token_ids": [-1]},
    {"stop_token_ids": 3},
    {"acceptance": "sometimes"},
    {"presence_penalty": 2.1},
    {"presence_penalty": "much"},
    {"frequency_penalty": -2.5},
    {"frequency_penalty": float("nan")},
    {"logit_bias": [1, 2]},
    {"logit_bias": 3},
    {"logit_bias": {"5": 1.0}},
    {"logit_bias": {-1: 1.0}},
    {"logit_bias": {5: 101}},
    {"logit_bias": {5: float("nan")}},
    {"logit_bias": {5: None}},
    {"min_tokens": -1},
    {"min_tokens": 1.5},
    {"min_tokens": 1000},
    {"logprobs": -1},
    {"logprobs": 21},
    {"logprobs": True},
    {"prompt_logprobs": 21},
    {"prompt_logprobs": 1.0},
    {"max_new_tokens": 0, "logprobs": 1},
    {"json_schema": "{"},
    {"json_schema": "[1]"},
    {"json_schema": 5},
    {"json_schema": {"type": {1, 2}}},
    {"json_schema": {"const": float("nan")}},
    {"json_schema": "[" * 100_000},
    {"regex": ""},
    {"grammar": 5},
    {"grammar": "start: A", "regex": "a"},
    {"ignore_eos": "yes"},
    {"ignore_eos": None},
    {"logits_processors": 5},
    {"stopping_criteria": 5},
]


@pytest.mark.parametrize("wrong", WRONG_PARAMETERS)
def test_sampling_parameters_out_of_range(engine: Engine, wrong: dict[str, Any]) -> None:
    (name, value), *_ = wrong.items()
    with pytest.raises(errors.InvalidParameterError, match=name.split("_")[0]):
        SamplingParams(**wrong)
    with pytest.raises(errors.InvalidParameterError):
        engine.stream(PROMPT, **{name: value})


def test_unknown_parameter_names_the_nearest(engine: Engine) -> None:
    with pytest.raises(errors.InvalidParameterError, match="no sampling parameter 'temprature'; did you mean 'temp"):
        engine.stream(PROMPT, temprature=0.5)


def test_every_parameter_is_tried_with_wrong_values() -> None:
    assert {name for wrong in WRONG_PARAMETERS for name in wrong} == {field.name for field in fields(SamplingParams)}


def test_a_schema_says_itself_where_the_text_ends() -> None:
    with pytest.raises(errors.InvalidParameterError, match="min_tokens and json_schema"):
        SamplingParams(min_tokens=3, json_schema={})


def test_logits_are_not_divided_by_nearly_nothing() -> None:
    assert SamplingParams(temperature=1e-40).temperature == 0.0
    assert SamplingParams(temperature=0.01).temperature == 0.01


def test_coupled_sampling_needs_a_seed() -> None:
    with pytest.raises(errors.InvalidParameterError, match="needs a seed"):
        SamplingParams(temperature=1.0, acceptance="coupled")


# Methods


@pytest.mark.parametrize(
    ("method", "settings", "error", "message"),
    [
        ("layerskipp", {}, errors.UnknownMethodError, "did you mean 'layerskip'?"),
        ("layerskip", {"exit_layr": 2}, errors.InvalidSettingError, "did you mean 'exit_layer'?"),
        ("layerskip", {"exit_layer": LAYERS}, errors.InvalidSettingError, f"has {LAYERS} layers, choose 1 to"),
        ("layerskip", {"exit_layer": 0}, errors.InvalidSettingError, "exit_layer must be at least 1, not 0"),
        ("layerskip", {"exit_layer": -1}, errors.InvalidSettingError, "at least 1, not -1"),
        ("layerskip", {"draft_length": 0}, errors.InvalidSettingError, "draft_length must be at least 1"),
        ("uniform", {"skip_ratio": 1.5}, errors.InvalidSettingError, "at least 0 and at most 1, not 1.5"),
        ("uniform", {"skip_ratio": -0.1}, errors.InvalidSettingError, "not -0.1"),
        ("uniform", {"skip_ratio": float("nan")}, errors.InvalidSettingError, "not nan"),
        ("uniform", {"skip_ratio": 0.0}, errors.InvalidSettingError, "skips none"),
    ],
)
def test_methods_and_settings(method: str, settings: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error) as refusal:
        Engine(build("llama"), method=method, settings=settings)
    assert message in str(refusal.value)


def test_methods_are_checked_before_weights_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("selfspec.engine.load_model", lambda *_, **__: pytest.fail("the model was loaded"))
    with pytest.raises(errors.UnknownMethodError):
        Engine.from_pretrained("tiny", "layerskipp")
    with pytest.raises(errors.InvalidSettingError):
        Engine.from_pretrained("tiny", "uniform", settings={"skip_ratio": 2})


# Models and tokenizers


def change_config(**changes: Any) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**config, **changes}))

    return change


def remove(*names: str) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        for name in names:
            (folder / name).unlink()

    return change


def write(name: str, content: bytes) -> Callable[[Path], None]:
    return lambda folder: (folder / name).write_bytes(content) and None


def truncate(folder: Path) -> None:
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])


def sentencepiece_alone(folder: Path) -> None:
    (folder / "tokenizer.json").rename(folder / "tokenizer.model")


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (remove("model.safetensors"), "no file named model.safetensors"),
        (write("model.safetensors", b"not weights" * 100), "cut short or damaged .* download it again"),
        (write("model.safetensors", b""), "header"),
        (truncate, "cut short"),
        (remove("config.json"), "it has no config.json"),
        (write("config.json", b"{"), "not a valid JSON"),
        (remove("tokenizer.json", "tokenizer_config.json"), "the tokenizer of .* tokenizer.json is there"),
        (write("tokenizer.json", b"{"), "cannot load the tokenizer of"),
        (sentencepiece_alone, "the tokenizer of .* run: pip install sentencepiece protobuf .*; or copy tokenizer.json"),
        (change_config(num_hidden_layers=8), "weights are missing, among them model.layers.6"),
        (change_config(intermediate_size=100), r"\[64, 96\] in the weights, but \[64, 100\] by config.json"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_files_that_are_missing_or_corrupt(
    checkpoint: str, tmp_path: Path, damage: Callable[[Path], None], message: str
) -> None:
    folder = Path(shutil.copytree(checkpoint, tmp_path / "damaged"))
    damage(folder)
    with pytest.raises(errors.ModelLoadError, match=message) as refusal:
        load_model(folder)
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize("end", [1.5, "x", [None], {"a": 1}])
def test_an_end_of_sequence_that_is_no_token(checkpoint: str, end: Any, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(checkpoint, tmp_path / "odd"))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": end}))
    with pytest.raises(errors.UnsupportedModelError, match=r"eos_token_id is .*, no token id or list of these"):
        Engine.from_pretrained(folder)


@pytest.mark.parametrize("name", ["qwen2", "gemma3"])
def test_a_folder_without_the_tokenizer_of_its_family(name: str, tmp_path: Path) -> None:
    """transformers makes one of special tokens alone, to which texts are empty, or unknown tokens."""
    build(name).save_pretrained(tmp_path)
    for content in (None, {"added_tokens_decoder": {"7": {"content": "<|im_start|>", "special": True}}}):
        if content is not None:
            (tmp_path / "tokenizer_config.json").write_text(json.dumps(content))
        with pytest.raises(errors.ModelLoadError, match=r"the tokenizer of .* tokenizer\.json is there, or .* copy it"):
            load_model(tmp_path)


@pytest.mark.parametrize("name", ["no/such/folder", "./nowhere", "/nowhere", "tinyy"])
def test_missing_folder(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(errors.ModelLoadError, match=r"there is no model .* \(known by name: smollm2, tiny, "):
        load_model(name)


def test_out_of_memory_while_loading(checkpoint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise torch.OutOfMemoryError("tried to allocate 20 GiB")

    monkeypatch.setattr(torch.nn.Module, "to", fail)
    with pytest.raises(errors.OutOfMemoryError, match="load it in bfloat16"):
        load_model(checkpoint)


def test_tokenizer_that_is_larger_than_the_model(checkpoint: str, tmp_path: Path) -> None:
    message = f"largest id is 199, but the model has {VOCABULARY} embeddings"
    with pytest.raises(errors.TokenizerMismatchError, match=message):
        Engine(build("llama"), make_tokenizer(200), method="autoregressive")
    folder = Path(shutil.copytree(checkpoint, tmp_path / "larger"))
    make_tokenizer(200).save_pretrained(folder)
    with pytest.raises(errors.TokenizerMismatchError, match=message):
        Engine.from_pretrained(folder)


def test_a_token_that_was_added_and_has_no_embedding() -> None:
    """As that of pictures has none in Gemma 3's models of text."""
    tokenizer = make_tokenizer()
    tokenizer.add_tokens(["<image>"], special_tokens=True)
    engine, plain = (Engine(build("llama"), each, "autoregressive") for each in (tokenizer, make_tokenizer()))
    assert engine.generate("hello", max_new_tokens=8).token_ids == plain.generate("hello", max_new_tokens=8).token_ids
    outside = f"token id {VOCABULARY} of the prompt is outside the model's vocabulary of {VOCABULARY}"
    with pytest.raises(errors.InvalidPromptError, match=outside):
        engine.generate("hello <image>")
    tokenizer.bos_token = "<image>"
    with pytest.raises(errors.InvalidPromptError, match=outside):
        engine.generate("")


_TINY = {"vocab_size": 100, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}


def assert_refused_by_name(error: Exception, family: str) -> None:
    assert f"model family '{family}' is not supported" in str(error)


def test_encoder_decoder_models() -> None:
    model = T5ForConditionalGeneration(T5Config(vocab_size=100, d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4))
    with pytest.raises(errors.UnsupportedModelError, match="encoder-decoder") as refusal:
        Engine(model.eval(), method="autoregressive")
    assert_refused_by_name(refusal.value, "t5")
    with pytest.raises(errors.UnsupportedModelError, match="encoder-decoder"):
        model.generate(torch.tensor([[1]]), decoder_start_token_id=0, custom_generate=custom_generate)


def test_a_name_in_place_of_a_model() -> None:
    name: Any = "tiny"
    with pytest.raises(errors.InvalidParameterError, match=r"for a name: Engine.from_pretrained\('tiny'\)"):
        Engine(name)


@pytest.mark.parametrize("family", ["t5", "of_tomorrow"])
def test_unsupported_families_are_refused_before_weights_are_read(tmp_path: Path, family: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": family}))
    with pytest.raises(errors.UnsupportedModelError) as refusal:
        load_model(tmp_path)
    assert_refused_by_name(refusal.value, family)


_CODE = "from pathlib import Path\nPath(__file__).with_name('ran').touch()\n"


@pytest.mark.parametrize("part", ["config.json", "tokenizer_config.json"])
def test_code_of_a_checkpoint_is_never_run(part: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is refused in one line, without a question on the terminal."""
    build("llama").save_pretrained(tmp_path)
    (tmp_path / "code.py").write_text(_CODE)
    asked: list[str] = []
    monkeypatch.setattr("builtins.input", lambda text: asked.append(text) or "y")
    if part == "config.json":
        content = {"model_type": "of_tomorrow", "auto_map": {"AutoConfig": "code.C", "AutoModelForCausalLM": "code.M"}}
        message = "model family 'of_tomorrow' is not supported: it needs code of the checkpoint, which is never run"
    else:
        content = {"tokenizer_class": "T", "auto_map": {"AutoTokenizer": ["code.T", None]}}
        message = "cannot load the tokenizer of .* contains custom code"
    (tmp_path / part).write_text(json.dumps(content))
    with pytest.raises((errors.UnsupportedModelError, errors.ModelLoadError), match=message) as refusal:
        load_model(tmp_path)
    assert "\n" not in str(refusal.value)
    assert not asked
    assert not list(tmp_path.rglob("ran"))


def test_model_in_training_mode() -> None:
    model = copy.deepcopy(build("llama")).train()
    with pytest.raises(errors.UnsupportedModelError, match="training mode"):
        Engine(model, method="autoregressive")


@pytest.mark.parametrize("dtype", ["float63", "float64", "", "torch.float32"])
def test_unknown_dtype(checkpoint: str, dtype: str) -> None:
    with pytest.raises(errors.DeviceError, match=r"unknown dtype .* choose auto, float32, bfloat16, float16"):
        load_model(checkpoint, dtype=dtype)


@pytest.mark.parametrize("device", ["gpu", "cuda:99", "", "meta", "cpu0"])
def test_unknown_device(checkpoint: str, device: str) -> None:
    with pytest.raises(errors.DeviceError, match="device"):
        load_model(checkpoint, device=device)


# What goes wrong in the middle


def broken_model(weight: float) -> PreTrainedModel:
    model = copy.deepcopy(build("llama"))
    with torch.no_grad():
        model.model.layers[-1].mlp.down_proj.weight[0, 0] = weight
    return model


@pytest.mark.parametrize("weight", [float("nan"), float("inf")])
@pytest.mark.parametrize("method", ["autoregressive", "layerskip"])
def test_logits_that_are_no_numbers(weight: float, method: str) -> None:
    engine = Engine(broken_model(weight), method=method)
    with pytest.raises(errors.NonFiniteLogitsError, match=r"for new token 1 \(position 12\)"):
        engine.generate(PROMPT, max_new_tokens=8)


def poisoned_model(token_id: int) -> PreTrainedModel:
    """After a token, nothing that it computes is a number."""
    model = copy.deepcopy(build("llama"))
    assert model.get_input_embeddings().weight is not model.get_output_embeddings().weight
    with torch.no_grad():
        model.get_input_embeddings().weight[token_id] = torch.nan
    return model


@pytest.mark.parametrize("method", ["autoregressive", "layerskip", "uniform"])
def test_logits_that_stop_being_numbers(method: str) -> None:
    """Every method writes as far as plain decoding does, and stops at the same token."""
    healthy = plain_text("llama", PROMPT, 24)
    poison = healthy[9]
    expected = healthy[: healthy.index(poison) + 1]
    assert poison not in PROMPT
    engine = Engine(poisoned_model(poison), method=method)
    written: list[int] = []
    with pytest.raises(errors.NonFiniteLogitsError, match=rf"for new token {len(expected) + 1} "):
        written.extend(piece.token_id for piece in engine.stream(PROMPT, max_new_tokens=24))
    assert tuple(written) == expected


@pytest.mark.parametrize("siblings", [0, 2])
def test_a_rejected_draft_that_is_no_numbers_does_no_harm(siblings: int) -> None:
    healthy = plain_text("llama", PROMPT, 24)
    poison = next(token for token in range(100) if token not in healthy and token not in PROMPT)
    target = Target(poisoned_model(poison))
    draft = TokenDraft((1, poison, 2)[: 1 + siblings] if siblings else (poison,), TokenTree((-1,) * (1 + siblings)))
    engine = Engine(target.model, method=Scripted(target, lambda _: draft, Needs(sibling_rows=siblings)))
    assert engine.generate(PROMPT, max_new_tokens=24).token_ids == healthy


class FailingOnce(LogitsProcessor):
    """Raises in the middle of an output, one time."""

    def __init__(self, error: BaseException) -> None:
        self.error: BaseException | None = error
        self.calls = 0

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        if self.calls > 7 and self.error is not None:
            error, self.error = self.error, None
            raise error
        return scores


@pytest.mark.parametrize(
    "cause",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"),
        MemoryError(),
        RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes"),
        RuntimeError("MPS backend out of memory (MPS allocated: 8.00 GB)"),
        RuntimeError("CUDA error: out of memory"),
    ],
    ids=["device", "python", "host", "metal", "driver"],
)
def test_out_of_memory_says_what_to_reduce(engine: Engine, cause: Exception) -> None:
    with pytest.raises(
        errors.OutOfMemoryError, match="12 tokens and up to 24 new ones; reduce max_new_tokens"
    ) as error:
        engine.generate(PROMPT, max_new_tokens=24, ignore_eos=True, logits_processors=[FailingOnce(cause)])
    assert error.value.__cause__ is None  # whose frames would hold the memory
    assert_usable(engine)


def test_out_of_memory_for_the_cache(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise torch.OutOfMemoryError("tried to allocate 20 GiB")

    with monkeypatch.context() as patch:
        patch.setattr(Target, "new_sequence", fail)
        with pytest.raises(errors.OutOfMemoryError, match="reduce"):
            engine.generate(PROMPT, max_new_tokens=24)
    assert_usable(engine)


def test_other_errors_are_not_taken_for_memory(engine: Engine) -> None:
    with pytest.raises(RuntimeError, match="something else"):
        engine.generate(PROMPT, logits_processors=[FailingOnce(RuntimeError("something else"))])
    assert_usable(engine)


class Interrupt(StoppingCriteria):
    """Ctrl-C after as many tokens."""

    def __init__(self, tokens: int) -> None:
        self.tokens = tokens

    def __call__(self, input_ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        if input_ids.shape[1] == len(PROMPT) + self.tokens:
            raise KeyboardInterrupt
        return torch.tensor([False])


@pytest.mark.parametrize("tokens", [1, 2, 9])
def test_interrupt_leaves_the_engine_usable(engine: Engine, tokens: int) -> None:
    stream = engine.stream(PROMPT, max_new_tokens=24, ignore_eos=True, stopping_criteria=[Interrupt(tokens)])
    written: list[int] = []
    with pytest.raises(KeyboardInterrupt):
        written.extend(piece.token_id for piece in stream)
    assert tuple(written) == plain_text("llama", PROMPT, 24)[: len(written)]
    with pytest.raises(RuntimeError, match="before the output was complete"):
        _ = stream.result
    assert_usable(engine)


def test_abandoned_stream_leaves_the_engine_usable(engine: Engine) -> None:
    stream = engine.stream(PROMPT, max_new_tokens=24, ignore_eos=True)
    pieces = [next(stream) for _ in range(5)]
    assert_usable(engine)
    rest = [piece.token_id for piece in stream]
    assert (*(piece.token_id for piece in pieces), *rest) == plain_text("llama", PROMPT, 24)
