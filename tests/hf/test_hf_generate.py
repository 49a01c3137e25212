"""The door through transformers' generate: same arguments, same tokens."""

import copy
import gc
import pickle
import weakref
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from transformers import (
    EosTokenCriteria,
    LogitsProcessorList,
    MambaConfig,
    MambaForCausalLM,
    MaxLengthCriteria,
    MaxTimeCriteria,
    RepetitionPenaltyLogitsProcessor,
    StoppingCriteria,
    StoppingCriteriaList,
    StopStringCriteria,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)
from transformers.generation import LogitsProcessor

from helpers.checkpoints import make_tokenizer
from helpers.models import build, prompt
from selfspec import Engine, custom_generate
from selfspec.errors import InvalidParameterError, InvalidPromptError, InvalidSettingError, UnknownMethodError
from selfspec.hf.custom_generate import CustomGenerate, _sampling_of
from selfspec.methods.registry import DEFAULT_METHOD

PROMPT = torch.tensor([[5, 17, 3, 99, 42, 8]])
BATCH = torch.tensor([[5, 17, 3, 99, 42, 8], [1, 2, 3, 4, 5, 6]])
MODEL = build("llama")
PLAIN = MODEL.generate(PROMPT, max_new_tokens=40, do_sample=False)[0, PROMPT.shape[1] :].tolist()


def drafting() -> Any:
    return custom_generate("uniform", {"skip_ratio": 0.5, "draft_length": 4, "confidence_threshold": 0.0})


class AvoidsTheLastToken(LogitsProcessor):
    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return scores.scatter(1, input_ids[:, -1:], -torch.inf)


class EndsAtTwenty(StoppingCriteria):
    def __call__(self, input_ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        return torch.full((len(input_ids),), input_ids.shape[1] >= 20)


@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {"max_length": 21},
        {"repetition_penalty": 1.3},
        {"no_repeat_ngram_size": 2},
        {"bad_words_ids": [[PLAIN[4]], [PLAIN[7], PLAIN[8]]]},
        {"suppress_tokens": [PLAIN[2]]},
        {"eos_token_id": PLAIN[9]},
        {"eos_token_id": [PLAIN[20], PLAIN[9]], "min_new_tokens": 15},
        {"logits_processor": [AvoidsTheLastToken()]},
        {"stopping_criteria": StoppingCriteriaList([EndsAtTwenty()])},
        {"stopping_criteria": StoppingCriteriaList([MaxTimeCriteria(600.0)])},
        {"stopping_criteria": StoppingCriteriaList([MaxLengthCriteria(17)])},
        {"stopping_criteria": StoppingCriteriaList([EosTokenCriteria(PLAIN[9])])},
        {"use_cache": False},
        {"attention_mask": torch.ones_like(PROMPT)},
    ],
    ids=lambda arguments: " ".join(arguments) or "plain",
)
@pytest.mark.parametrize("prompts", [PROMPT, BATCH], ids=["one", "batch"])
def test_arguments_mean_what_they_mean_to_generate(prompts: torch.Tensor, arguments: dict[str, Any]) -> None:
    if "attention_mask" in arguments:
        arguments = {"attention_mask": torch.ones_like(prompts)}
    common = {"do_sample": False, "pad_token_id": 0, **({} if "max_length" in arguments else {"max_new_tokens": 40})}
    expected = MODEL.generate(prompts, **common, **arguments)
    written = MODEL.generate(prompts, **common, **arguments, custom_generate=drafting())
    assert torch.equal(written, expected)


@pytest.fixture
def engines(monkeypatch: pytest.MonkeyPatch) -> list[Engine]:
    """The engines that are built during a test."""
    built: list[Engine] = []
    build_engine = Engine.__init__

    def noted(self: Engine, *arguments: Any, **options: Any) -> None:
        build_engine(self, *arguments, **options)
        built.append(self)

    monkeypatch.setattr(Engine, "__init__", noted)
    return built


def test_the_method_drafts(engines: list[Engine]) -> None:
    MODEL.generate(PROMPT, max_new_tokens=10, do_sample=False, custom_generate=drafting())
    (engine,) = engines
    assert engine.generate(PROMPT, max_new_tokens=30).accepted > 0


def test_return_dict() -> None:
    output = MODEL.generate(
        PROMPT, max_new_tokens=12, do_sample=False, return_dict_in_generate=True, custom_generate=drafting()
    )
    assert output.sequences[0, PROMPT.shape[1] :].tolist() == PLAIN[:12]


def test_sampling_follows_the_global_generator_and_a_seed_makes_it_its_own() -> None:
    def sample(**options: Any) -> list[int]:
        loop = custom_generate("layerskip", {"exit_layer": 3}, **options)
        common = {"max_new_tokens": 25, "do_sample": True, "temperature": 0.9, "top_k": 20, "pad_token_id": 0}
        return MODEL.generate(PROMPT, **common, custom_generate=loop)[0].tolist()

    torch.manual_seed(1)
    first = sample()
    torch.manual_seed(1)
    assert sample() == first
    assert sample() != first
    assert sample(seed=3) == sample(seed=3)


