"""The engine: prompts, streams, seeds, threads."""

import copy
import dataclasses
import functools
from concurrent.futures import ThreadPoolExecutor
from typing import Any, get_type_hints

import pytest
import torch
from transformers import LogitsProcessor, MaxLengthCriteria

from helpers.checkpoints import CHAT_TEMPLATE, make_tokenizer
from helpers.drafts import FINDERS
from helpers.models import build, prompt
from helpers.runs import METHODS_OF_ANY_MODEL as METHODS
from selfspec import Engine, EngineOptions, SamplingParams
from selfspec.engine_options import EngineKeywords
from selfspec.errors import InvalidParameterError, InvalidPromptError
from selfspec.types import Generation

MODEL = build("llama")
PROMPT = [5, 17, 3, 99, 42, 8]
SETTINGS: dict[str, dict[str, Any]] = {
    "uniform": {"skip_ratio": 0.5, "confidence_threshold": 0.0},
    "layerskip": {"exit_layer": 3, "draft_length": 4},
    "layerskip-fs": {"exit_layer": 4},
    "layerskip-dv": {"exit_layer": 4, "threshold": 0.1},
}


def engine(method: str = "layerskip", **options: Any) -> Engine:
    return Engine(MODEL, make_tokenizer(), method, settings=SETTINGS.get(method), **options)


def drafts(result: Generation) -> bool:
    return result.drafted > 0 and result.accepted > 0


class PrefersEvenTokens(LogitsProcessor):
    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return scores + 0.5 * (torch.arange(scores.shape[-1]) % 2 == input_ids.shape[1] % 2)


PARAMS = {
    "plain": SamplingParams(temperature=1.0, seed=1),
    "top-k top-p": SamplingParams(temperature=0.7, seed=-5, top_k=20, top_p=0.9),
    "min-p penalty": SamplingParams(temperature=1.3, seed=2**70, min_p=0.05, repetition_penalty=1.2),
    "own processor": SamplingParams(temperature=1.0, seed=7, logits_processors=(PrefersEvenTokens(),)),
    "greedy penalty": SamplingParams(repetition_penalty=1.5),
    "greedy processor": SamplingParams(logits_processors=(PrefersEvenTokens(),)),
}
EVERY_KIND = ("uniform", "layerskip-dv", "swift", "token-recycling", "auto")
"""Methods that draft in every way there is: chains and trees, with scores and without, of one part and of several."""
CASES = [(method, kind) for method in METHODS for kind in PARAMS if method in EVERY_KIND or kind.endswith("processor")]


@functools.cache
def plain_ids(kind: str) -> tuple[int, ...]:
    return engine("autoregressive").generate(PROMPT, PARAMS[kind], max_new_tokens=60).token_ids


@pytest.mark.in_turn(3)
@pytest.mark.parametrize(("method", "kind"), CASES)
def test_the_text_depends_on_the_seed_alone(method: str, kind: str) -> None:
    params = PARAMS[kind]
    chunk = 1024 if params.seed is None else 3
    result = engine(method, prefill_chunk=chunk).generate(PROMPT, params, max_new_tokens=60)
    assert result.token_ids == plain_ids(kind)
    if method in FINDERS:  # what finds its drafts in the text finds little in one that repeats itself little
        assert result.drafted > 0 or params.repetition_penalty > 1
    else:
        assert method == "autoregressive" or drafts(result)


def test_seeds_differ_and_unseeded_requests_do_too() -> None:
    texts = {engine().generate(PROMPT, temperature=1.0, seed=seed).token_ids for seed in range(4)}
    assert len(texts) == 4
    unseeded = {engine().generate(PROMPT, temperature=1.0).token_ids for _ in range(2)}
    assert len(unseeded) == 2
    speculative = SamplingParams(temperature=1.0, seed=3, acceptance="speculative")
    assert engine().generate(PROMPT, speculative).token_ids == engine().generate(PROMPT, speculative).token_ids