class Collecting:
    def __init__(self) -> None:
        self.received: list[Any] = []

    def put(self, value: torch.Tensor) -> None:
        self.received.append(value.tolist())

    def end(self) -> None:
        self.received.append("end")


def test_the_streamer_of_generate_gets_what_it_gets_from_generate() -> None:
    theirs, ours = Collecting(), Collecting()
    MODEL.generate(PROMPT, max_new_tokens=15, do_sample=False, streamer=theirs)
    MODEL.generate(PROMPT, max_new_tokens=15, do_sample=False, streamer=ours, custom_generate=drafting())
    assert ours.received == theirs.received


def test_stop_strings_come_as_a_criterion() -> None:
    tokenizer = make_tokenizer()
    stop = tokenizer.decode(PLAIN[6:8])
    criteria = StoppingCriteriaList([StopStringCriteria(tokenizer, [stop])])
    common = {"max_new_tokens": 40, "do_sample": False, "stopping_criteria": criteria}
    expected = MODEL.generate(PROMPT, **common)
    assert expected.shape[1] < PROMPT.shape[1] + 40
    assert torch.equal(MODEL.generate(PROMPT, **common, custom_generate=drafting()), expected)


def test_stop_strings_without_a_tokenizer_are_refused_not_ignored() -> None:
    with pytest.raises(ValueError, match="tokenizer"):
        MODEL.generate(PROMPT, stop_strings=["x"], tokenizer=make_tokenizer(), custom_generate=drafting())


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"num_beams": 2}, InvalidParameterError, "num_beams"),
        ({"output_scores": True, "return_dict_in_generate": True}, InvalidParameterError, "output_scores"),
        ({"assistant_model": MODEL}, InvalidParameterError, "assistant_model"),
        ({"attention_mask": torch.tensor([[1, 1, 1, 1, 1, 0]])}, InvalidPromptError, "padded"),
        ({"guidance_scale": 1.5}, InvalidParameterError, "UnbatchedClassifierFreeGuidance"),
    ],
)
def test_what_cannot_be_done_is_refused(arguments: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        MODEL.generate(PROMPT, max_new_tokens=5, do_sample=False, custom_generate=drafting(), **arguments)


# The function itself, without a call


def greedy(model: Any, token_ids: list[int], **options: Any) -> list[int]:
    ids = torch.tensor([token_ids])
    common = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 30, "do_sample": False, "pad_token_id": 0}
    return model.generate(ids, **common, **options)[0].tolist()


@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma3"])
def test_the_function_itself_drafts_with_the_default_method(name: str, engines: list[Engine]) -> None:
    model, text = copy.deepcopy(build(name)), prompt(6) * 3
    expected = greedy(model, text)
    assert greedy(model, text, custom_generate=custom_generate) == expected
    assert greedy(model, text, custom_generate=custom_generate) == expected
    (engine,) = engines  # built once
    assert engine.method.name == DEFAULT_METHOD == "auto"
    assert engine.generate(text, max_new_tokens=30).drafted > 0


def test_the_function_itself_streams_and_takes_keywords() -> None:
    theirs, ours = Collecting(), Collecting()
    greedy(MODEL, PROMPT[0].tolist(), streamer=theirs)
    greedy(MODEL, PROMPT[0].tolist(), streamer=ours, custom_generate=custom_generate)
    assert ours.received == theirs.received
    config = copy.deepcopy(MODEL.generation_config)
    config.update(max_length=20, do_sample=False)
    written = custom_generate(
        model=MODEL, input_ids=PROMPT, logits_processor=[], stopping_criteria=[], generation_config=config
    )
    assert written[0, 6:].tolist() == PLAIN[:14]


def test_a_call_without_a_method_takes_the_default_too(engines: list[Engine]) -> None:
    loop = custom_generate(seed=3)
    assert isinstance(loop, CustomGenerate)
    assert greedy(MODEL, PROMPT[0].tolist(), custom_generate=loop)[6:] == PLAIN[:30]
    assert [engine.method.name for engine in engines] == [DEFAULT_METHOD]


def test_threads_share_what_is_built(engines: list[Engine]) -> None:
    model = copy.deepcopy(build("llama"))
    prompts = [[seed, *prompt(6), 2 * seed] for seed in range(8)]
    alone = [greedy(model, one) for one in prompts]
    with ThreadPoolExecutor(4) as pool:
        together = list(pool.map(lambda one: greedy(model, one, custom_generate=custom_generate), prompts))
    assert together == alone
    assert len(engines) == 1


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16])
def test_a_model_that_is_cast_after_use_gets_another_engine(dtype: torch.dtype, engines: list[Engine]) -> None:
    """Drafts for which ``auto`` has planned, of low-bit weights, may not be possible in the other dtype."""
    model, text = copy.deepcopy(build("llama")), prompt(6)
    for each in (torch.float32, dtype, torch.float32):
        model.to(each)
        assert greedy(model, text, custom_generate=custom_generate) == greedy(model, text)
    assert len(engines) == 3