def test_a_stream_is_the_text_in_pieces_and_says_who_chose_each_token() -> None:
    stream = engine().stream(PROMPT, max_new_tokens=50)
    pieces = list(stream)
    result = stream.result
    assert "".join(piece.text for piece in pieces) == result.text
    assert tuple(piece.token_id for piece in pieces) == result.token_ids
    assert tuple(piece.origin for piece in pieces) == result.origins
    assert result.origins[0] == "prefill"
    assert result.origins.count("draft") == result.accepted > 0


def test_the_result_of_a_stream_reads_the_rest_of_it() -> None:
    stream = engine().stream(PROMPT, max_new_tokens=20)
    next(stream)
    assert stream.result.new_token_count == 20


def test_counts_agree_with_the_records() -> None:
    result = engine().generate(PROMPT, max_new_tokens=50)
    assert result.round_count == len(result.rounds)
    assert 1 + sum(len(record.token_ids) for record in result.rounds) == result.new_token_count == 50
    assert result.token_ids[1:] == tuple(token for record in result.rounds for token in record.token_ids)
    assert result.acceptance_rate == result.accepted / result.drafted
    assert result.mean_generated_length == 49 / result.round_count
    assert all(record.attention_share == record.mlp_share == 0.5 for record in result.rounds if record.drafted)


def test_threads_do_not_disturb_each_other() -> None:
    shared = engine("layerskip-dv")
    prompts = [[seed, *PROMPT, 2 * seed] for seed in range(8)]
    alone = [engine("autoregressive").generate(prompt, max_new_tokens=24).token_ids for prompt in prompts]
    with ThreadPoolExecutor(4) as pool:
        together = list(pool.map(lambda prompt: shared.generate(prompt, max_new_tokens=24), prompts))
    assert [result.token_ids for result in together] == alone
    assert all(drafts(result) for result in together)


def test_streams_may_be_read_in_turns() -> None:
    shared = engine()
    streams = [shared.stream([first, *PROMPT], max_new_tokens=30) for first in (1, 2, 3)]
    for _ in range(30):
        for stream in streams:
            next(stream)
    for first, stream in zip((1, 2, 3), streams, strict=True):
        assert (
            stream.result.token_ids == engine("autoregressive").generate([first, *PROMPT], max_new_tokens=30).token_ids
        )


@pytest.mark.parametrize("prompt", [PROMPT, tuple(PROMPT), torch.tensor(PROMPT), torch.tensor([PROMPT])])
def test_token_ids_come_in_many_forms(prompt: Any) -> None:
    assert engine().encode(prompt) == PROMPT


def test_chat_messages_go_through_the_template() -> None:
    tokenizer = make_tokenizer(chat_template=CHAT_TEMPLATE)
    chat = Engine(MODEL, tokenizer, method="autoregressive").encode([{"role": "user", "content": "hi"}])
    assert tokenizer.decode(chat) == "user: hi\nassistant:"
    with pytest.raises(InvalidPromptError, match="chat template"):
        engine().encode([{"role": "user", "content": "hi"}])


def test_without_a_tokenizer_ids_work_and_text_does_not() -> None:
    bare = Engine(MODEL, method="layerskip")
    result = bare.generate(PROMPT, max_new_tokens=8)
    assert result.text == ""
    assert result.token_ids == engine().generate(PROMPT, max_new_tokens=8).token_ids
    with pytest.raises(InvalidPromptError, match="tokenizer"):
        bare.generate("text")
    with pytest.raises(InvalidParameterError, match="tokenizer"):
        bare.generate(PROMPT, stop="x")


@functools.cache
def plain_end(**parameters: Any) -> Generation:
    return engine("autoregressive").generate(PROMPT, **parameters)


CRITERION = MaxLengthCriteria(len(PROMPT) + 33)


@pytest.mark.parametrize("method", METHODS)
def test_every_end_is_where_plain_decoding_ends(method: str) -> None:
    plain = plain_end(max_new_tokens=60)
    stop = make_tokenizer().decode(plain.token_ids[30:32])
    for ending in (
        {"stop_token_ids": (plain.token_ids[25],)},
        {"stop": (stop,)},
        {"stopping_criteria": (CRITERION,)},
        {"max_new_tokens": 1},
        {"max_new_tokens": 2},
    ):
        parameters = {"max_new_tokens": 60, **ending}
        expected = plain_end(**parameters)
        result = engine(method).generate(PROMPT, **parameters)
        assert expected.new_token_count < 60
        assert (result.token_ids, result.finish_reason, result.text) == (
            expected.token_ids,
            expected.finish_reason,
            expected.text,
        )


def test_to_dict_holds_what_the_command_line_prints() -> None:
    result = engine().generate(PROMPT, max_new_tokens=10)
    printed = result.to_dict()
    assert printed["token_ids"] == list(result.token_ids)
    assert printed["round_count"] == result.round_count
    settings = printed["settings"]
    assert (settings["exit_layer"], settings["draft_length"], settings["draft_bits"]) == (3, 4, 16)
    assert set(printed) >= {"text", "seconds", "tokens_per_second", "peak_memory_bytes", "finish_reason"}


def test_warm_up_prepares_the_method_and_teaches_it_nothing() -> None:
    told: list[str] = []
    engine = Engine(build("llama"), method="knapspec")
    assert engine.method.state().values["latency_profile"] is None
    engine.warmup(told.append)
    assert engine.method.state().values["latency_profile"] is not None
    assert told == ["forwards of 1 to 64 rows", "latencies of attention and MLP"]
    wanted = Engine(build("llama"), method="autoregressive").generate(prompt(9), max_new_tokens=20)
    result = engine.generate(prompt(9), max_new_tokens=20)
    assert result.token_ids == wanted.token_ids
    swift = Engine(build("llama"), method="swift")
    before = swift.method.state()
    swift.warmup()
    assert swift.method.state().values == before.values


def test_warm_up_fits_a_short_context() -> None:
    model = copy.deepcopy(build("llama"))
    model.config.max_position_embeddings = 20
    engine = Engine(model, method="autoregressive")
    widths: list[int] = []
    model.get_input_embeddings().register_forward_pre_hook(lambda _, arguments: widths.append(len(arguments[0])))
    engine.warmup()
    assert widths == [1, 2, 4, 8, 16]


def test_options_are_one_object_or_keywords_and_unknown_ones_are_refused() -> None:
    options = EngineOptions(settings=SETTINGS["layerskip"], max_batch=3)
    assert Engine(MODEL, None, "layerskip", options).options == options
    assert Engine(MODEL, None, "layerskip", options, max_batch=5).options == dataclasses.replace(options, max_batch=5)
    with pytest.raises(InvalidParameterError, match="there is no option 'max_bach'; did you mean 'max_batch'"):
        Engine(MODEL, max_bach=3)
    with pytest.raises(InvalidParameterError, match=r"dtype, .* are for a model that is loaded by name"):
        Engine(MODEL, dtype="float32")
    names = {field.name for field in dataclasses.fields(EngineOptions)}
    assert names == set(get_type_hints(EngineKeywords)), "the keywords of editors and type checkers"


@pytest.mark.parametrize(
    "wrong",
    [{"prefill_chunk": 0}, {"prefix_cache": -1}, {"max_batch": 0}, {"max_waiting": -1}, {"memory_limit": 0}]
    + [{"cache_bits": bits} for bits in (0, 4, 16)]
    + [{"max_read_seconds": seconds} for seconds in (0.0, -1.0)],
)
def test_options_out_of_range_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(InvalidParameterError, match=next(iter(wrong))):
        EngineOptions(**wrong)