def test_a_model_is_freed_after_use(engines: list[Engine]) -> None:
    model = copy.deepcopy(build("llama"))
    expected = greedy(model, prompt(6))
    assert greedy(model, prompt(6), custom_generate=custom_generate) == expected
    watched = [weakref.ref(model), weakref.ref(model.model), weakref.ref(engines.pop())]
    del model
    gc.collect()
    assert [reference() for reference in watched] == [None, None, None]


def test_a_model_can_be_copied_and_pickled_after_use(engines: list[Engine]) -> None:
    model = build.__wrapped__("llama")  # the shared one may have hooks of other tests, which cannot be pickled
    expected = greedy(model, prompt(6), custom_generate=custom_generate)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        with torch.no_grad():
            other.lm_head.weight.copy_(other.lm_head.weight.flip(0))
        changed = greedy(other, prompt(6))
        assert changed != expected
        assert greedy(other, prompt(6), custom_generate=custom_generate) == changed
        assert engines[-1].target.model is other
    assert greedy(model, prompt(6), custom_generate=custom_generate) == expected


def test_a_filled_cache_is_refused() -> None:
    cache = MODEL(PROMPT, use_cache=True).past_key_values
    longer = torch.cat([PROMPT, PROMPT], dim=1)
    with pytest.raises(InvalidPromptError, match="the cache is filled"):
        MODEL.generate(longer, past_key_values=cache, max_new_tokens=5, custom_generate=drafting())


def test_a_model_of_states_alone() -> None:
    """Its cache is called otherwise by some versions of transformers, and has no length."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 6, "state_size": 4}
    model = MambaForCausalLM(MambaConfig(**sizes, eos_token_id=None, bos_token_id=None)).eval()
    assert greedy(model, [*range(1, 8)], custom_generate=drafting()) == greedy(model, [*range(1, 8)])


def test_a_streamer_takes_one_sequence() -> None:
    with pytest.raises((InvalidParameterError, ValueError)):
        MODEL.generate(BATCH, max_new_tokens=5, streamer=Collecting(), custom_generate=drafting())


def test_method_and_settings_are_checked_at_once() -> None:
    with pytest.raises(UnknownMethodError, match="layerskip"):
        custom_generate("layerskp")
    with pytest.raises(InvalidSettingError, match="exit_layer"):
        custom_generate("layerskip", {"exit_layer": 0})


@pytest.mark.parametrize(
    ("arguments", "params"),
    [
        ({"temperature": 0.7, "top_k": 9, "top_p": 0.8}, {"temperature": 0.7, "top_k": 9, "top_p": 0.8}),
        ({"top_k": 0, "min_p": 0.1}, {"temperature": 1.0, "min_p": 0.1}),
        (
            {"repetition_penalty": 1.3, "temperature": 0.7, "top_k": 0},
            {"repetition_penalty": 1.3, "temperature": 0.7},
        ),
    ],
)
def test_filters_are_parameters(arguments: dict[str, Any], params: dict[str, Any]) -> None:
    loop = custom_generate("autoregressive", seed=7)
    text = MODEL.generate(
        PROMPT, do_sample=True, max_new_tokens=12, eos_token_id=None, **arguments, custom_generate=loop
    )
    engine = Engine(MODEL, method="autoregressive")
    own = engine.generate(PROMPT[0].tolist(), seed=7, max_new_tokens=12, ignore_eos=True, **params)
    assert text[0, PROMPT.shape[1] :].tolist() == list(own.token_ids)


def test_a_penalty_is_a_parameter() -> None:
    """Of greedy text, too."""
    penalty = RepetitionPenaltyLogitsProcessor(1.1)
    assert _sampling_of(LogitsProcessorList([penalty])) == {"repetition_penalty": 1.1}


@pytest.mark.parametrize(
    "processors",
    [
        [TopPLogitsWarper(0.9), TopKLogitsWarper(5)],
        [TopKLogitsWarper(5, min_tokens_to_keep=7)],
        [TopKLogitsWarper(5, filter_value=-3.0)],
        [TemperatureLogitsWarper(0.5), AvoidsTheLastToken()],
        [RepetitionPenaltyLogitsProcessor(1.1, prompt_ignore_length=3)],
    ],
    ids=["order", "least", "value", "own", "ignored prompt"],
)
def test_other_processors_are_not(processors: list[LogitsProcessor]) -> None:
    assert _sampling_of(LogitsProcessorList(processors)) is None
